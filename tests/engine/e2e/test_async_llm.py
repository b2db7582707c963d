"""AsyncLLM: deltas, slow consumers, cancelled tasks, several event loops, and freed memory."""

import asyncio
import contextlib
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from sensorium import LLM, AsyncLLM, SamplingParams
from sensorium.callers.errors import ConfigError, InputError
from sensorium.engine.frontend.serve import serve
from sensorium.engine.session import Turn
from together import hold_until_prepared
from waiting import LONG, assert_idle, hold_steps, wait_until

MODEL = Path(__file__).parents[3] / "assets" / "tiny-vl"
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


def greedy(tokens=12, **params):
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **params)


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, max_model_len=256, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture
def engine(llm):
    return AsyncLLM(llm)


def asked(i):
    picture = Image.new("RGB", (64, 32), (i * 16 % 256, 9, 9))
    return {"prompt": f"{PLACEHOLDER}Read {i}.", "multi_modal_data": {"image": picture}} if i % 2 else f"user {i} moves left"


def alone(llm, prompts, params):
    return [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for prompt in prompts]


async def collect(engine, prompt, params, **options):
    return [output async for output in engine.generate(prompt, params, **options)]


@pytest.mark.parametrize("params", [greedy(), greedy(logprobs=1), SamplingParams(n=2, seed=3, max_tokens=9, ignore_eos=True)])
def test_deltas_join_to_the_answer(llm, engine, params):
    (expected,) = llm.generate(asked(1), params, use_tqdm=False)
    deltas = asyncio.run(collect(engine, asked(1), params))
    for place, answer in enumerate(expected.outputs):
        parts = [output.outputs[place] for output in deltas]
        assert "".join(part.text for part in parts) == answer.text
        assert [token for part in parts for token in part.token_ids] == answer.token_ids
        assert parts[-1].finish_reason == answer.finish_reason
        if params.logprobs:
            assert [entry for part in parts for entry in part.logprobs] == list(answer.logprobs)
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    whole = asyncio.run(collect(engine, asked(1), params, output_kind="cumulative"))
    assert whole[-1].outputs == expected.outputs
    (final,) = asyncio.run(collect(engine, asked(1), params, output_kind="final"))
    assert final.outputs == expected.outputs
    assert_idle(llm)


def test_a_stop_string_is_never_shown(llm, engine):
    (full,) = alone(llm, ["user 1 moves left"], greedy(24))
    stop = full.text[6:9]
    deltas = asyncio.run(collect(engine, "user 1 moves left", greedy(24, stop=stop)))
    assert "".join(output.outputs[0].text for output in deltas) == full.text[: full.text.index(stop)]
    assert_idle(llm)


def test_sixty_four_clients(llm, engine):
    expected = alone(llm, [asked(i) for i in range(16)], greedy())

    async def all_of_them():
        return await asyncio.gather(*(collect(engine, asked(i % 16), greedy()) for i in range(64)))

    for i, outputs in enumerate(asyncio.run(all_of_them())):
        assert "".join(output.outputs[0].text for output in outputs) == expected[i % 16].text
    assert_idle(llm)


@pytest.mark.parametrize(
    "chat",
    [
        {"mm_processor_kwargs": {"max_pixels": 64 * 64}},
        {"cache_salt": "a"},
        {"chat_template_kwargs": {"x": 1}, "add_generation_prompt": False},
    ],
)
def test_messages_take_the_options_of_chat(llm, engine, chat):
    image = {"type": "image", "image": Image.new("RGB", (256, 128), (9, 9, 9))}
    messages = [{"role": "system", "content": str(chat)}, {"role": "user", "content": [image]}]
    (expected,) = llm.chat(messages, greedy(), use_tqdm=False, **chat)
    (plain,) = llm.chat(messages, greedy(), use_tqdm=False)
    (found,) = asyncio.run(collect(engine, messages, greedy(), output_kind="final", **chat))
    assert expected.error is None
    assert (found.prompt_token_ids, found.outputs) == (expected.prompt_token_ids, expected.outputs)
    assert [*llm.stream(messages, greedy(), **chat)][-1].prompt_token_ids == expected.prompt_token_ids
    with llm.live(messages, greedy(), **chat) as live:
        assert live.answer().prompt_token_ids == expected.prompt_token_ids
    if "cache_salt" in chat:
        assert plain.num_cached_tokens == 0
        assert found.num_cached_tokens > 0
    else:
        assert len(found.prompt_token_ids) < len(plain.prompt_token_ids)


