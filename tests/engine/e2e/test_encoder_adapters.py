"""Adapters of requests that change vision and audio towers and connectors: the oracle adds B(A(x)) to transformers' class."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from family import ask
from lora import compare, dora_tensors, hook, hook_dora, logprobs, magnitudes, matrices, tokens, write
from parity import ROWS, LoadedModels, greedy, make_llm
from sensorium.callers.errors import CheckpointError

pytestmark = pytest.mark.in_process

TOWER, DECODER = r"visual\.", r"language_model.*(q_proj|down_proj)$"
TARGETS = {
    "qwen2_vl": (r"visual\..*(qkv|attn\.proj|fc1|fc2|mlp\.[02])$|language_model.*q_proj$", "ii"),
    "qwen3_vl": (r"visual\..*(qkv|linear_fc[12])$", "i"),
    "llava": (r"vision_tower.*(q_proj|v_proj|fc1)$|multi_modal_projector.*linear_[12]$|language_model.*v_proj$", "i"),
    "gemma3": (r"vision_tower.*(k_proj|out_proj|fc2)$", "i"),
    "internvl": (r"vision_tower.*(q_proj|projection_layer|fc1)$|multi_modal_projector.*linear_[12]$", "i"),
    "qwen2_audio": (r"audio_tower.*(q_proj|v_proj|fc1)$|multi_modal_projector\.linear$", "a"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoadedModels:
    return LoadedModels(tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("name", TARGETS)
def test_answers_are_those_of_transformers(world: LoadedModels, tmp_path: Path, name: str) -> None:
    (chosen, items), row, base = TARGETS[name], ROWS[name], world.folder(name)
    model, processor = row.load(base)
    pairs = matrices(model, chosen)
    folder = write(tmp_path / "adapter", str(base), pairs)
    question = ask(row, items, 0)
    with make_llm(row, base, enable_lora=True) as llm:
        llm.load_adapter("mine", folder)
        compare(llm, row, model, processor, question)
        hooks = hook(model, pairs, dict.fromkeys(pairs, 2.0))
        compare(llm, row, model, processor, question, adapter="mine")
        with pytest.raises(AssertionError):
            compare(llm, row, model, processor, question)
        for handle in hooks:
            handle.remove()
        compare(llm, row, model, processor, question)


def test_dora_of_a_tower(world: LoadedModels, tmp_path: Path) -> None:
    row, base = ROWS["qwen2_vl"], world.folder("qwen2_vl")
    model, processor = row.load(base)
    pairs = matrices(model, TARGETS["qwen2_vl"][0])
    lengths = magnitudes(model, pairs)
    folder = write(tmp_path / "adapter", str(base), pairs, more=dora_tensors(lengths), use_dora=True)
    hook_dora(model, pairs, 2.0, lengths)
    with make_llm(row, base, enable_lora=True) as llm:
        llm.load_adapter("mine", folder)
        compare(llm, row, model, processor, ask(row, "i", 0), adapter="mine")


@pytest.fixture(scope="module")
def base(world: LoadedModels) -> Path:
    return world.folder("qwen2_vl")


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters: two of the decoder, two of the tower, and two that share the tower's part."""
    model, _ = ROWS["qwen2_vl"].load(base)
    root = tmp_path_factory.mktemp("several")
    towers = [matrices(model, f"{TOWER}.*(qkv|mlp.[02])$", seed=seed) for seed in range(3)]
    decoders = [matrices(model, DECODER, seed=seed) for seed in range(2)]
    chosen = {
        "decoder": decoders[0],
        "other_decoder": decoders[1],
        "tower": towers[0],
        "other_tower": towers[1],
        "both": towers[2] | decoders[0],
        "same_tower": towers[2] | decoders[1],
    }
    return {name: write(root / name, str(base), pairs) for name, pairs in chosen.items()}


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"engine_process": True}], ids=str)
def test_rows_are_kept_for_each_part_that_changes_the_tower(
    base: Path, folders: dict[str, Path], options: dict[str, Any]
) -> None:
    """Adapters of the decoder share the rows of the model itself, and two adapters those of one part of the tower."""
    image = ask(ROWS["qwen2_vl"], "i", 0).ours
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True, **options) as llm:
        for name, folder in folders.items():
            llm.load_adapter(name, folder)
        sources = {}
        for name in (None, *folders):
            (output,) = llm.generate(image, greedy(4), use_tqdm=False, adapter=name)
            sources[name] = encoded_by(output)
    new = {name for name, source in sources.items() if source == "encoded"}
    assert new == {None, "tower", "other_tower", "both"}


def encoded_by(output: Any) -> str:
    assert output.error is None
    (trace,) = output.trace
    return str(trace.encoder)


def test_bits_do_not_depend_on_the_batch(base: Path, folders: dict[str, Path]) -> None:
    """Items of several adapters in one step, in any order and with any rows beside them, have the bits of each alone."""
    row, names = ROWS["qwen2_vl"], [None, *folders]
    questions = [ask(row, "i" * (1 + seed % 2), seed % 3).ours for seed in range(len(names))]
    with make_llm(row, base, enable_lora=True, batch_invariant=True) as llm:
        for name, folder in folders.items():
            llm.load_adapter(name, folder)
        together = llm.generate(questions, greedy(8, logprobs=3), use_tqdm=False, adapter=names)
        alone = []
        for question, name in zip(questions, names, strict=True):
            llm.reset_mm_cache()
            llm.reset_prefix_cache()
            alone += llm.generate(question, greedy(8, logprobs=3), use_tqdm=False, adapter=name)
    assert tokens(together) == tokens(alone)
    assert [logprobs(one) for one in together] == [logprobs(one) for one in alone]


