"""Text assembly: stop strings over token borders, text that is never taken back, log probabilities with their words."""

import pytest
from sensorium.engine.output import Answer, Assembly, find_stop, held_back
from sensorium.engine.sampling_params import SamplingParams
from sensorium.engine.types import Logprob, TokenOutput


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
    """Feed a text in pieces; (every shown text, whether a stop string ended it, the answer)."""
    answer = Answer(0, SamplingParams(max_tokens=None, **params), Letters())
    ids = Letters().encode(text)
    pieces = [tuple(ids[i : i + split]) for i in range(0, len(ids), split)]
    shown = []
    for i, piece in enumerate(pieces):
        finish = end if i == len(pieces) - 1 else None
        stopped = answer.add(TokenOutput("r", piece, finish_reason=finish))
        shown.append(answer.shown)
        if stopped:
            return shown, True, answer
    return shown, False, answer


@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_found_across_token_borders(split, include):
    shown, stopped, answer = run("hello STOP and more", split, stop=["STOP"], include_stop_str_in_output=include)
    assert stopped
    assert answer.text == "hello STOP"[: 10 if include else 6]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "STOP")
    assert all(answer.text.startswith(text) for text in shown), "text was taken back"


def test_text_that_may_begin_a_stop_string_waits():
    shown, stopped, answer = run("a STO b", stop=["STOP"], end="length")
    assert not stopped
    assert shown == ["a", "a ", "a ", "a ", "a ", "a STO ", "a STO b"]
    assert answer.text == "a STO b"
    assert run("a STO", stop=["STOP"], end="length")[0][-1] == "a STO", "at the end nothing is held back"


def test_the_earliest_of_several_stop_strings_wins():
    assert run("one two three", 13, stop=["three", "two"])[2].stop_reason == "two"
    assert find_stop("abcabc", ["ca", "b"], 0) == (1, "b")
    assert find_stop("abcabc", ["b"], 2) == (4, "b")
    assert find_stop("abcd", ["bc"], 2) == (1, "bc"), "a stop string may begin in text that was searched"
    assert held_back("abc", ["cd", "bcx"]) == 2
    assert held_back("abc", []) == 0


def test_min_tokens_hold_for_stop_strings():
    _, stopped, answer = run("xx..xx", stop=["x"], min_tokens=3)
    assert stopped
    assert answer.text == "xx.."
    assert len(answer.token_ids) == 5


def test_half_a_character_is_held_back():
    answer = Answer(0, SamplingParams(max_tokens=None), Letters())
    answer.add(TokenOutput("r", (97, 200)))
    assert answer.shown == "a"
    answer.add(TokenOutput("r", (201,)))
    assert answer.shown == "aé"
    answer.add(TokenOutput("r", (200,), finish_reason="length"))
    assert answer.shown == "aé�"


def test_the_ending_token_is_no_text_unless_asked():
    for include, text in ((False, "ab"), (True, "ab!")):
        answer = Answer(0, SamplingParams(stop_token_ids=[33], include_stop_str_in_output=include), Letters())
        answer.add(TokenOutput("r", (97, 98)))
        answer.add(TokenOutput("r", (33,), finish_reason="stop", stop_reason=33))
        assert (answer.text, answer.token_ids) == (text, [97, 98, 33])
        assert answer.output().stop_reason == 33


def test_special_tokens_are_left_out_unless_asked():
    for skip, text in ((True, "ab"), (False, "a<end>b")):
        answer = Answer(0, SamplingParams(skip_special_tokens=skip), Letters())
        answer.add(TokenOutput("r", (97, 0, 98), finish_reason="length"))
        assert answer.text == text


def test_logprobs_carry_words_and_a_sum():
    answer = Answer(0, SamplingParams(logprobs=1), Letters())
    answer.add(TokenOutput("r", (97,), ({97: Logprob(-1.0, 2), 98: Logprob(-0.5, 1)},)))
    answer.add(TokenOutput("r", (99,), ({99: Logprob(-0.25, 1)},), finish_reason="length"))
    output = answer.output()
    assert output.cumulative_logprob == -1.25
    assert output.logprobs[0] == {97: Logprob(-1.0, 2, "a"), 98: Logprob(-0.5, 1, "b")}


def test_an_assembly_ends_with_its_last_answer():
    assembly = Assembly("7", SamplingParams(n=2, temperature=1.0), Letters())
    assembly.add(TokenOutput("7.1", (97,), finish_reason="length", timings={"queue": 1.0}))
    assert not assembly.finished
    assembly.add(TokenOutput("7.0", (98,), finish_reason="stop", timings={"queue": 2.0}))
    output = assembly.output()
    assert output.finished
    assert [answer.index for answer in output.outputs] == [0, 1]
    assert [answer.finish_reason for answer in output.outputs] == ["stop", "length"]
    assert output.timings == {"queue": 2.0}
    failed = Assembly("8", SamplingParams(), Letters())
    failed.end("error", "too long")
    assert (failed.output().error, failed.output().outputs[0].finish_reason) == ("too long", "error")
