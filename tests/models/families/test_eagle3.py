"""EAGLE-3 heads: what they propose is what the published layout says, and answers are those without."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import drafting, free_drafter
from eagle3 import DIM, DRAFT_VOCAB, EPS, HEADS, KEYS, THETA, settings, tensors, write
from family import ask
from parity import ROWS, LoadedModels, greedy, make_llm
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import CheckpointError, ConfigError, InputError
from sensorium.engine.speculative_config import DraftLimits
from sensorium.models.layers.basic import EmbeddingTable
from sensorium.models.text.eagle3 import Eagle3Head, eagle3_spec
from torch import Tensor
from torch.nn import functional as F

LIMITS = DraftLimits(3, predicted=3, method="eagle3", model="x")


def sizes(llm: LLM) -> tuple[int, int]:
    model = llm.engine.loop.core.executor.runner.model
    return model.vocab_size, model.hidden_size


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate `[heads, n, dim]`, halves of a head together."""
    angles = positions[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def layer(w: dict[str, Tensor], embedded: Tensor, hidden: Tensor, positions: Tensor, norms_residual: bool) -> Tensor:
    """Return the residual stream of the layers over a whole sequence."""
    normed = rms(hidden, w["midlayer.hidden_norm.weight"])
    x = torch.cat((rms(embedded, w["midlayer.input_layernorm.weight"]), normed), -1)
    stream = block(w, "midlayer", x, normed if norms_residual else hidden, positions)
    number = 1
    while f"layers.{number}.input_layernorm.weight" in w:
        prefix = f"layers.{number}"
        stream = block(w, prefix, rms(stream, w[f"{prefix}.input_layernorm.weight"]), stream, positions)
        number += 1
    return stream


def block(w: dict[str, Tensor], prefix: str, x: Tensor, stream: Tensor, positions: Tensor) -> Tensor:
    """Return the residual stream after attention, which reads `x`, and the MLP."""
    q, k, v = (
        (x @ w[f"{prefix}.self_attn.{name}_proj.weight"].T).view(len(x), -1, DIM).transpose(0, 1) for name in ("q", "k", "v")
    )
    q, k = rotate(q, positions), rotate(k, positions).repeat_interleave(HEADS // KEYS, 0)
    attended = F.scaled_dot_product_attention(q, k, v.repeat_interleave(HEADS // KEYS, 0), is_causal=True)
    stream = stream + attended.transpose(0, 1).flatten(1) @ w[f"{prefix}.self_attn.o_proj.weight"].T
    y = rms(stream, w[f"{prefix}.post_attention_layernorm.weight"])
    gate, up = y @ w[f"{prefix}.mlp.gate_proj.weight"].T, y @ w[f"{prefix}.mlp.up_proj.weight"].T
    return stream + (F.silu(gate) * up) @ w[f"{prefix}.mlp.down_proj.weight"].T


def propose(
    w: dict[str, Tensor], table: Tensor, ids: list[int], states: Tensor, count: int, norms_residual: bool = False
) -> list[int]:
    """Return the tokens that the head drafts after `ids`. `states`: of the model's layers, `[len(ids) - 1, 3 * hidden]`."""
    drafted, hidden = list(ids), states @ w["fc.weight"].T
    for _ in range(count):
        tokens = torch.tensor(drafted[1:])
        stream = layer(w, table[tokens], hidden, torch.arange(len(tokens)), norms_residual)
        best = int((rms(stream[-1:], w["norm.weight"]) @ w["lm_head.weight"].T).argmax())
        drafted.append(best + int(w["d2t"][best]))
        hidden = torch.cat((hidden, stream[-1:]))
    return drafted[len(ids) :]


def propose_at_once(w: dict[str, Tensor], table: Tensor, ids: list[int], states: Tensor, count: int) -> list[int]:
    """Return the tokens that a head with the mask token MASK drafts after `ids`, in one pass; see `propose`."""
    tokens = torch.tensor([*ids[1:], *[MASK] * (count - 1)])
    kept = torch.cat((states, w["mask_hidden"].view(1, -1).expand(count - 1, -1)))
    stream = layer(w, table[tokens], kept @ w["fc.weight"].T, torch.arange(len(tokens)), False)
    best = (rms(stream[-count:], w["norm.weight"]) @ w["lm_head.weight"].T).argmax(-1).tolist()
    return [token + int(w["d2t"][token]) for token in best]


@pytest.fixture(scope="module")
def head(loaded: LoadedModels, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a row's name to the folder of a head."""
    root = tmp_path_factory.mktemp("heads")

    def build(name: str, **more: Any) -> Path:
        vocab, hidden = sizes(loaded.llm(name))
        return write(
            root / f"{name}-{'-'.join(more)}", vocab, hidden, hidden, eagle_aux_hidden_state_layer_ids=[1, 2, 3], **more
        )

    return build


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3, **more}}


MASK = 7
AT_ONCE = {"ptd_token_id": MASK, "parallel_drafting": True}


@pytest.mark.parametrize(
    "more",
    [{}, {"norm_before_residual": True}, {"num_hidden_layers": 3}, AT_ONCE, {**AT_ONCE, "num_hidden_layers": 2}],
    ids=["plain", "normed", "layers", "at once", "layers at once"],
)
def test_proposals_are_those_of_the_published_layout(loaded: LoadedModels, head: Any, more: dict[str, Any]) -> None:
    row, folder = ROWS["text-llama"], head("text-llama", **more)
    with make_llm(row, loaded.folder("text-llama"), **options(folder), enable_prefix_caching=False) as llm:
        runner, seen, states = llm.engine.loop.core.executor.runner, list[tuple[int, ...]](), list[Tensor]()
        real = runner.predictor.predict

        def spy(model: Any, parts: Any) -> Any:
            (part,) = parts
            states.append(part.states.clone())
            seen.extend(real(model, parts))
            return seen[-1:]

        runner.predictor.predict = spy
        with drafting(llm, None):
            (output,) = llm.generate(ask(row, "", 3).ours, greedy(10), use_tqdm=False)
        table = runner.model.language_model.embed_tokens.weight.float()
        w = load_file(folder / "model.safetensors")
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    layers = layer_outputs(loaded.oracle("text-llama")[0], ids[:-1])
    kept = torch.cat(states)
    torch.testing.assert_close(kept, layers, rtol=1e-4, atol=1e-4)
    sampled = [tokens for tokens in seen if tokens]
    length = len(output.prompt_token_ids)
    assert len(sampled) == 10
    norms_residual = "norm_before_residual" in more
    for number, tokens in enumerate(sampled):
        known, states_of = ids[: length + number + 1], kept[: length + number]
        if "ptd_token_id" in more:
            assert tokens == tuple(propose_at_once(w, table, known, states_of, 3))
        else:
            assert tokens == tuple(propose(w, table, known, states_of, 3, norms_residual))
    assert len(set(sampled)) > 3


def layer_outputs(model: Any, ids: list[int]) -> Tensor:
    """Return the outputs of the first three layers of transformers' model, side by side."""
    outputs: list[Tensor] = []
    hooks = [one.register_forward_hook(lambda *call: outputs.append(call[-1])) for one in model.model.layers[:3]]
    with torch.inference_mode():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.cat([(one[0] if isinstance(one, tuple) else one).view(len(ids), -1) for one in outputs], 1)


PARAMS = SamplingParams(temperature=0.6, seed=5, max_tokens=24, ignore_eos=True, logprobs=2, n=2)


@pytest.mark.parametrize(
    ("name", "more"),
    [("text-llama", {}), ("qwen2_vl", {}), ("gemma3", {}), ("text-qwen3_next", {}), ("qwen2_vl", AT_ONCE)],
)
def test_answers_are_those_without(name: str, more: dict[str, Any], loaded: LoadedModels, head: Any) -> None:
    """Twice, with prefix hits, and after sleep."""
    row = ROWS[name]
    prompts = [ask(row, case, number).ours for number, case in enumerate(row.default_cases())]
    with make_llm(row, loaded.folder(name), **options(head(name, **more))) as llm:
        with drafting(llm, None):
            expected = [output.outputs for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
        runner = llm.engine.loop.core.executor.runner
        plan = llm.explain()
        assert plan.draft_cache == sum(tensor.nbytes for tensor in runner.predictor.cache.tensors) > 0
        assert plan.draft_model > 0
        for _ in range(2):
            with drafting(llm, free_drafter(llm.engine.info.vocab_size, LIMITS)) as scheduler:
                scheduler.drafts.drafter.rates.rate = lambda name, matched: 0.9
                outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
                assert [output.outputs for output in outputs] == expected
                (stats,) = llm.stats.drafts
                assert stats.proposer == "eagle3"
                assert stats.num_drafted > 0
                assert not stats.failed
            llm.sleep()
            llm.wake_up()


@pytest.mark.in_process
def test_the_model_is_freed_asleep_and_the_head_reads_the_new_one(loaded: LoadedModels, head: Any) -> None:
    with make_llm(ROWS["text-llama"], loaded.folder("text-llama"), **options(head("text-llama"))) as llm:
        runner = llm.engine.loop.core.executor.runner
        for _ in range(2):
            assert runner.predictor._layer.head.shared[0] is runner.model.language_model.embed_tokens
            model, table = weakref.ref(runner.model), weakref.ref(runner.model.language_model.embed_tokens.weight)
            llm.sleep()
            gc.collect()
            assert model() is None
            assert table() is None
            llm.wake_up()


@pytest.mark.in_process
def test_a_head_that_cannot_be_read_leaves_the_engine_asleep(
    loaded: LoadedModels, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, models = ROWS["text-llama"], []
    prompt = ask(row, "", 1).ours

    def load(model: Any) -> Any:
        models.append(weakref.ref(model))
        raise torch.OutOfMemoryError("out of memory")

    with make_llm(row, loaded.folder("text-llama"), **options(head("text-llama"))) as llm:
        runner = llm.engine.loop.core.executor.runner
        expected = llm.generate(prompt, greedy(8), use_tqdm=False)[0].outputs
        llm.sleep()
        with monkeypatch.context() as patch:
            patch.setattr(runner.predictor, "_load_head", load)
            with pytest.raises(InputError, match="too little memory") as caught:
                llm.wake_up()
        assert caught.value is not None  # while the error is still referenced
        assert llm.asleep
        gc.collect()
        assert models[0]() is None
        assert runner.model.language_model.embed_tokens.weight.is_meta
        assert not runner.caches.tensors
        assert not runner.predictor.cache.tensors
        llm.wake_up()
        assert llm.generate(prompt, greedy(8), use_tqdm=False)[0].outputs == expected


def test_preemption_and_little_room(loaded: LoadedModels, head: Any) -> None:
    row, params = ROWS["text-llama"], SamplingParams(temperature=0.8, seed=2, max_tokens=60, ignore_eos=True)
    small = {"max_model_len": 96, "max_num_seqs": 5, "block_size": 4, "kv_cache_memory_bytes": 260_000}
    prompts = [{"prompt": f"def f{number}(x): return x + x * " + "x + " * number} for number in range(8)]
    with make_llm(row, loaded.folder("text-llama"), **options(head("text-llama")), **small) as llm:
        with drafting(llm, None):
            expected = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
        with drafting(llm, free_drafter(llm.engine.info.vocab_size, LIMITS)) as scheduler:
            scheduler.drafts.drafter.rates.rate = lambda name, matched: 0.9
            assert [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)] == expected
            assert llm.stats.drafts[0].num_drafted > 0
        assert llm.stats.preemptions > 0


def test_the_method_follows_from_the_model(loaded: LoadedModels, head: Any) -> None:
    row, folder = ROWS["text-llama"], head("text-llama")
    with make_llm(row, loaded.folder("text-llama"), speculative_config={"model": str(folder)}) as llm:
        assert llm.config.speculative_config == {"model": str(folder), "method": "eagle3"}
    with pytest.raises(ConfigError, match="give 'eagle3'"):
        make_llm(row, loaded.folder("text-llama"), speculative_config={"model": str(folder), "method": "draft_model"})
    with pytest.raises(ConfigError, match="is named Eagle3"):
        make_llm(row, loaded.folder("text-llama"), **options(loaded.folder("text-llama")))


def test_heads_that_do_not_fit_are_refused(loaded: LoadedModels, tmp_path: Path) -> None:
    row, (vocab, hidden) = ROWS["text-llama"], sizes(loaded.llm("text-llama"))
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}

    def refused(kind: type[Exception], reason: str, name: str = "text-llama", **changes: Any) -> None:
        folder = write(tmp_path / "head", **({"vocab": vocab, "hidden": hidden, "target": hidden} | ids | changes))
        with pytest.raises(kind, match=reason):
            make_llm(ROWS[name], loaded.folder(name), **options(folder))

    refused(ConfigError, "has a vocabulary of 999 tokens, and the model", vocab=999)
    refused(ConfigError, "is 32 wide without embeddings of its own, and the model is", hidden=32)
    refused(ConfigError, "hidden states after 1, 2, 9 layers, and the model has 3", eagle_aux_hidden_state_layer_ids=[1, 2, 9])
    refused(ConfigError, "has none of mask_token_id", parallel_drafting=True)
    refused(ConfigError, "ptd_token_id=9999, which must be an id", parallel_drafting=True, ptd_token_id=9999)
    refused(CheckpointError, "mask_hidden", parallel_drafting=True, mask_token_id=5)
    refused(CheckpointError, "fc.weight", target=hidden + 8)
    refused(ConfigError, "cannot draft for a Whisper, which keeps no hidden states", "whisper")
    folder = write(tmp_path / "head", vocab, hidden, hidden, **ids)
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {"d2t": stored["d2t"] + vocab}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="d2t names tokens"):
        make_llm(row, loaded.folder("text-llama"), **options(folder))
    del stored["d2t"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no d2t"):
        make_llm(row, loaded.folder("text-llama"), **options(folder))


def test_a_head_needs_d2t_for_a_smaller_vocabulary_only() -> None:
    device = torch.device("cpu")
    for vocab in (101, DRAFT_VOCAB):
        table = EmbeddingTable(vocab, 32, torch.float32, device)
        head = Eagle3Head(eagle3_spec(settings(vocab, 32), 24), 32, table, torch.float32, device)
        stored = {name: tensor for name, tensor in tensors(vocab, 32, 32).items() if name != "d2t"}
        for read in (lambda stored=stored, head=head: head.check(stored), lambda s=stored, h=head: h.load(s.items())):
            if vocab > DRAFT_VOCAB:
                with pytest.raises(CheckpointError, match="has no d2t"):
                    read()
            else:
                read()
        assert head.target_ids.tolist() == list(range(DRAFT_VOCAB))


def test_layers_are_read_as_both_engines_write_them() -> None:
    assert eagle3_spec(settings(101, 32), 24).layers == (2, 12, 21)
    assert eagle3_spec(settings(101, 32, eagle_aux_hidden_state_layer_ids=[2, 12, 21]), 24).layers == (2, 12, 21)
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 11, 20]}
    assert eagle3_spec(settings(101, 32, eagle_config=nested), 24).layers == (2, 12, 21)