def test_arguments_of_messages_only_and_unknown_arguments(llm, engine):
    with pytest.raises(InputError, match="cache_salt is an argument for messages; in any other prompt, give it as a key"):
        asyncio.run(collect(engine, "user 1", greedy(), cache_salt="a"))
    messages = [{"role": "user", "content": "Read."}]
    with pytest.raises(InputError, match=r"unknown argument 'cache_slat' for messages; did you mean cache_salt\?"):
        asyncio.run(collect(engine, messages, greedy(), cache_slat="a"))
    with pytest.raises(InputError, match=r"unknown argument 'chat_templat' .* did you mean chat_template\?"):
        llm.chat(messages, greedy(), chat_templat="")
    assert_idle(llm)


def test_a_slow_reader_gets_merged_deltas(llm, engine):
    async def slow():
        seen = []
        async for output in engine.generate("user 1 moves left", greedy(60)):
            seen.append(output)
            while llm.engine.loop._names:  # until all is computed
                await asyncio.sleep(0.01)
        return seen

    (expected,) = alone(llm, ["user 1 moves left"], greedy(60))
    seen = asyncio.run(slow())
    assert len(seen) <= 3
    assert "".join(output.outputs[0].text for output in seen) == expected.text


def test_leaving_and_cancelling_free_everything(llm, engine):
    rng = random.Random(0)

    async def left(i):
        async for _ in engine.generate(asked(i), greedy(200)):
            if rng.random() < 0.3:
                break

    async def cancelled(i):
        task = asyncio.create_task(collect(engine, asked(i), greedy(200)))
        await asyncio.sleep(rng.random() * 0.2 if i else 0)
        if task.cancel():  # it is not done yet
            with pytest.raises(asyncio.CancelledError):
                await task
        return task.cancelled()

    async def all_of_them():
        return await asyncio.gather(*(left(i) if i % 3 else cancelled(i) for i in range(40)))

    assert any(asyncio.run(all_of_them()))
    assert_idle(llm)
    assert alone(llm, ["user 1 moves left"], greedy())[0].finish_reason == "length"


def test_abort_by_request_id(llm, engine, monkeypatch):
    core, go_on = llm.engine.loop.core, threading.Event()
    monkeypatch.setattr(core, "step", core.step)
    hold_steps(core, go_on.is_set)

    async def go():
        task = asyncio.create_task(collect(engine, "user 1 moves left", greedy(200), request_id="mine"))
        while "mine" not in llm.engine.loop._names:
            await asyncio.sleep(0.001)
        with pytest.raises(InputError, match="'mine' is in use"):
            await collect(engine, "user 2", greedy(), request_id="mine")
        ending = asyncio.create_task(engine.abort("mine"))
        await asyncio.sleep(0)  # it was sent
        go_on.set()
        await ending
        await engine.abort("nobody")
        return await task

    outputs = asyncio.run(go())
    assert outputs[-1].finished
    assert outputs[-1].error is None
    assert outputs[-1].request_id == "mine"
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert_idle(llm)


def test_a_turn_that_is_cancelled_before_it_begins_ends_its_sequence(llm, engine):
    handle, go_on = llm.request("user 1 moves left", greedy()), threading.Event()
    handle.input = replace(handle.input, hold_open=True)

    async def go():
        await engine.answer(handle)
        llm.engine.loop.call(lambda _: go_on.wait(LONG))
        turn = asyncio.create_task(engine.append(Turn(handle, (), close=False)))
        await asyncio.sleep(0)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

    asyncio.run(go())
    go_on.set()
    assert_idle(llm)


