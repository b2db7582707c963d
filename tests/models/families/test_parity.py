"""One suite that compares every family with transformers, driven by the rows of tests/families (tests/helpers/family.py).

The oracle reads each answer once, teacher-forced, with our positions: an answer is greedy if every token is the likeliest
after those before it. Another token is accepted only as a tie (top-2 margin below 1e-4). Ties are counted and printed;
logits have to agree everywhere, after a tie too.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import torch
from cpu import needs_int8
from family import Family, Question, ask, one_thread
from measured import peak_bytes
from parity import BLOCK, ROWS, TOKENS, Answered, LoadedModels, each, greedy, limit, make_llm, positions, record
from prompt_attention import ATTENTIONS
from safetensors.torch import load_file, save_file
from sensorium import LLM
from sensorium.callers.errors import CheckpointError, InputError, SensoriumError
from sensorium.engine.bidirectional_spans import find_spans, round_down
from sensorium.engine.frontend.input_processor import InputProcessor
from sensorium.engine.frontend.media import MultiModalSettings
from sensorium.engine.kv_cache.block_tables import MIN_BLOCKS
from sensorium.engine.kv_cache.groups import group_layers
from sensorium.engine.model_files import load_model_files
from sensorium.engine.setup import loader
from sensorium.engine.setup.resolve import load_processing
from sensorium.mm.fields import group_mergeable, merge
from sensorium.mm.media import gate
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.parse import MediaSource
from sensorium.mm.tiling.plan import MAX_RESIZED_PIXELS
from sensorium.models.weights import rename
from sensorium.processors.text.tokenizer import Tokenizer
from together import generate_together

HOW = [
    pytest.param(options, marks=[pytest.mark.full, *([needs_int8] if "quantization" in options else [])])
    for options in ({"dtype": "bfloat16"}, {"quantization": "int8"}, {"dtype": "bfloat16", "quantization": "int8"})
]
SEEDS = [pytest.param(seed, marks=[] if seed == 0 else pytest.mark.full) for seed in range(10)]


def check_logits(row: Family, answered: Answered) -> None:
    """Fail with the prompt, the largest difference and the first token whose logits are too far from the oracle's."""
    differences, most = (answered.ours - answered.theirs).abs().amax(-1), limit(row, answered.theirs)
    wrong = (~(differences < most)).nonzero().flatten().tolist()
    if wrong:
        sizes = {name: [np.shape(media) for media in several] for name, several in answered.question.data.items()}
        pytest.fail(
            f"logits of {len(wrong)} of {len(differences)} tokens ({len(answered.prompt)} in the prompt) are off by up to "
            f"{differences.max():.2g}, the limit is {most:.2g}; the first is token {wrong[0]} of "
            f"{answered.question.text!r}, {sizes}"
        )


def count_ties(row: Family, answered: Answered) -> int:
    """Assert that the answer is the oracle's, and return the number of ties in it."""
    check_logits(row, answered)
    table = answered.theirs[len(answered.prompt) - 1 :]
    behind = table.amax(-1) - table.gather(-1, torch.tensor(answered.ids)[:, None])[:, 0]
    assert behind.max() < 1e-4
    return int((behind > 0).sum())


def inputs_of(row: Family, folder: Path) -> InputProcessor:
    files, tokenizer = load_model_files(folder), Tokenizer(folder)
    info = load_processing(files, {}, tokenizer)
    assert info.prompt_attention == ATTENTIONS[row.prompt_attention]
    return InputProcessor(info, tokenizer, MultiModalSettings(dtype=torch.float32), 1 << 20)


