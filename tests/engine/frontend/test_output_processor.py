"""Text of answers: stop strings across tokens, text that is never taken back, and texts of log probabilities."""

import pickle
import random
from dataclasses import replace

import pytest
from sensorium.callers.errors import ErrorInfo, InputError
from sensorium.engine.frontend.output_processor import (
    CompletionBuilder,
    OutputBuilder,
    find_stop,
    num_stable_tokens,
    partial_stop_length,
)
from sensorium.engine.frontend.processed_prompt import ProcessedPrompt
from sensorium.engine.sampling_params import RepetitionDetectionParams, SamplingParams
from sensorium.engine.scheduler.repetition import find_loop
from sensorium.engine.types import Logprob, TokenOutput
from sensorium.mm.types import ItemGeometry, ItemPlan, MultiModalFeature, PlaceholderRange
from sensorium.processors.elements.element import ImageScale
from sensorium.processors.elements.marked_text import MarkedText


class Letters:
    """Token i is the letter chr(i); token 0 is special; tokens 200 and 201 are the two halves of one character."""

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens=True):
        raw = b"".join(
            {200: b"\xc3", 201: b"\xa9", 0: b"" if skip_special_tokens else b"<end>"}.get(i, bytes([i])) for i in ids
        )
        return raw.decode("utf-8", "replace")


def run(text, split=1, end=None, **params):
    """Feed a text in pieces. Return every stable text, True if a stop string ended it, and the answer."""
    answer = CompletionBuilder(0, SamplingParams(max_tokens=None, **params), Letters())
    ids = Letters().encode(text)
    pieces = [tuple(ids[i : i + split]) for i in range(0, len(ids), split)]
    texts = []
    for i, piece in enumerate(pieces):
        finish = end if i == len(pieces) - 1 else None
        stopped = answer.add(TokenOutput("r", piece, finish_reason=finish))
        texts.append(answer.stable_text)
        if stopped:
            return texts, True, answer
    return texts, False, answer


@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_found_across_token_borders(split, include):
    texts, stopped, answer = run("hello STOP and more", split, stop=["STOP"], include_stop_str_in_output=include)
    assert stopped
    assert answer.text == "hello STOP"[: 10 if include else 6]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "STOP")
    assert all(answer.text.startswith(text) for text in texts), "text was taken back"


def test_text_that_may_begin_a_stop_string_waits():
    texts, stopped, answer = run("a STO b", stop=["STOP"], end="length")
    assert not stopped
    assert texts == ["a", "a ", "a ", "a ", "a ", "a STO ", "a STO b"]
    assert answer.text == "a STO b"
    assert run("a STO", stop=["STOP"], end="length")[0][-1] == "a STO", "at the end nothing is held back"


def test_the_earliest_of_several_stop_strings_wins():
    assert run("one two three", 13, stop=["three", "two"])[2].stop_reason == "two"
    assert find_stop("abcabc", ["ca", "b"], 0) == (1, "b")
    assert find_stop("abcabc", ["b"], 2) == (4, "b")
    assert find_stop("abcd", ["bc"], 2) == (1, "bc"), "a stop string may begin in text that was searched"
    assert partial_stop_length("abc", ["cd", "bcx"]) == 2
    assert partial_stop_length("abc", []) == 0


def test_min_tokens_hold_for_stop_strings():
    _, stopped, answer = run("xx..xx", stop=["x"], min_tokens=3)
    assert stopped
    assert answer.text == "xx.."
    assert len(answer.token_ids) == 5


def test_half_a_character_is_held_back():
    answer = CompletionBuilder(0, SamplingParams(max_tokens=None), Letters())
    answer.add(TokenOutput("r", (97, 200)))
    assert answer.stable_text == "a"
    answer.add(TokenOutput("r", (201,)))
    assert answer.stable_text == "aé"
    answer.add(TokenOutput("r", (200,), finish_reason="length"))
    assert answer.stable_text == "aé�"


def test_the_ending_token_is_no_text_unless_asked():
    for include, text in ((False, "ab"), (True, "ab!")):
        answer = CompletionBuilder(0, SamplingParams(stop_token_ids=[33], include_stop_str_in_output=include), Letters())
        answer.add(TokenOutput("r", (97, 98)))
        answer.add(TokenOutput("r", (33,), finish_reason="stop", stop_reason=33))
        assert (answer.text, answer.token_ids) == (text, [97, 98, 33])
        assert answer.output().stop_reason == 33


def test_special_tokens_are_left_out_unless_asked():
    for skip, text in ((True, "ab"), (False, "a<end>b")):
        answer = CompletionBuilder(0, SamplingParams(skip_special_tokens=skip), Letters())
        answer.add(TokenOutput("r", (97, 0, 98), finish_reason="length"))
        assert answer.text == text


