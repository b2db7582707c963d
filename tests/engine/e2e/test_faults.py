"""A request that fails in any stage ends with an error of one line, and does not affect other requests."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hostile import MARK, MODEL, NO_NUMBER, FailingEncoder, asked, make_image, marked, numberless, png, raising
from sensorium import LLM, RequestOutput, SamplingParams
from sensorium.engine.frontend.output_processor import OutputBuilder, StreamDecoder
from sensorium.engine.worker import sampler
from waiting import assert_idle

BLOCK_BYTES = 16 * 4 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, head size, float32
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def llm() -> LLM:
    return LLM(MODEL, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, quarantine_seconds=60.0)


GOOD = [asked(make_image(1)), asked(make_image(2), make_image(3)), {"prompt": "user 1 moves left"}]


def answers(llm: LLM, prompts: list[Any], params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def fails_alone(llm: LLM, bad: Any, params: SamplingParams = GREEDY) -> str:
    """Return the error of `bad`. Check that good requests beside it get the answers they get without it."""
    alone = [tokens(answers(llm, [prompt]))[0] for prompt in GOOD]
    outputs = answers(llm, [GOOD[0], bad, *GOOD[1:]], [GREEDY, params, GREEDY, GREEDY])
    failed = outputs.pop(1)
    assert tokens(outputs) == alone
    assert failed.finished
    assert failed.error is not None
    assert failed.outputs[0].finish_reason == "error"
    assert "\n" not in failed.error.message
    assert_idle(llm)
    assert tokens(answers(llm, GOOD)) == alone
    return failed.error.message


def break_encoder(llm: LLM, monkeypatch: pytest.MonkeyPatch, harm: Any) -> FailingEncoder:
    model = llm.engine.loop.core.executor.runner.model
    monkeypatch.setattr(model, "embed_multimodal", FailingEncoder(model.embed_multimodal, harm))
    return model.embed_multimodal


def forward_without_numbers(llm: LLM, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    model, token = llm.engine.loop.core.executor.runner.model, llm.get_tokenizer().token_to_id(NO_NUMBER)
    monkeypatch.setattr(model, "forward", numberless(model.forward, token, value))


BROKEN = "an index is out of range"


def test_decoding(llm: LLM) -> None:
    error = fails_alone(llm, asked(make_image(4), png(make_image(9))[:-300]))
    assert "image 1: it is broken or cut off" in error


def test_processing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    info = type(llm.engine.inputs._info)
    real = info.process

    def process(self: Any, item: Any, dtype: Any) -> Any:
        if tuple(item.pixels[0, 0].tolist()) == MARK:
            raise RuntimeError(BROKEN)
        return real(self, item, dtype)

    monkeypatch.setattr(info, "process", process)
    error = fails_alone(llm, asked(make_image(4), marked()))
    assert (
        error == "image 1: processing failed: RuntimeError: an index is out of range; send the item in another size or format"
    )


@pytest.mark.in_process
def test_encoding(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = break_encoder(llm, monkeypatch, raising(RuntimeError, BROKEN))
    error = fails_alone(llm, asked(make_image(4), marked()))
    assert error.startswith("image 1: encoding failed: RuntimeError: an index is out of range; send another item")
    assert tower.calls < 16


@pytest.mark.in_process
def test_a_wrong_number_of_encoder_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    break_encoder(llm, monkeypatch, lambda rows: rows[:-1])
    error = fails_alone(llm, asked(marked()))
    assert "image 0: encoding failed: the encoder returned 7 rows for 8" in error


@pytest.mark.in_process
def test_a_failing_item_among_many_is_found_in_few_calls(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [asked(make_image(seed, 32, 32)) for seed in range(20, 28)]
    alone = [tokens(answers(llm, [prompt]))[0] for prompt in prompts]
    fresh = LLM(MODEL, max_model_len=256)
    tower = break_encoder(fresh, monkeypatch, raising(RuntimeError, BROKEN))
    outputs = answers(fresh, [*prompts[:5], asked(marked()), *prompts[5:]])
    assert outputs.pop(5).error is not None
    assert tokens(outputs) == alone
    assert tower.calls < 2 * len(prompts)


@pytest.mark.in_process
def test_a_failing_item_is_refused_to_its_tenant_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, now = LLM(MODEL, max_model_len=256, quarantine_seconds=1.0), [0.0]
    llm.engine.loop.core.scheduler.encoder_inputs.quarantine._clock = lambda: now[0]
    tower = break_encoder(llm, monkeypatch, raising(RuntimeError, BROKEN))
    (first,) = answers(llm, [asked(marked())])
    calls = tower.calls
    (again, other) = answers(llm, [asked(marked(), text="Read."), asked(make_image(1))])
    assert "image 0" in again.error.message
    assert "made the encoder fail before" in again.error.message
    assert other.error is None
    assert tower.calls == calls + 1
    (tenant,) = answers(llm, [asked(marked(), cache_salt="b")])
    assert tenant.error == first.error
    assert tower.calls == calls + 2
    now[0] += 1.05
    assert answers(llm, [asked(marked())])[0].error == first.error
    monkeypatch.undo()
    now[0] += 1.05
    assert answers(llm, [asked(marked())])[0].error is None


@pytest.mark.in_process
@pytest.mark.parametrize("error", [(MemoryError,), (torch.OutOfMemoryError, "CUDA out of memory")])
def test_running_out_of_memory_is_not_the_items_fault(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: tuple[Any, ...]
) -> None:
    with monkeypatch.context() as patch:
        break_encoder(llm, patch, raising(*error))
        assert "image 0: encoding failed" in fails_alone(llm, asked(marked()))
    assert answers(llm, [asked(marked())])[0].error is None


@pytest.mark.in_process
def test_an_interrupt_while_encoding_is_not_the_items_fault(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        break_encoder(llm, patch, raising(KeyboardInterrupt))
        assert "interrupted" in answers(llm, [asked(marked())])[0].error.message
    assert answers(llm, [asked(marked())])[0].error is None
    assert_idle(llm)


@pytest.mark.in_process
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1, "top_p": 0.9, "logprobs": 2}])
def test_logits_that_are_not_finite(llm: LLM, monkeypatch: pytest.MonkeyPatch, value: float, sampling: dict[str, Any]) -> None:
    forward_without_numbers(llm, monkeypatch, value)
    error = fails_alone(llm, {"prompt": f"user 2 moves left{NO_NUMBER}"}, SamplingParams(max_tokens=8, **sampling))
    assert "logits are not finite" in error


@pytest.mark.in_process
def test_freed_blocks_do_not_affect_their_next_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed request leaves NaN in its KV-cache blocks. The next sequence with these blocks does not read them."""
    few = LLM(MODEL, max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=4 * 4 * BLOCK_BYTES)
    alone = [tokens(answers(few, [prompt]))[0] for prompt in GOOD]
    forward_without_numbers(few, monkeypatch, float("nan"))
    for seed in range(4):
        bad = asked(make_image(seed, 96, 96), text=f"user 2{NO_NUMBER}")
        outputs = answers(few, [bad, *GOOD])
        assert outputs[0].error is not None
        assert tokens(outputs[1:]) == alone
    assert_idle(few)


