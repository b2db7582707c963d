"""Sampling parameters refuse invalid values in one line with the value and the limit."""

import math
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.callers.errors import ConfigError, InputError
from sensorium.engine.config import EngineConfig
from sensorium.engine.core.codec import decode, encode
from sensorium.engine.pooling_params import PoolingParams
from sensorium.engine.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    from_generation_config,
)
from sensorium.engine.structured_outputs import StructuredOutputsParams
from sensorium.engine.worker.sampler import _sampling_rules
from sensorium.engine.worker.sampling_state import SamplingState
from sensorium.kernels.sampling import cpu as cpu_sampling
from sensorium.kernels.sampling import reference


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", 1.5), ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")),
        ("temperature", 1e39),
        ("max_tokens", 10**400), ("top_k", 10**400), ("logit_bias", {"²": 1}), ("stop", ["a"] * 2000),
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


@pytest.mark.parametrize("name", ["best_of", "extra_args", "flat_logprobs", "output_kind"])
@pytest.mark.parametrize("array", [np.zeros(3), torch.zeros(2)], ids=["array", "tensor"])
def test_arrays_for_arguments_of_other_types(name, array):
    with pytest.raises(InputError, match=name):
        SamplingParams(**{name: array})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", "a", "temperature='a' must be a number, 0 (greedy) or above, at most 1e6, not a str"),
        ("top_p", None, "top_p=None must be a number, above 0 and at most 1, not None"),
        ("n", 1.5, "n=1.5 must be an integer, at least 1 and at most 1024, not a float"),
        ("seed", "x", "seed='x' must be an integer, from -2**63 to 2**64 - 1, not a str"),
        ("temperature", -1, "temperature=-1 must be 0 (greedy) or above, at most 1e6"),
    ],
)
def test_errors_for_other_types_name_the_type(name, value, said):
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


def test_overrides_replace_the_generation_config():
    stored = {"do_sample": False, "temperature": 0.7, "top_p": 0.5}
    assert from_generation_config(stored, {"top_p": 0.9}) == SamplingParams(temperature=0.0, top_p=0.9)
    assert from_generation_config(stored, {"temperature": 0.3}) == SamplingParams(temperature=0.3, top_p=0.5)
    assert from_generation_config(stored, {"temperature": 0.3, "do_sample": False}).greedy
    assert from_generation_config(stored, {"max_new_tokens": 9}).max_tokens == 9


@pytest.mark.parametrize(
    ("key", "value", "code", "param"),
    [
        ("temprature", 0.5, "unknown_name", "override_generation_config"),
        ("eos_token_id", 3, "unknown_name", "override_generation_config"),
        ("temperature", -1, "invalid_value", "override_generation_config.temperature"),
        ("top_k", "x", "invalid_value", "override_generation_config.top_k"),
        ("max_new_tokens", 0, "invalid_value", "override_generation_config.max_new_tokens"),
        ("do_sample", "no", "invalid_value", "override_generation_config.do_sample"),
        ("suppress_tokens", [-1], "invalid_value", "override_generation_config.suppress_tokens"),
        ("begin_suppress_tokens", 5, "invalid_value", "override_generation_config.begin_suppress_tokens"),
    ],
)
def test_overrides_that_cannot_be_used_are_refused_by_name(key, value, code, param):
    with pytest.raises(ConfigError) as caught:
        EngineConfig("model", override_generation_config={key: value})
    assert (caught.value.info.code, caught.value.info.param) == (code, param)


def test_a_seed_of_minus_one_is_none_as_in_vllm():
    assert SamplingParams(seed=-1).seed is None
    params = SamplingParams(seed=3)
    params.seed = -1
    assert params.clone().seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_a_temperature_too_small_to_divide_by_is_greedy():
    assert SamplingParams(temperature=1e-38).greedy
    assert not SamplingParams(temperature=1e-3).greedy


LOGITS = st.lists(st.one_of(st.floats(-50, 50, width=32), st.just(-math.inf)), min_size=2, max_size=40)