@pytest.mark.parametrize("delta", [False, True])
def test_elements_are_read_from_the_whole_answer_with_its_special_tokens(delta):
    builder = OutputBuilder("r", SamplingParams(max_tokens=None), Letters())
    form = MarkedText("box_tokens", "", (ImageScale((100, 200), (56, 84)),))
    builder.start(ProcessedPrompt(None, (), answer_format=form))
    text = '{"bbox_2d": [100, 200, 300, 400], "label": "cup"}'
    builder.add(TokenOutput("r.0", tuple(Letters().encode(text[:20]))))
    unfinished = builder.output(delta)
    assert unfinished.outputs[0].marked is None
    assert unfinished.elements == ()
    builder.add(TokenOutput("r.0", (*Letters().encode(text[20:]), 0), finish_reason="stop"))
    output = builder.output(delta)
    assert output.outputs[0].text == (text[20:] if delta else text)
    assert output.outputs[0].marked.text == f"{text}<end>"
    (cup,) = output.elements
    assert (cup.label, cup.box) == ("cup", pytest.approx((20, 20, 60, 40)))


class Counting(Letters):
    """Counts the decoded tokens, special ones included. `fail`: they cannot be decoded."""

    count, fail = 0, False

    def decode(self, ids, skip_special_tokens=True):
        if not skip_special_tokens:
            self.count += len(ids)
        if self.fail:
            raise KeyError(7)
        return super().decode(ids, skip_special_tokens)


def one_answer(tokenizer, *images):
    builder = OutputBuilder("r", SamplingParams(max_tokens=None), tokenizer)
    builder.start(ProcessedPrompt(None, (), answer_format=MarkedText("box_tokens", "", images)))
    builder.add(TokenOutput("r.0", tuple(Letters().encode('{"bbox_2d": [0, 0, 9, 9]}')), finish_reason="stop"))
    return builder


def test_outputs_decode_no_special_tokens_before_elements_are_read():
    tokenizer, scale = Counting(), ImageScale((10, 10), (10, 10))
    builder = one_answer(tokenizer, scale)
    builder.output()
    output = builder.output()
    assert not tokenizer.count
    assert len(output.elements) == len(pickle.loads(pickle.dumps(builder.output())).elements) == 1
    assert one_answer(tokenizer, scale, scale).output().outputs[0].marked is None, "answers do not say which image they mean"
    assert one_answer(tokenizer).output().outputs == output.outputs, "answers compare by what they say"


def test_an_answer_that_cannot_be_decoded_has_no_elements():
    tokenizer = Counting()
    builder = one_answer(tokenizer, ImageScale((10, 10), (10, 10)))
    tokenizer.fail = True
    with pytest.raises(InputError, match="detokenising failed"):
        builder.output()
    builder.close("error")
    builder.freeze()
    output = builder.output()
    assert (output.outputs[0].finish_reason, output.outputs[0].marked, output.elements) == ("error", None, ())
    assert not tokenizer.count


def test_elements_end_at_a_stop_string():
    builder = OutputBuilder("r", SamplingParams(max_tokens=None, stop=["#"]), Letters())
    builder.start(ProcessedPrompt(None, (), answer_format=MarkedText("box_tokens", "", (ImageScale((10, 10), (10, 10)),))))
    builder.add(TokenOutput("r.0", tuple(Letters().encode('{"bbox_2d": [0, 0, 9, 9]}#{"bbox_2d": [0, 0, 9, 9]}'))))
    assert len(builder.output().elements) == 1


def test_logprobs_have_texts_and_a_sum():
    answer = CompletionBuilder(0, SamplingParams(logprobs=1), Letters())
    answer.add(TokenOutput("r", (97,), ({97: Logprob(-1.0, 2), 98: Logprob(-0.5, 1)},)))
    answer.add(TokenOutput("r", (99,), ({99: Logprob(-0.25, 1)},), finish_reason="length"))
    output = answer.output()
    assert output.cumulative_logprob == -1.25
    assert output.logprobs[0] == {97: Logprob(-1.0, 2, "a"), 98: Logprob(-0.5, 1, "b")}


def test_an_output_is_finished_once_it_is_closed():
    assembly = OutputBuilder("7", SamplingParams(n=2, temperature=1.0), Letters())
    assembly.add(TokenOutput("7.1", (97,), finish_reason="length", timings={"queue": 1.0}))
    assembly.add(TokenOutput("7.0", (98,), finish_reason="stop", timings={"queue": 2.0}))
    assert not assembly.finished
    assembly.close("stop")
    output = assembly.output()
    assert output.finished
    assert [answer.index for answer in output.outputs] == [0, 1]
    assert [answer.finish_reason for answer in output.outputs] == ["stop", "length"]
    assert output.timings == {"queue": 2.0}
    failed = OutputBuilder("8", SamplingParams(), Letters())
    error = ErrorInfo("too_long", "the prompt is too long")
    failed.close("error", error)
    assert (failed.output().error, failed.output().outputs[0].finish_reason) == (error, "error")