@each
def test_tensors_and_tokens_are_the_oracles(row: Family, loaded: LoadedModels) -> None:
    inputs, processor = inputs_of(row, loaded.folder(row.name)), loaded.oracle(row.name)[1]
    for i, case in enumerate(row.default_cases()):
        question = ask(row, case, i)
        theirs = question.theirs(processor)
        with one_thread():
            ours = inputs.process(question.ours)
        assert list(ours.token_ids) == theirs["input_ids"][0].tolist(), question.text
        for name, mine, other in row.tensors(theirs, ours.encoded) if ours.encoded else ():
            assert mine.shape == other.shape, name
            difference = (mine.double() - other.double()).abs().max() if mine.numel() else 0
            assert difference <= row.tensor_tolerance, f"{name} of {case!r}"


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.full)])
@each
def test_every_size_takes_the_oracles_tokens(row: Family, loaded: LoadedModels, every: int) -> None:
    """The plan, made from headers only, has the same number of tokens, or more if only the decoded item tells them."""
    inputs, processor = inputs_of(row, loaded.folder(row.name)), loaded.oracle(row.name)[1]
    letters = {modality: letter for letter, modality in family.LETTERS.items()}
    for modality in row.placeholders:
        for size in row.grid[modality][::every]:
            question = ask(row, letters[modality], 0, [size])
            if row.refuses(modality, size):
                with pytest.raises(SensoriumError):
                    inputs.process(question.ours)
                continue
            prepared = inputs.process(question.ours)
            assert list(prepared.token_ids) == question.theirs(processor)["input_ids"][0].tolist(), f"{modality} {size}"
            for plan, item in zip(inputs.plan(question.ours), prepared.items, strict=True):
                assert plan.num_tokens == item.num_tokens or (plan.num_tokens > item.num_tokens and not plan.exact)


@pytest.mark.sampled
@each
def test_extreme_shapes_are_refused_or_take_bounded_memory(row: Family, loaded: LoadedModels) -> None:
    """Slivers, single pixels and long images: refused from the header, or the tensors of processing stay within 96 MB.

    Slivers above 200:1 may be resized to MAX_RESIZED_PIXELS: 3 bytes of each pixel, and 2 for the coefficients of the filter,
    which are 55 bytes per column of an image of 28 rows, the least side of a row's tiles.
    """
    if "image" not in row.placeholders and "vision_chunk" not in row.placeholders:
        pytest.skip("takes no images")
    folder = loaded.folder(row.name)
    info = load_processing(load_model_files(folder), {}, Tokenizer(folder))
    modality = "image" if "image" in row.placeholders else "vision_chunk"
    for width, height in ((1, 1), (4000, 1), (4000, 20), (16_384, 1), (16_384, 82), (65_000, 1)):
        for size in ((height, width), (width, height)):
            source = MediaSource(modality, 0, np.zeros((*size, 3), np.uint8), kind="image")
            [item] = gate.decode(source, info.decode_spec, MediaPolicy())
            if not refused(row, info, item):
                peak = peak_bytes(lambda item=item: info.process(item, torch.float32))
                most = 96 << 20 if max(size) <= 200 * min(size) else 5 * MAX_RESIZED_PIXELS
                assert peak <= most, (size, peak)


def refused(row: Family, info: Any, item: Any) -> bool:
    """Return whether the family refuses the size of an item that media admits."""
    try:
        return not info.geometry(item.header)
    except InputError:
        return True


@each
def test_positions_are_the_oracles(row: Family, loaded: LoadedModels) -> None:
    model, processor = loaded.oracle(row.name)
    for i, case in enumerate(row.default_cases()):
        question = ask(row, case, i)
        ours = positions(loaded.llm(row.name), question, 0)
        if ours is not None and question.data and not (row.own_positions and "video" in question.data):
            theirs = row.oracle_positions(model, question.theirs(processor))
            assert theirs is not None, "the row does not tell how to get transformers' positions"
            assert torch.equal(ours, theirs), case


@each
def test_what_is_left_out_is_said(row: Family) -> None:
    """A wider tolerance, own positions and unused tensors need a reason."""
    assert row.tolerance == Family.tolerance or row.tolerance_note
    said = {"tolerance": row.tolerance_note, "positions": row.own_positions, **row.silent}
    for what, why in said.items():
        assert why is None or isinstance(why, str)
        if why:
            print(f"{row.name}, {what}: {why}")


@each
def test_logits_are_the_oracles(row: Family, loaded: LoadedModels) -> None:
    for answered in loaded.alone(row.name):
        assert answered.theirs.std() >= 1.0, "the oracle's logits are too flat to tell"
        check_logits(row, answered)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("row", "variant"),
    [pytest.param(row, variant, id=f"{name}-{variant}") for name, row in ROWS.items() for variant in row.variants],
)
def test_logits_of_variants(row: Family, variant: str, loaded: LoadedModels) -> None:
    answered = loaded.answer(ask(row, row.default_cases()[-1], 1), 0, variant, tokens=2)
    check_logits(row, answered)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", SEEDS)