@given(
    LOGITS,
    st.one_of(st.floats(1e-5, 1e6), st.just(1e6)),
    st.one_of(st.integers(-1, 50), st.just(2**63 - 1)),
    st.floats(0, 1, exclude_min=True),
    st.floats(0, 1),
    st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2**-53)),
)
def test_no_admitted_value_draws_a_forbidden_token(logits, temperature, top_k, top_p, min_p, number):
    """Each backend draws a token whose logit is finite, or reports that there is none."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = list(_sampling_rules(SamplingState(params, [1], 1), 0))
    row[4] = number
    rules = torch.tensor([row], dtype=torch.float64)
    for backend in (cpu_sampling.sample, reference.sample):
        (token,), (wrong,) = (one.tolist() for one in backend(torch.tensor([logits]), rules))
        allowed = [i for i, value in enumerate(logits) if math.isfinite(value)]
        assert (wrong == reference.NO_TOKEN_ALLOWED) == (not allowed)
        assert not allowed or token in allowed


WRONG = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=3), st.binary(max_size=3),
    st.sampled_from([10**400, -(10**400), 2**63, "²", "9" * 5000, "\ud800", 1e39, Fraction(1, 3), Decimal("1e999"),
                     1j, object(), np.float32("nan"), np.int64(3), np.zeros(3), torch.zeros(2), {}, int, lambda: 1]),
)  # fmt: skip
KEYS = st.one_of(st.integers(), st.text(max_size=3), st.sampled_from(["²", "9" * 5000, 10**400, None, (1,)]))
VALUES = st.one_of(
    WRONG, st.lists(WRONG, max_size=3), st.tuples(WRONG), st.dictionaries(KEYS, WRONG, max_size=3), st.just(["a"] * 10**5),
    st.just(dict.fromkeys(range(10**5), 1)), st.dictionaries(st.text(max_size=3), st.dictionaries(KEYS, WRONG, max_size=2)),
)  # fmt: skip


@pytest.mark.parametrize(
    "kind", [SamplingParams, StructuredOutputsParams, RepetitionDetectionParams, PoolingParams], ids=lambda kind: kind.__name__
)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_value_of_any_field_is_taken_or_refused_with_the_field_s_name(kind, data):
    name = data.draw(st.sampled_from([field.name for field in fields(kind)]))
    params = error = None
    try:
        params = kind(**{name: data.draw(VALUES)})
    except InputError as found:
        error = found
    if error is None:
        message = params.request("last") if isinstance(params, PoolingParams) else params
        assert decode(encode(message)) == message
    else:
        assert error.info.param.split(".")[-1] in (name, "structured_outputs", "repetition_detection"), error.info
        assert len(str(error).encode()) < 500


@pytest.mark.parametrize("name", ["n", "temperature", "top_p", "top_k", "max_tokens", "min_tokens", "seed", "logprobs", "stop"])
def test_an_integer_too_long_to_write_is_refused(name):
    with pytest.raises(InputError, match=f"{name}=0x31e2080103651"):
        SamplingParams(**{name: 10**5000})


def test_parameters_can_be_changed_and_copied():
    params = SamplingParams(max_tokens=5, stop=["a"])
    copy = params.clone()
    params.max_tokens, params.stop = 7, "b"
    assert (copy.max_tokens, copy.stop) == (5, ("a",))
    assert (params.clone().max_tokens, params.clone().stop) == (7, ("b",))
    params.top_p = 2.0
    with pytest.raises(InputError, match=r"top_p=2\.0 must be above 0"):
        params.clone()
    with pytest.raises(AttributeError, match="unknown sampling parameter 'max_token'; did you mean max_tokens"):
        params.max_token = 5


def test_parameters_of_vllm():
    json_schema = StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=False)
    assert json_schema.whitespace == "flexible"
    params = SamplingParams(
        guided_decoding=json_schema, best_of=1, skip_clone=True, extra_args=None, output_kind=RequestOutputKind.DELTA
    )
    assert params.structured_outputs == json_schema
    params.guided_decoding = None
    assert params.structured_outputs is None
    assert decode(encode(params)) == params
    assert decode(encode(params)).output_kind is RequestOutputKind.DELTA
    assert SamplingParams.from_optional(temperature=None, max_tokens=3) == SamplingParams(max_tokens=3)
    assert SamplingParams(allowed_token_ids=[1, 2]).processors == {"allowed_tokens": {"tokens": (1, 2)}}
    assert not SamplingParams(temperature=0.0, allowed_token_ids=[1, 2]).plain


def test_extra_args_of_vllm_are_those_of_the_processor_against_repeated_ngrams():
    arguments = {"ngram_size": 3, "window_size": 90, "whitelist_token_ids": (5,)}
    params = SamplingParams(extra_args={**arguments, "whitelist_token_ids": {5}}, logits_processors=["suppress_tokens"])
    assert params.logits_processors == {"suppress_tokens": {}, "no_repeat_ngrams": arguments}
    assert decode(encode(params)) == params
    later = SamplingParams(extra_args={})
    assert later == SamplingParams()
    later.extra_args = arguments
    assert later == SamplingParams(logits_processors={"no_repeat_ngrams": arguments}) == later.clone()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"best_of": 3}, "best_of=3 cannot be honoured: ask for n answers"),
        ({"extra_args": {"a": 1}}, "extra_args={'a': 1} cannot be honoured: nothing reads 'a'; give ngram_size"),
        ({"extra_args": {"window_size": 9}}, "ngram_size is missing beside window_size"),
        ({"extra_args": {"ngram_size": 0}}, "extra_args: ngram_size is 0"),
        ({"extra_args": [1]}, "extra_args=[1] must map names to values"),
        ({"thinking_token_budget": 5}, "thinking_token_budget=5 cannot"),
        ({"skip_reading_prefix_cache": True}, "give the prompt its own cache_salt"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [1], "logits_processors": {"allowed_tokens": {"tokens": [2]}}}, "give one of them"),
        ({"output_kind": 7}, "output_kind=7 must be a RequestOutputKind"),
        ({"detokenize": False, "stop": "x"}, "stop strings need the text"),
        ({"detokenize": 1}, "detokenize=1 must be True or False"),
    ],
)
def test_parameters_of_vllm_that_cannot_be_honoured(options, said):
    with pytest.raises(InputError) as caught:
        SamplingParams(**options)
    assert said in str(caught.value)
    with pytest.raises(InputError, match="structural_tag='x' cannot be honoured: give a grammar"):
        StructuredOutputsParams(json_object=True, structural_tag="x")
