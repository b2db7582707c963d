"""Each family's memory plan against live tensors at full load, by category, within 10 %."""

from __future__ import annotations

import pytest
from family import LETTERS, Family, Question, ask, write_prompt
from measured import held, measured_steps
from parity import ROWS, LoadedModels, each, greedy, make_llm
from sensorium import LLM
from sensorium.engine.types import EngineRequest

NEAR = 0.1  # of the live bytes
each_modality = pytest.mark.parametrize(
    ("row", "modality"),
    [pytest.param(row, one, id=f"{name}-{one}") for name, row in ROWS.items() for one in row.placeholders or [""]],
)


def near(planned: int, live: int, what: str) -> None:
    print(f"{what}: planned {planned:,}, live {live:,}")
    assert abs(planned - live) <= NEAR * live, f"{what}: {planned:,} bytes are planned, {live:,} are live"


def is_first(row: Family, modality: str) -> bool:
    return modality == next((name for name in LETTERS.values() if name in row.placeholders), "")


def full_prompts(row: Family, modality: str, count: int) -> list[Question]:
    """Return different prompts with as many items of the first modality as fit, or with one of another modality."""
    if not modality:
        return [ask(row, "", 300 + seed) for seed in range(count)]
    letter = next(letter for letter, name in LETTERS.items() if name == modality)
    several = is_first(row, modality) and max(len(case) for case in row.default_cases()) > 1
    case = letter * (row.fullest_items if several else 1)
    known = row.fullest.get(modality)
    sizes = None if known is None else [known[i % len(known)] for i in range(len(case))]
    asked = [ask(row, case, 300 + seed, sizes) for seed in range(count)]
    if row.prompt is not write_prompt:
        return asked
    return [
        Question(row, "".join(row.placeholders[name] for name, media in one.data.items() for _ in media), one.data)
        for one in asked
    ]


@pytest.mark.full
@each
def test_weights_and_caches_are_those_planned(row: Family, loaded: LoadedModels) -> None:
    llm = loaded.llm(row.name)
    plan, runner = llm.explain(), llm.engine.loop.core.executor.runner
    near(plan.weights, held(runner.model), "weights")
    near(plan.kv_cache, sum(cache.nbytes for cache in runner.caches.tensors), "keys and values")


@pytest.mark.full
@each_modality
def test_encoder_rows_fill_what_is_planned(row: Family, modality: str, loaded: LoadedModels) -> None:
    if not modality:
        pytest.skip("takes no items")
    first = loaded.llm(row.name)
    for count in (8, 32):  # prompts with much text, as of videos' frames, must not be longer than all items together
        prompts = full_prompts(row, modality, count)
        prepared = [first.engine.inputs.process(question.ours) for question in prompts]
        items = [feature for one in prepared for feature in (*one.features, *one.cross)]
        longest = max(len(one.token_ids) for one in prepared) + 2
        if longest < sum(item.range.num_embeds for item in items):
            break
    row_bytes = first.engine.loop.core.executor.runner.model.row_size * 4
    cross_rows = [item.rows for item in first.explain().max_items if prepared[0].cross]  # which the engine must hold
    most = max([longest, *cross_rows])
    rows = max(most, sum(item.range.num_embeds for item in items) * 2 // 3)
    llm = make_llm(row, loaded.folder(row.name), max_model_len=longest, encoder_cache_bytes=rows * row_bytes, max_num_seqs=1)
    llm.generate([question.ours for question in prompts], greedy(1), use_tqdm=False)
    core = llm.engine.loop.core
    live = sum(rows.nbytes for rows in core.executor.runner.store.rows.values())
    assert live == core.scheduler.encoder_cache.bytes
    assert core.scheduler.encoder_cache.evictions > 0
    largest = max(item.range.num_embeds for item in items) * row_bytes
    assert live <= llm.explain().encoder_cache <= live + largest


def steps(llm: LLM, question: Question) -> dict[str, tuple[int, int]]:
    """Return (planned, live) bytes of a question's largest forward pass and of each modality's largest encoder call."""
    core, largest = llm.engine.loop.core, dict[str, tuple[int, int]]()
    prepared = llm.engine.inputs.process(question.ours)
    items = {"features": prepared.features, "cross": prepared.cross, "adapter": prepared.adapter}
    with measured_steps(core.executor.runner.model) as found:
        core.add(EngineRequest("full", prepared.token_ids, greedy(1), (), **items))
        while core.scheduler.requests:
            core.step()
    for what, planned, live in found:
        largest[what] = max(largest.get(what, (0, 0)), (planned, live))
    return largest


@pytest.mark.full
@each_modality
def test_steps_take_what_is_planned(row: Family, modality: str, loaded: LoadedModels) -> None:
    llm = make_llm(row, loaded.folder(row.name), max_num_batched_tokens=1024, max_num_seqs=1)
    for what, (planned, live) in steps(llm, full_prompts(row, modality, 1)[0]).items():
        if what in row.unfilled:
            print(f"{row.name}, {what}: {row.unfilled[what]}")
        elif what == modality or is_first(row, modality):  # prompts of the others have text between rows
            near(planned, live, what)
        assert live <= planned, f"{what}: more is live than is planned"