@each
def test_greedy_tokens_alone(row: Family, seed: int, loaded: LoadedModels) -> None:
    answers = loaded.alone(row.name, seed)
    ties = sum(count_ties(row, answered) > 0 for answered in answers)
    print(f"{row.name} seed {seed}: {ties} of {len(answers)} sequences hold a tie")
    assert ties <= max(1, len(answers) // 100)


def check_same(row: Family, loaded: LoadedModels, outputs: list[Any]) -> None:
    """Assert that answers to the cases equal those given alone, or differ from them at a tie of the oracle."""
    model, processor = loaded.oracle(row.name)
    for answered, output in zip(loaded.alone(row.name), outputs, strict=True):
        assert output.error is None, output.error
        ids = output.outputs[0].token_ids
        if ids != answered.ids:
            place = positions(loaded.llm(row.name), answered.question, len(ids))
            theirs = row.run(model, answered.question.theirs(processor), ids, place)
            table = theirs[len(answered.prompt) - 1 :]
            assert (table.amax(-1) - table.gather(-1, torch.tensor(ids)[:, None])[:, 0]).max() < 1e-4
            print(f"{row.name}: another side of a tie")


def others(row: Family) -> list[Question]:
    """Return prompts with other sizes, to share the batch with the cases."""
    return [ask(row, case, 50 + i) for i, case in enumerate(row.default_cases()[1:])]


@pytest.mark.sampled
@each
def test_greedy_tokens_in_a_batch(row: Family, loaded: LoadedModels) -> None:
    asked = [answered.question for answered in loaded.alone(row.name)]
    outputs = loaded.llm(row.name).generate([q.ours for q in asked + others(row)], greedy(), use_tqdm=False)
    check_same(row, loaded, outputs[: len(asked)])


def watch(llm: LLM, row: Family) -> list[tuple[int, int, tuple[Any, ...]]]:
    """Return a list that receives each chunk computed from now on: [start, stop) and its sequence's bidirectional spans."""
    core, seen, known = llm.engine.loop.core, [], {}
    real = core.executor.runner.execute_model

    def execute_model(output: Any, after: Any = None) -> Any:
        known.update(
            {
                r.request_id: tuple(find_spans(ATTENTIONS[row.prompt_attention], len(r.prompt_token_ids), r.features))
                for r in output.new_requests
            }
        )
        seen.extend((t.num_computed, t.num_computed + t.num_tokens, known[t.request_id]) for t in output.scheduled)
        return real(output, after)

    core.executor.runner.execute_model = execute_model
    return seen


@pytest.mark.sampled
@each
def test_greedy_tokens_in_chunks(row: Family, loaded: LoadedModels) -> None:
    """Steps have 7 rows, or as many as the family's largest bidirectional span; no span is ever cut."""
    llm = make_llm(row, loaded.folder(row.name), max_num_batched_tokens=7)
    pieces = watch(llm, row)
    asked = [answered.question for answered in loaded.alone(row.name)]
    check_same(row, loaded, llm.generate([question.ours for question in asked], greedy(), use_tqdm=False))
    assert not any(first < stop < last for _, stop, spans in pieces for first, last in spans)
    assert not any(first < start < last for start, _, spans in pieces for first, last in spans)
    if row.placeholders and row.prompt_attention == "causal" and all(row.placeholders.values()):
        assert llm.stats.cut_items > 0


@pytest.mark.sampled
@each
def test_greedy_tokens_after_a_prefix_hit(row: Family, loaded: LoadedModels) -> None:
    llm = make_llm(row, loaded.folder(row.name))
    asked = [answered.question for answered in loaded.alone(row.name)]
    llm.generate([question.ours for question in asked], greedy(2), use_tqdm=False)
    outputs = [llm.generate(question.ours, greedy(), use_tqdm=False)[0] for question in asked]
    check_same(row, loaded, outputs)
    has_states = any(spec.kind == "state" for spec in llm.engine.loop.core.executor.runner.model.cache_specs)
    for question, output in zip(asked, outputs, strict=True):
        count = len(output.prompt_token_ids)
        spans = find_spans(ATTENTIONS[row.prompt_attention], count, llm.engine.inputs.process(question.ours).features)
        is_short = has_states and count - 1 < MIN_BLOCKS * BLOCK
        assert output.num_cached_tokens == (0 if is_short else round_down(count - 1, BLOCK, spans))


@pytest.mark.sampled
@each
def test_greedy_tokens_when_preempted(row: Family, loaded: LoadedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV cache holds little more than one of the sequences, but states and cross-attention rows for all of them."""
    alone = loaded.alone(row.name)
    prepared = [loaded.llm(row.name).engine.inputs.process(answered.question.ours) for answered in alone]
    crossed = max(sum(item.range.num_embeds for item in one.cross) for one in prepared)
    decoded = max(len(answered.prompt) for answered in alone) + TOKENS
    longest = max(crossed, decoded)
    specs = loaded.llm(row.name).engine.loop.core.executor.runner.model.cache_specs
    blocks = -(-longest // BLOCK) + 8
    fixed = {"state": 20}
    if crossed:
        fixed |= {"cross": len(alone) * -(-crossed // BLOCK), "full": -(-decoded // BLOCK) + 1}
    if any(spec.kind in ("state", "cross") for spec in specs):
        counts = tuple(fixed.get(group.spec.kind, blocks) for group in group_layers(specs))
        monkeypatch.setattr(loader, "num_cache_blocks", lambda *sizes: counts)
    room = blocks * sum(spec.block_bytes(BLOCK) for spec in specs)
    llm = make_llm(row, loaded.folder(row.name), max_model_len=longest, kv_cache_memory_bytes=room, max_num_seqs=4)
    pieces = watch(llm, row)
    order = sorted(range(len(alone)), key=lambda i: len(alone[i].prompt))
    if sum(len(alone[i].prompt) + TOKENS for i in order[:4]) <= blocks * BLOCK:  # the first four fit together
        order.insert(1, order.pop())
    outputs = generate_together(llm, [alone[i].question.ours for i in order], greedy())
    check_same(row, loaded, [outputs[order.index(i)] for i in range(len(alone))])
    if any(spec.kind != "state" and spec.answer_window is None for spec in specs):  # the others do not grow with an answer
        assert llm.stats.preemptions > 0
    assert not any(first < stop < last for _, stop, spans in pieces for first, last in spans)


@pytest.mark.sampled
@each
def test_another_item_changes_the_answer(row: Family, loaded: LoadedModels) -> None:
    llm = loaded.llm(row.name)
    for answered in loaded.alone(row.name)[1 : 1 + len(row.placeholders)]:
        question = answered.question
        size = [s for several in question.data.values() for s in map(_size, several)]
        swapped = ask(row, _letters(question), 7, size)
        output, logits = record(llm, Question(row, question.text, swapped.data), 16)
        assert list(output.prompt_token_ids) == list(answered.prompt)
        assert (logits - answered.ours[: len(logits)]).abs().max() > 0.05, "a random model may still choose the same tokens"


def _size(media: Any) -> tuple[int, ...]:
    if isinstance(media, np.ndarray):
        return media.shape if media.ndim == 1 else media.shape[:-1]
    return media.size[::-1]


def _letters(question: Question) -> str:
    return "".join(letter for letter, modality in family.LETTERS.items() for _ in question.data.get(modality, ()))


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, *HOW], ids=str)
@torch.inference_mode()
@each
def test_an_item_encoded_in_a_batch_is_the_item_alone(row: Family, loaded: LoadedModels, options: dict[str, str]) -> None:
    """Encoder rows are equal bit for bit."""
    llm = make_llm(row, loaded.folder(row.name), **options) if options else loaded.llm(row.name)
    model = llm.engine.loop.core.executor.runner.model
    asked = [ask(row, case, seed) for seed, case in enumerate(row.default_cases()[1:] * 2)]
    items = [feature for question in asked for feature in llm.engine.inputs.process(question.ours).encoded]
    for ids in group_mergeable([item.kwargs for item in items], [item.modality for item in items]):
        modality = items[ids[0]].modality
        together = model.embed_multimodal(modality, merge([items[i].kwargs for i in ids]))
        backwards = model.embed_multimodal(modality, merge([items[i].kwargs for i in reversed(ids)]))[::-1]
        for i, rows, again in zip(ids, together, backwards, strict=True):
            (alone,) = model.embed_multimodal(modality, merge([items[i].kwargs]))
            assert torch.equal(rows, alone), f"{modality} {i} differs in a batch"
            assert torch.equal(again, alone), f"{modality} {i} differs in another batch"


@pytest.mark.full
@each
def test_every_tensor_has_a_say(row: Family, loaded: LoadedModels) -> None:
    """Zeroing any tensor of the oracle moves its logits by far more than the tolerance."""
    model, processor = loaded.oracle(row.name)
    answered = loaded.alone(row.name)[-1]
    inputs, count = answered.question.theirs(processor), len(answered.prompt)
    place = positions(loaded.llm(row.name), answered.question, 0)
    ours, unseen = answered.ours[:count], []
    for name, parameter in model.named_parameters():
        if any(name.startswith(start) for start in row.silent):
            continue
        kept = parameter.data.clone()
        parameter.data.zero_()
        if not (ours - row.run(model, inputs, [], place)).abs().max() > 100 * limit(row, ours):
            unseen.append(name)
        parameter.data.copy_(kept)
    assert unseen == [], "the logits hardly depend on these; `sharpen` their part of the model, or give the reason in `silent`"


def copied(folder: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Copy the checkpoint with other weights."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("model.safetensors"), dirs_exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


@pytest.mark.sampled
@each
def test_weights_in_every_layout(row: Family, loaded: LoadedModels, tmp_path: Path) -> None:
    """Weights load as transformers stores them, as it holds them in memory, and as older releases stored them."""
    folder, question = loaded.folder(row.name), ask(row, row.default_cases()[-1])
    expected = record(loaded.llm(row.name), question, 1)[1]
    stored = load_file(folder / "model.safetensors")
    held = dict(loaded.oracle(row.name)[0].state_dict())
    layouts = {"in memory": {name: tensor for name, tensor in held.items() if tensor.numel()}}
    for name, prefixes in row.layouts.items():
        layouts[name] = {rename(key, list(prefixes)): tensor for key, tensor in stored.items()}
        assert layouts[name].keys() != stored.keys(), f"layout {name!r} renames nothing"
    for name, tensors in layouts.items():
        llm = make_llm(row, copied(folder, tmp_path / name.replace(" ", "-"), tensors))
        assert torch.equal(record(llm, question, 1)[1], expected), name


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@each
def test_half_precision(row: Family, dtype: str, loaded: LoadedModels) -> None:
    """Logits are near the float32 ones, as far as the format allows; unrelated ones would be 1.4 standard deviations off."""
    answered = loaded.alone(row.name)[-1]
    count = len(answered.prompt)
    ours = record(make_llm(row, loaded.folder(row.name), dtype=dtype), answered.question, 1)[1]
    theirs = answered.theirs[:count]
    assert ours.dtype == torch.float32
    assert (ours - theirs).std() / theirs.std() < row.half[dtype == "float16"]


@pytest.mark.sampled
@each
def test_bad_weights_are_named(row: Family, loaded: LoadedModels, tmp_path: Path) -> None:
    folder = loaded.folder(row.name)
    stored = load_file(folder / "model.safetensors")
    named = {name for name in stored if not any(name.startswith(start) for start in row.silent)}
    norms = sorted(name for name in named if name.endswith(("norm1.weight", "ln_f.weight")) or "norm.weight" in name)
    # a name that the model keeps: the error says it
    kept = r"^(?!audio_\w+\.\w+\.\d+\.norm\d).*\.\d+\.(?!.*batch_norm).*(norm\w*|ln1)\.weight$"
    missing = next((name for name in sorted(named) if re.search(kept, name)), norms[0] if norms else "")
    with pytest.raises(CheckpointError, match=missing.split(".")[-2]):
        make_llm(row, copied(folder, tmp_path / "a", {name: t for name, t in stored.items() if name != missing}))
    with pytest.raises(CheckpointError, match=r"surplus\.weight"):
        make_llm(row, copied(folder, tmp_path / "b", stored | {"surplus.weight": torch.zeros(2)}))