def test_a_reloaded_name_in_random_histories(base: Path, folders: dict[str, Path]) -> None:
    """A name whose content changes gets neither rows nor blocks of its earlier content."""
    rng, row = random.Random(0), ROWS["qwen2_vl"]
    questions = [ask(row, "i", seed).ours for seed in range(2)]
    with make_llm(row, base, enable_lora=True) as llm:
        expected = dict[tuple[str, int], Any]()
        for name, folder in folders.items():
            llm.load_adapter("it", folder)
            for number, question in enumerate(questions):
                (expected[name, number],) = tokens(llm.generate(question, greedy(12), use_tqdm=False, adapter="it"))
        assert len(set(expected.values())) > len(folders)
        for _ in range(20):
            name, number = rng.choice(sorted(folders)), rng.randrange(2)
            llm.load_adapter("it", folders[name])
            assert tokens(llm.generate(questions[number], greedy(12), use_tqdm=False, adapter="it")) == [expected[name, number]]


def test_sessions_and_sleep(base: Path, folders: dict[str, Path]) -> None:
    """Items of later turns are encoded with the adapter of the session; it comes back after sleep."""
    row, image = ROWS["qwen2_vl"], ask(ROWS["qwen2_vl"], "i", 0).ours
    with make_llm(row, base, enable_lora=True) as llm:
        llm.load_adapter("it", folders["both"])
        with llm.live({"prompt_token_ids": [5, 6, 7]}, greedy(4), adapter="it") as session:
            session.answer()
            before = list(session.token_ids)
            session.append(image)
            second = session.answer()
        whole = {"prompt_token_ids": second.prompt_token_ids, "multi_modal_data": image["multi_modal_data"]}
        assert list(second.prompt_token_ids[: len(before)]) == before
        asked = llm.generate(whole, greedy(4), use_tqdm=False, adapter="it")
        assert tokens([second]) == tokens(asked) != tokens(llm.generate(whole, greedy(4), use_tqdm=False))
        llm.sleep()
        llm.wake_up()
        assert tokens(llm.generate(whole, greedy(4), use_tqdm=False, adapter="it")) == tokens(asked)


def test_a_convolution_whose_patches_are_in_the_weights_order(world: LoadedModels, tmp_path: Path) -> None:
    """A pair of a patch embedding is applied as it is stored."""
    row, base = ROWS["qwen2_vl"], world.folder("qwen2_vl")
    model, processor = row.load(base)
    (name, (down, up)), *more = matrices(model, r"visual\.patch_embed\.proj$").items()
    assert not more
    folder = write(tmp_path / "adapter", str(base), {name: (down, up)})
    with make_llm(row, base, enable_lora=True) as llm:
        llm.load_adapter("mine", folder)

        def add(_: Any, inputs: Any, output: Any) -> Any:
            return output + (inputs[0].flatten(1) @ down.flatten(1).T @ up.flatten(1).T * 2).view_as(output)

        model.get_submodule(name).register_forward_hook(add)
        compare(llm, row, model, processor, ask(row, "i", 0), adapter="mine")


def test_layers_that_also_make_token_embeddings_are_refused(world: LoadedModels, tmp_path: Path) -> None:
    row, base = ROWS["gemma3n"], world.folder("gemma3n")
    model, _ = row.load(base)
    folder = write(tmp_path / "adapter", str(base), matrices(model, r"embed_vision\.embedding_projection$"))
    with make_llm(row, base, enable_lora=True) as llm, pytest.raises(CheckpointError, match="embed_vision"):
        llm.load_adapter("mine", folder)


def test_inputs_in_another_order_are_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight whose columns the model moves when it is loaded would need its other matrix moved, too."""
    row = ROWS["qwen2_vl"]
    model, _ = row.load(base)
    folder = write(tmp_path / "adapter", str(base), matrices(model, r"visual\..*fc2$"))
    with make_llm(row, base, enable_lora=True) as llm:
        llm.load_adapter("mine", folder)
        ours = type(llm.engine.loop.core.executor.runner.model)
        monkeypatch.setattr(ours, "convert_weights", lambda _, weights: ((name, one.flip(1)) for name, one in weights))
        with pytest.raises(CheckpointError, match="another order"):
            llm.load_adapter("mine", folder)


def test_the_memory_of_encoders_is_planned(base: Path, folders: dict[str, Path]) -> None:
    row = ROWS["qwen2_vl"]
    with make_llm(row, base) as llm:
        plain = llm.explain()
    with make_llm(row, base, enable_lora=True) as llm:
        plan, sizes = llm.explain(), [llm.load_adapter(name, folder).num_bytes for name, folder in folders.items()]
    assert plan.encoder_step > plain.encoder_step
    assert sum(sizes) <= plan.adapters