@pytest.mark.parametrize("live", [False, True])
def test_a_stop_string_leaves_statistics_and_timings_as_they_are(llm, live):
    prompt = {"prompt": PLACEHOLDER + "Read. " * 12, "multi_modal_data": {"image": Image.new("RGB", (64, 32), (1, 2, 3))}}
    (full,) = llm.generate(prompt, greedy(24), use_tqdm=False)
    text = full.outputs[0].text
    params = greedy(24, stop=text[len(text) // 2 :][:1])
    with llm.live(prompt, params) if live else contextlib.nullcontext() as session:
        output = session.answer() if live else llm.generate(prompt, params, use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "stop"
    assert output.num_cached_tokens > 0
    assert output.trace[0].encoder == "prefix"
    assert set(output.timings) == set(full.timings)


def test_request_ids_of_a_call_must_differ(llm):
    handles = [llm.request("user 1", greedy(), request_id=name) for name in ("a", "b", "a")]
    with pytest.raises(InputError, match="'a' is in use"):
        list(llm.serve(handles, use_tqdm=False))
    assert_idle(llm)


def test_two_event_loops_and_a_thread_at_once(llm, engine):
    expected = alone(llm, [asked(i) for i in range(8)], greedy())
    found = {}

    async def clients(name):
        results = await asyncio.gather(*(collect(engine, asked(i), greedy()) for i in range(8)))
        found[name] = ["".join(output.outputs[0].text for output in outputs) for outputs in results]

    threads = [threading.Thread(target=lambda name=name: asyncio.run(clients(name))) for name in "ab"]
    for thread in threads:
        thread.start()
    batch = llm.generate([asked(i) for i in range(8)], greedy(), use_tqdm=False)
    for thread in threads:
        thread.join()
    texts = [answer.text for answer in expected]
    assert found == {"a": texts, "b": texts}
    assert [output.outputs[0].text for output in batch] == texts
    assert_idle(llm)


def test_max_waiting_limits_the_requests_in_the_engine(llm):
    engine, most = AsyncLLM(llm, max_waiting=3), 0

    async def watched():
        nonlocal most
        tasks = [asyncio.create_task(collect(engine, f"user {i}", greedy())) for i in range(12)]
        for task in tasks[::5]:
            task.cancel()
        while not all(task.done() for task in tasks):
            most = max(most, len(llm.engine.loop._names))
            await asyncio.sleep(0.001)
        return [task for task in tasks if not task.cancelled()]

    assert len(asyncio.run(watched())) == 9
    assert most <= 3
    assert engine._slots._free == 3
    assert_idle(llm)


def test_errors_are_outputs_and_wrong_calls_raise(llm, engine):
    (output,) = asyncio.run(collect(engine, {"prompt": PLACEHOLDER}, greedy()))
    assert output.finished
    assert "image 0" in output.error.message
    assert output.outputs[0].finish_reason == "error"
    for options in ({"output_kind": "all"}, {"request_id": ""}, {"priority": "high"}):
        with pytest.raises(InputError, match=next(iter(options))):
            asyncio.run(collect(engine, "user 1", greedy(), **options))
    with pytest.raises(ConfigError, match="max_waiting"):
        AsyncLLM(llm, max_waiting=0)
    with pytest.raises(ConfigError, match="max_num_seqs is an option"):
        AsyncLLM(llm, max_num_seqs=3)
    with pytest.raises(InputError, match=r"handle must be what `LLM\.request` returns, not 'user 1'"):
        asyncio.run(engine.answer("user 1"))
    with pytest.raises(InputError, match="request_id must be a string, not a list"):
        asyncio.run(engine.abort(["a"]))
    with pytest.raises(InputError, match="tools must be a list of tools, not a str"):
        llm.chat([{"role": "user", "content": "Read."}], greedy(), tools="search")
    assert_idle(llm)


def test_closing_ends_running_requests():
    async def go():
        async with AsyncLLM(MODEL, max_model_len=256) as engine:
            hold_steps(engine.engine.loop.core, lambda: engine.engine.loop.closed)
            task = asyncio.create_task(collect(engine, "user 1 moves left", greedy(200)))
            await asyncio.to_thread(wait_until, lambda: engine.engine.loop._owners)
        outputs = await task
        with pytest.raises(InputError, match="closed"):
            await collect(engine, "user 1", greedy())
        return outputs[-1], engine

    output, engine = asyncio.run(go())
    assert "closed" in output.error.message
    assert not engine.engine.loop._thread.is_alive()


def test_live_turns_equal_one_long_prompt(llm):
    picture = Image.new("RGB", (64, 32), (90, 9, 9))
    part = {"prompt": f"{PLACEHOLDER}Read.", "multi_modal_data": {"image": picture}}
    with llm.live("user 1 moves left", greedy(6)) as live:
        first = live.answer()
        live.append(part)
        second = live.answer()
        before = live.token_ids
        live.truncate(len(first.prompt_token_ids))
        live.append(part)
        third = live.answer()
        with pytest.raises(InputError, match="image 0"):
            live.append({"prompt": PLACEHOLDER})
    prompts = [{"prompt_token_ids": list(out.prompt_token_ids)} for out in (first, second, third)]
    for prompt in prompts[1:]:
        prompt["multi_modal_data"] = {"image": picture}
    expected = [llm.generate(prompt, greedy(6), use_tqdm=False)[0].outputs[0] for prompt in prompts]
    assert [out.outputs[0].token_ids for out in (first, second, third)] == [answer.token_ids for answer in expected]
    assert before[: len(first.prompt_token_ids) + 6] == (*first.prompt_token_ids, *first.outputs[0].token_ids)
    with pytest.raises(InputError, match="ended"):
        live.append("more")
    with pytest.raises(InputError, match="one answer per turn, not n=2"):
        llm.live("a", SamplingParams(n=2, temperature=1.0))
    assert_idle(llm)


def test_a_stop_string_ends_a_turn_of_a_live_session(llm):
    whole = llm.generate("user 1 moves left", greedy(12), use_tqdm=False)[0].outputs[0]
    stop = whole.text[len(whole.text) // 2 :][:2]
    with llm.live("user 1 moves left", greedy(12, stop=stop)) as live:
        first = live.answer()
        assert (first.outputs[0].finish_reason, first.outputs[0].stop_reason) == ("stop", stop)
        assert first.outputs[0].text == whole.text[: whole.text.find(stop)]
        made = first.outputs[0].token_ids
        assert made == whole.token_ids[: len(made)]
        live.append(" user 2")
        second = live.answer()
        assert second.prompt_token_ids[: len(first.prompt_token_ids) + len(made)] == [*first.prompt_token_ids, *made]
    again = {"prompt_token_ids": list(second.prompt_token_ids)}
    assert llm.generate(again, greedy(12, stop=stop), use_tqdm=False)[0].outputs[0].token_ids == second.outputs[0].token_ids
    assert_idle(llm)


def test_urgent_requests_run_first(llm):
    """All requests are submitted before the first step, and one is served at a time."""
    with LLM(MODEL, max_model_len=256, max_num_seqs=1) as one:
        hold_until_prepared(one, 2)
        ended = []
        jobs = [one.request(f"user {i}", greedy(4), priority) for i, priority in enumerate((5, 0, 3))]
        for index, _ in serve(one.engine.loop, jobs):
            ended.append(index)
    assert ended.index(1) < ended.index(2)
    with pytest.raises(InputError, match="priority"):
        llm.generate(["a", "b"], greedy(), use_tqdm=False, priority=[1])


def test_every_stage_is_timed(llm):
    start = time.perf_counter()
    prompt = {"prompt": PLACEHOLDER + "Read. " * 12, "multi_modal_data": {"image": Image.new("RGB", (64, 32), (71, 3, 140))}}
    first, again = (llm.generate(prompt, greedy(), use_tqdm=False)[0] for _ in range(2))
    total = time.perf_counter() - start
    stages = {"fetch", "plan", "decode", "process", "queue", "encode", "prefill", "decode_steps"}
    assert set(first.timings) == stages
    assert sum(first.timings.values()) + sum(again.timings.values()) <= total
    (item,) = first.trace
    assert (item.modality, item.cached, item.encoder) == ("image", False, "encoded")
    assert (item.source_bytes, item.num_tokens) == (64 * 32 * 3, first.items[0].num_tokens)
    assert item.num_bytes > 0
    assert set(item.timings) == {"fetch", "decode", "process"}
    assert (again.trace[0].cached, again.trace[0].encoder) == (True, "prefix")
    assert again.num_cached_tokens > 0