@pytest.mark.in_process
def test_encoder_rows_that_are_not_finite(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    break_encoder(llm, monkeypatch, lambda rows: rows * float("nan"))
    error = fails_alone(llm, asked(make_image(4), marked()))
    assert "image 1: encoding failed" in error
    assert "not finite" in error


@pytest.mark.in_process
def test_a_head_whose_logits_are_not_finite(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence of the step fails with its own error, and the next step works."""
    model = llm.engine.loop.core.executor.runner.model
    with monkeypatch.context() as patch:
        patch.setattr(model, "compute_logits", lambda hidden: torch.full((len(hidden), model.vocab_size), float("nan")))
        for output in answers(llm, GOOD):
            assert "not finite" in output.error.message
    assert_idle(llm)
    tokens(answers(llm, GOOD))


@pytest.mark.in_process
def test_sampling(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampler.sample

    def sample(logits: torch.Tensor, rows: Any, place: Any) -> Any:
        if any(row.params.presence_penalty == 1.5 for row in rows):
            raise RuntimeError(BROKEN)
        return real(logits, rows, place)

    monkeypatch.setattr(sampler, "sample", sample)
    error = fails_alone(llm, asked(make_image(5)), SamplingParams(temperature=0.0, presence_penalty=1.5))
    assert "sampling failed" in error
    assert "out of range" in error
    assert "send the request again" in error


@pytest.mark.parametrize("stop", [None, ["never"]])  # with stop strings the text is decoded at every step, else at the end
def test_detokenising(llm: LLM, monkeypatch: pytest.MonkeyPatch, stop: list[str] | None) -> None:
    token, real = llm.get_tokenizer().encode("~")[-1], StreamDecoder.push

    def push(self: Any, ids: Any) -> str:
        if token in list(ids):
            raise RuntimeError(BROKEN)
        return real(self, ids)

    monkeypatch.setattr(StreamDecoder, "push", push)
    error = fails_alone(llm, asked(make_image(5)), SamplingParams(temperature=0.0, logit_bias={token: 100.0}, stop=stop))
    assert error == "detokenising failed: RuntimeError: an index is out of range; token_ids hold the answer"


@pytest.mark.in_process
def test_media_are_freed_without_the_garbage_collector(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of a request are in no reference cycle, so they are freed with it."""
    break_encoder(llm, monkeypatch, raising(RuntimeError, BROKEN))
    prompts = [*GOOD, asked(marked()), asked(png(make_image(4))[:-300]), asked(make_image(5), text="x" * 2000), asked(b"")]
    answers(llm, prompts)
    gc.collect()
    gc.disable()
    older = {id(one) for one in gc.get_objects()}  # engines of earlier tests may end meanwhile
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        answers(llm, [asked(make_image(seed)) for seed in range(10, 14)] + [asked(marked(1)), *prompts[4:]])
        gc.collect()
        made = (one for one in gc.garbage if id(one) not in older)
        kept = [one for one in made if isinstance(one, torch.Tensor | bytes | OutputBuilder)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert kept == []