def test_an_error_names_the_item_as_the_caller_counts():
    """The first item has two pieces, so the core's second video belongs to the first item and its third to the second item."""
    features = tuple(MultiModalFeature(m, {}, PlaceholderRange(0, 1), ItemGeometry(1, 1, 1), "h") for m in ("video",) * 3)
    items = tuple(ItemPlan("vision_chunk", i, (1, 1), (1, 1, 1), 1, 1, 1) for i in range(2))
    prompt = ProcessedPrompt(None, (1,), features, items, item_of=(0, 0, 1))
    for index, expected in ((1, 0), (2, 1), (3, None)):
        builder = OutputBuilder("7", SamplingParams(), Letters())
        builder.start(prompt)
        builder.add(TokenOutput("7.0", (), error=ErrorInfo("encoder_failed", "broken").for_item("video", index)))
        item = ("video", 3) if expected is None else ("vision_chunk", expected)
        assert builder.output().error == ErrorInfo("encoder_failed", "broken").for_item(*item)


def test_an_error_names_the_part_of_the_conversation():
    features = tuple(MultiModalFeature("image", {}, PlaceholderRange(0, 1), ItemGeometry(1, 1, 1), "h") for _ in range(2))
    items = tuple(ItemPlan("image", i, (1, 1), (1, 1, 1), 1, 1, 1) for i in range(2))
    places = {("image", 0): "messages[0].content[0]", ("image", 1): "messages[2].content[1]"}
    broken, dead = ErrorInfo("encoder_failed", "broken").for_item("image", 1), ErrorInfo("engine_dead", "dead")
    for error, param in (
        (broken, "messages[2].content[1]"),
        (replace(broken, param="fps"), "fps"),
        (ErrorInfo("too_long", "long"), "messages"),
        (dead, None),
    ):
        builder = OutputBuilder("7", SamplingParams(), Letters())
        builder.start(ProcessedPrompt(None, (1,), features, items, item_of=(0, 1), places=places))
        builder.close("error", error)
        assert builder.output().error == replace(error, param=param)


def test_text_of_repaired_loops_is_never_shown():
    """The test acts as the core: it finds the loop and says how many tokens to remove."""
    detection = RepetitionDetectionParams(max_cycle=4, min_repeats=3, min_tokens=6, repair=True, max_repairs=1)
    answer = CompletionBuilder(0, SamplingParams(max_tokens=None, logprobs=0, repetition_detection=detection), Letters())
    ids, joined, deltas = [], "", []
    for letter in "once upon xyxyxy":
        ids.append(ord(letter))
        answer.add(TokenOutput("r", (ids[-1],), ({ids[-1]: Logprob(-1.0)},)))
        deltas.append(answer.output(delta=True))
        joined += deltas[-1].text
    loop = find_loop(ids, 0, detection)
    assert loop is not None
    assert joined == "once upon xyxyxy"[: len(joined)]
    assert len(joined) <= loop.start
    answer.add(TokenOutput("r", (33,), ({33: Logprob(-1.0)},), num_removed=len(ids) - loop.start))
    deltas.append(answer.output(delta=True))
    assert answer.text == "once upon !"
    assert "".join(delta.text for delta in deltas) == "once upon !", "no more repairs: nothing waits"
    answer.add(TokenOutput("r", (46,), ({46: Logprob(-1.0)},), finish_reason="length"))
    deltas.append(answer.output(delta=True))
    assert "".join(delta.text for delta in deltas) == answer.text == "once upon !."
    assert [token for delta in deltas for token in delta.token_ids] == answer.token_ids
    assert [entry for delta in deltas for entry in delta.logprobs] == answer.logprobs
    assert answer.output().cumulative_logprob == -12.0


def test_later_loops_begin_after_the_stable_tokens():
    """A loop that is found later begins after the stable tokens, whichever tokens follow."""
    rng = random.Random(0)
    detection = RepetitionDetectionParams(max_cycle=3, min_repeats=2, min_tokens=4, repair=True)
    found = 0
    for _ in range(300):
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 16))]
        for end in range(1, len(ids)):
            if find_loop(ids[:end], 0, detection):
                break
            settled = num_stable_tokens(ids[:end], detection.max_cycle)
            for later in range(end, len(ids) + 1):
                loop = find_loop(ids[:later], 0, detection)
                if loop is not None:
                    found += 1
                    assert loop.start >= settled
                    break
    assert found > 100
