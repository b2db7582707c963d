"""Adapters of requests that change head, token embeddings and norms, or replace whole modules, as `modules_to_save` does."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from family import ask
from lora import compare, hook, logprobs, matrices, table_matrices, table_tensors, tokens, write
from parity import ROWS, LoadedModels, greedy, make_llm
from sensorium.callers.errors import CheckpointError

pytestmark = pytest.mark.in_process

CASES = {"gemma3": "i", "llava": "i", "text-cohere2": ""}
REPLACED = {
    "qwen2_vl": r"lm_head$|embed_tokens$|language_model\.norm$|layers\.1\.input_layernorm$|merger|layers\.0\..*up_proj$",
    "gemma3": r"layers\.1\.(post_attention|pre_feedforward)_layernorm$|mm_soft_emb_norm$|layers\.0\.self_attn\.k_proj$",
    "llava": r"multi_modal_projector|lm_head$|post_attention_layernorm$",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoadedModels:
    return LoadedModels(tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("name", CASES)
def test_head_and_embeddings(world: LoadedModels, tmp_path: Path, name: str) -> None:
    """Tied or not, each of the two has matrices of its own; rows of the base model in the same steps keep their bits."""
    row, base = ROWS[name], world.folder(name)
    model, processor = row.load(base)
    pairs = matrices(model, r"lm_head$|layers\.0\..*(q_proj|qkv_proj)$")
    tables = table_matrices(model, r"embed_tokens$")
    folder = write(tmp_path / "adapter", str(base), pairs, more=table_tensors(tables))
    question, params = ask(row, CASES[name], 0), greedy(8, logprobs=3, prompt_logprobs=0)
    with make_llm(row, base, enable_lora=True, batch_invariant=True) as llm:
        info = llm.load_adapter("mine", folder)
        assert 0 < info.num_bytes <= llm.explain().adapters
        (plain,) = llm.generate(question.ours, params, use_tqdm=False)
        (alone,) = llm.generate(question.ours, params, use_tqdm=False, adapter="mine")
        both = llm.generate([question.ours] * 3, params, use_tqdm=False, adapter=[None, "mine", None])
        assert [logprobs(one) for one in both] == [logprobs(plain), logprobs(alone), logprobs(plain)]
        assert logprobs(plain) != logprobs(alone)
        compare(llm, row, model, processor, question)
        every = pairs | tables
        hook(model, every, dict.fromkeys(every, 2.0))
        compare(llm, row, model, processor, question, adapter="mine")
        with pytest.raises(AssertionError):
            compare(llm, row, model, processor, question)


def replace_modules(model: torch.nn.Module, chosen: str) -> dict[str, torch.Tensor]:
    """Give modules new weights in place. Return them under the names of peft."""
    tensors, gen = dict[str, torch.Tensor](), torch.Generator().manual_seed(3)
    for name, module in model.named_modules():
        if re.search(chosen, name):
            for key, parameter in list(module.named_parameters(recurse=False)):
                fresh = parameter * (1 + torch.randn(parameter.shape, generator=gen) / 5)
                setattr(module, key, torch.nn.Parameter(fresh.detach()))
                tensors[f"base_model.model.{name}.{key}"] = fresh.detach().clone()
    return tensors


@pytest.mark.parametrize("name", REPLACED)
def test_whole_modules(world: LoadedModels, tmp_path: Path, name: str) -> None:
    row, base = ROWS[name], world.folder(name)
    model, processor = row.load(base)
    changed = copy.deepcopy(model)
    pairs = matrices(model, r"layers\.1\..*down_proj$")
    folder = write(tmp_path / "adapter", str(base), pairs, more=replace_modules(changed, REPLACED[name]))
    hook(changed, pairs, dict.fromkeys(pairs, 2.0))
    question = ask(row, "i", 0)
    with make_llm(row, base, enable_lora=True) as llm:
        llm.load_adapter("mine", folder)
        compare(llm, row, changed, processor, question, adapter="mine")
        compare(llm, row, model, processor, question)
        alone = [llm.generate(question.ours, greedy(8), use_tqdm=False, adapter=one)[0] for one in ("mine", None)]
        both = llm.generate([question.ours] * 2, greedy(8), use_tqdm=False, adapter=["mine", None])
        assert tokens(both) == tokens(alone)
        with pytest.raises(AssertionError):
            compare(llm, row, model, processor, question, adapter="mine")


def test_rows_of_single_tokens(world: LoadedModels, tmp_path: Path) -> None:
    """A head that is tied to the table gets them, too. The rows of others in the same steps keep their bits."""
    row, base = ROWS["qwen3_vl"], world.folder("qwen3_vl", variant="tied")
    model, processor = row.load(base)
    weight, token_ids = model.get_input_embeddings().weight, [500, 3, 4, 5, *range(20, 300, 3)]
    rows = torch.randn(len(token_ids), weight.shape[1], generator=torch.Generator().manual_seed(4)) / 8
    name = "base_model.model.model.language_model.embed_tokens.token_adapter.trainable_tokens_delta"
    folder = write(tmp_path / "adapter", str(base), {}, more={name: rows}, trainable_token_indices=token_ids)
    other = write(tmp_path / "other", str(base), {}, more={name: rows}, trainable_token_indices=token_ids[::-1])
    question, params = ask(row, "i", 0), greedy(8, logprobs=3, prompt_logprobs=0)
    prompts, names = [question.ours] * 3, ["mine", None, "other"]
    with make_llm(row, base, enable_lora=True, batch_invariant=True, max_num_batched_tokens=48) as llm:
        infos = [llm.load_adapter(path.name.replace("adapter", "mine"), path) for path in (folder, other)]
        assert infos[0].identity != infos[1].identity
        assert infos[0].num_bytes < 2 * (rows.nbytes + 256 * weight.shape[1] * weight.itemsize)  # not whole tables, but panels
        alone = [llm.generate(question.ours, params, use_tqdm=False, adapter=one)[0] for one in names]
        both = llm.generate(prompts, params, use_tqdm=False, adapter=names)
        assert [logprobs(one) for one in both] == [logprobs(one) for one in alone]
        compare(llm, row, model, processor, question)
        weight.data[token_ids] = rows
        compare(llm, row, model, processor, question, adapter="mine")
    with make_llm(row, folder) as merged:
        compare(merged, row, model, processor, question)


def test_tables_of_the_base_model_beside_their_matrices(world: LoadedModels, tmp_path: Path) -> None:
    """peft stores them; they change nothing and take no room, unless they differ."""
    row, base = ROWS["llava"], world.folder("llava")
    model, processor = row.load(base)
    pairs, tables = matrices(model, r"lm_head$"), table_matrices(model, r"embed_tokens$")
    own = {name: model.get_submodule(name).weight.detach().clone() for name in (*pairs, *tables)}
    stored = {f"base_model.model.{name}.base_layer.weight": weight for name, weight in own.items()}
    bare = write(tmp_path / "bare", str(base), pairs, more=table_tensors(tables))
    whole = write(tmp_path / "whole", str(base), pairs, more=table_tensors(tables) | stored)
    other = write(
        tmp_path / "other", str(base), pairs, more=table_tensors(tables) | {name: one * 1.5 for name, one in stored.items()}
    )
    question = ask(row, "i", 0)
    with make_llm(row, base, enable_lora=True) as llm:
        infos = [llm.load_adapter(folder.name, folder) for folder in (bare, whole, other)]
        assert infos[0].identity == infos[1].identity
        assert infos[2].num_bytes >= infos[0].num_bytes + sum(weight.nbytes for weight in own.values())
        for name in own:
            model.get_submodule(name).weight.data *= 1.5
        hook(model, pairs | tables, dict.fromkeys(pairs | tables, 2.0))
        compare(llm, row, model, processor, question, adapter="other")
        with make_llm(row, other) as merged:
            compare(merged, row, model, processor, question)


@pytest.mark.parametrize("name", ["qwen2_vl", "text-qwen3_next"])
def test_norms_of_heads_are_refused(world: LoadedModels, tmp_path: Path, name: str) -> None:
    """Attention and states read the weights of such norms without calling them."""
    row, base = ROWS[name], world.folder(name)
    stem = "model.layers.3.self_attn.q_norm" if name == "text-qwen3_next" else "model.language_model.layers.0.self_attn.q_norm"
    more = {f"base_model.model.{stem}.weight": torch.ones(4)}
    folder = write(tmp_path / "adapter", str(base), {}, more=more)
    with make_llm(row, base, enable_lora=True) as llm, pytest.raises(CheckpointError, match="q_norm"):
        llm.load_adapter("mine", folder)
