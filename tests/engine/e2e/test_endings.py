"""Requests that are forgotten, garbage collected or closed at any moment free their memory, and no caller hangs."""

import gc
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import InputError
from waiting import LONG as LONG_WAIT
from waiting import wait_until

MODEL = Path(__file__).parents[3] / "assets" / "tiny-vl"
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture
def llm():
    with LLM(MODEL, max_model_len=256, max_num_seqs=4) as llm:
        yield llm


def settled(llm):
    llm.engine.loop.call(lambda engine_loop: None).result(LONG_WAIT)
    return llm.stats.running, llm.stats.idle, llm.stats.blocks_used


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_forgotten_session_is_closed(llm, turns):
    session = llm.live("user 1 moves left", SHORT if turns else LONG)
    for _ in range(turns):
        session.answer()
        session.append("more")
    del session
    gc.collect()
    assert settled(llm) == (0, 0, 0)


def test_sessions_forgotten_one_after_the_other_do_not_fill_the_cache(llm):
    for _ in range(20):
        assert llm.live("a" * 200, SHORT).answer().error is None
    gc.collect()
    assert settled(llm) == (0, 0, 0)


def test_idle_sessions_do_not_block_other_requests(llm):
    sessions, ended = [llm.live("ab" * i, SHORT) for i in range(1, 21)], []
    caller = threading.Thread(target=lambda: ended.extend(llm.generate(["a"] * 9, SHORT, use_tqdm=False)), daemon=True)
    for session in sessions:
        assert session.answer().error is None
    caller.start()
    caller.join(LONG_WAIT)
    assert [output.error for output in ended] == [None] * 9
    assert llm.stats.idle == 20
    for session in sessions:
        session.close()
    assert settled(llm) == (0, 0, 0)


@pytest.mark.parametrize("wrong", ["3", 1.5, True, None])
def test_truncate_of_a_session_takes_a_number(llm, wrong):
    with llm.live("user 1 moves left", SHORT) as session:
        session.answer()
        before = session.token_ids
        with pytest.raises(InputError, match="num_tokens must be an integer"):
            session.truncate(wrong)
        assert session.token_ids == before


def test_a_truncation_inside_an_item_names_the_valid_lengths(llm):
    prompt = {"prompt": "ab<|image_pad|>c", "multi_modal_data": {"image": np.zeros((64, 64, 3), np.uint8)}}
    with llm.live(prompt, SHORT) as session:
        answer = session.answer()
        assert answer.error is None
        with pytest.raises(InputError) as found:
            session.truncate(3)
        said = r"cannot truncate to 3 tokens: that is inside image 0; truncate to (\d+) or fewer, or to (\d+) or more"
        start, end = re.fullmatch(said, str(found.value)).groups()
        session.truncate(int(end))
        session.truncate(int(start))
        assert len(session.token_ids) == int(start)


def test_elements_of_a_session_are_scaled_by_its_only_image(llm):
    """An image of an earlier turn counts; with two images, an answer does not say which one it means."""

    def sizes():
        marked = session.answer().outputs[0].marked
        return None if marked is None else [image.size for image in marked.images]

    small, wide = np.zeros((64, 64, 3), np.uint8), np.zeros((64, 96, 3), np.uint8)
    with llm.live("user 1", SHORT) as session:
        assert sizes() is None
        session.append({"prompt": "<|image_pad|>c", "multi_modal_data": {"image": small}})
        assert sizes() == [(64, 64)]
        session.append("more")
        assert sizes() == [(64, 64)]
        length = len(session.token_ids)
        session.append({"prompt": "<|image_pad|>d", "multi_modal_data": {"image": wide}})
        assert sizes() is None
        session.append("more")
        assert sizes() is None
        session.truncate(length)
        session.append("more")
        assert sizes() == [(64, 64)]
    with llm.live({"prompt": "<|image_pad|>c", "multi_modal_data": {"image": wide}}, SHORT) as session:
        assert sizes() == [(64, 96)]
        session.append("more")
        assert sizes() == [(64, 96)]


@pytest.mark.parametrize("kind", ["stream", "live"])
def test_the_collector_may_run_in_the_loop(llm, kind):
    """Objects in a reference cycle are closed in the thread in which the garbage collector runs."""
    circle = [llm.stream("user 1 moves left", LONG) if kind == "stream" else llm.live("user 1 moves left", LONG)]
    if kind == "stream":
        next(circle[0])
    circle.append(circle)
    gc.disable()
    try:
        del circle
        llm.engine.loop.call(lambda engine_loop: gc.collect()).result(LONG_WAIT)
    finally:
        gc.enable()
    assert settled(llm) == (0, 0, 0)


def test_close_while_the_loop_reads_messages(llm):
    """The loop reads all messages at once, including the None that ends it."""
    begun, go = threading.Event(), threading.Event()
    llm.engine.loop.call(lambda engine_loop: (begun.set(), go.wait(LONG_WAIT)))
    assert begun.wait(LONG_WAIT)
    closing = threading.Thread(target=llm.close, daemon=True)
    closing.start()
    wait_until(lambda: not llm.engine.loop._messages.empty())
    go.set()
    closing.join(LONG_WAIT)
    assert not closing.is_alive()


def test_a_session_that_is_closed_during_its_answer_answers_with_abort(llm):
    session, answers = llm.live("user 1 moves left", LONG), []
    session.close()
    reading = threading.Thread(target=lambda: answers.append(session.answer()), daemon=True)
    reading.start()
    reading.join(LONG_WAIT)
    assert [answer.outputs[0].finish_reason for answer in answers] == ["abort"]
    session.close()
    with pytest.raises(InputError, match="the live session has ended"):
        session.append("more")
    assert settled(llm) == (0, 0, 0)


def test_sessions_that_have_ended_answer_or_refuse_at_once(llm):
    """This holds after `close`, at the end of the `with` block, after an error, and after the engine was closed."""
    never, answered, failed, left = (llm.live(text, SHORT) for text in ("a", "b", "<|image_pad|>", "c"))
    answered.answer()
    with llm.live("d", SHORT) as ended:
        ended.answer()
    never.close()
    answered.close()
    assert failed.answer().error is not None

    def checks(session):
        reached = []
        assert session.answer().finished
        assert not list(session.stream())
        for ask in (lambda: session.append("more"), lambda: session.truncate(1)):
            with pytest.raises(InputError, match=r"has ended; begin a new one|engine was closed"):
                ask()
            reached.append(ask)
        session.close()
        assert session.answer().finished
        return len(reached)

    def all_checks(sessions, counts):
        counts += map(checks, sessions)

    counts = []
    caller = threading.Thread(target=all_checks, args=((never, answered, failed, ended), counts), daemon=True)
    caller.start()
    caller.join(LONG_WAIT)
    assert counts == [2] * 4
    llm.close()
    caller = threading.Thread(target=all_checks, args=((left,), counts), daemon=True)
    caller.start()
    caller.join(LONG_WAIT)
    assert counts == [2] * 5
