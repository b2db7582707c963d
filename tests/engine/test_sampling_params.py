"""Sampling parameters refuse invalid values in one line with the value and the limit."""

import pytest
from sensorium.engine.sampling_params import SamplingParams, from_generation_config
from sensorium.mm.errors import InputError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", 1.5), ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")),
        ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 2), ("max_tokens", 0),
        ("min_tokens", -1), ("seed", 1.5), ("seed", True), ("logprobs", -1), ("prompt_logprobs", "x"),
        ("repetition_penalty", 0), ("repetition_penalty", 1e308), ("repetition_penalty", 1e-320),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("stop", [""]), ("stop", [5]),
        ("bad_words", "bad"), ("stop_token_ids", [-1]), ("logit_bias", {5: 101}), ("logit_bias", {"x": 1}),
    ],
)  # fmt: skip
def test_values_outside_their_limits(name, value):
    with pytest.raises(InputError, match=name) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)
    assert caught.value.info.param.partition(".")[0] == name


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", "a", "temperature='a' must be a number, 0 (greedy) or above, not a str"),
        ("top_p", None, "top_p=None must be a number, above 0 and at most 1, not None"),
        ("n", 1.5, "n=1.5 must be an integer, at least 1 and at most 1024, not a float"),
        ("seed", "x", "seed='x' must be an integer, from -2**63 to 2**64 - 1, not a str"),
        ("temperature", -1, "temperature=-1 must be 0 (greedy) or above"),
    ],
)
def test_what_is_no_number_is_told_by_its_type(name, value, said):
    with pytest.raises(InputError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == said


def test_contradictions():
    with pytest.raises(InputError, match="greedy"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(InputError, match="min_tokens=5 is above max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(TypeError):
        SamplingParams(temprature=0.5)


def test_forms_are_normalised():
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0}
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(temperature=0.0).plain
    assert not SamplingParams(temperature=0.0, logprobs=0).plain


def test_generation_config_gives_defaults():
    params = from_generation_config(
        {"temperature": 0.1, "top_p": 0.001, "repetition_penalty": 1.05, "do_sample": True, "eos_token_id": 3}
    )
    assert (params.temperature, params.top_p, params.repetition_penalty, params.top_k) == (0.1, 0.001, 1.05, 0)
    assert from_generation_config({"do_sample": False, "temperature": 0.7}).greedy
    assert from_generation_config({}) == SamplingParams()


def test_a_temperature_too_small_to_divide_by_is_greedy():
    assert SamplingParams(temperature=1e-38).greedy
    assert not SamplingParams(temperature=1e-3).greedy
