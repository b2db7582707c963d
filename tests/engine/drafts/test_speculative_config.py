"""vLLM's `speculative_config`: what is mapped, and what is refused by name."""

import pytest
from sensorium.callers.errors import ConfigError, InputError
from sensorium.engine.config import make_config
from sensorium.engine.sampling_params import SamplingLimits, SamplingParams
from sensorium.engine.speculative_config import DraftLimits, read_speculative_config


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        (None, DraftLimits()),
        ({"num_speculative_tokens": 0}, DraftLimits(depth=0, suffix=True, corpus_answers=10_000)),
        ({"method": "suffix"}, DraftLimits(suffix=True, corpus_answers=10_000)),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 9, "suffix_decoding_max_cached_requests": 0},
            DraftLimits(suffix=True, longest=9),
        ),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 1.0}, DraftLimits(suffix=True, corpus_answers=10_000)),
        ({"method": "ngram", "num_speculative_tokens": 4}, DraftLimits(4, True)),
        ({"method": "mtp"}, DraftLimits(3, predicted=3, method="mtp")),
        ({"method": "glm_ocr_mtp", "num_speculative_tokens": 1}, DraftLimits(1, predicted=1, method="mtp")),
        ({"model": "a/b"}, DraftLimits(3, predicted=3, method="draft_model", model="a/b")),
        (
            {"method": "draft_model", "model": "a", "num_speculative_tokens": 5, "quantization": "int8"},
            DraftLimits(5, predicted=5, method="draft_model", model="a", quantization="int8"),
        ),
        ({"method": "ngram", "prompt_lookup_max": 5}, DraftLimits(suffix=True, shortest=5, longest=5)),
        ({"method": "custom_class", "model": "a.b:C", "num_speculative_tokens": 3}, DraftLimits(3, custom="a.b:C")),
        ({"model": "[ngram]", "prompt_lookup_min": 2, "prompt_lookup_max": 4}, DraftLimits(15, True, 2, 4)),
    ],
)
def test_what_is_mapped(given, limits):
    assert read_speculative_config(given) == limits
    assert make_config("m", {"speculative_config": given}).speculative_config == given


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("ngram", "must be a mapping"),
        ({}, "has no method"),
        ({"num_speculative_tokens": 3}, "has no method"),
        ({"method": "draft_model"}, "must be the folder of the model that drafts, or its name on the Hub"),
        ({"model": 3}, "must be the folder of the model that drafts, or its name on the Hub"),
        ({"model": "a", "quantization": "int5"}, "['quantization']='int5' must be one of int8, fp8, int4"),
        ({"model": "a", "revision": "main"}, "give the folder of that revision as the model"),
        ({"method": "suffix", "parallel_drafting": True}, "['parallel_drafting']=True cannot be honoured"),
        ({"method": "mtp", "parallel_drafting": True}, "['parallel_drafting']=True cannot be honoured"),
        ({"model": "a", "parallel_drafting": 1}, "['parallel_drafting']=1 must be True or False"),
        ({"method": "mtp", "quantization": "int8"}, "it is for a draft model"),
        ({"method": "medusa"}, "['method']='medusa' cannot be honoured; the methods are ngram, suffix, mtp, draft_model, "),
        ({"method": "eagle", "model": "x"}, "['method']='eagle' cannot be honoured; the methods are ngram, suffix, mtp, "),
        ({"method": "mtp", "model": "x"}, "method 'mtp' has no model"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "must be an integer from 0 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be an integer from 0 to 64"),
        ({"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 4}, "is above prompt_lookup_max=4"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 0.5}, "cannot be honoured: the number of tokens follows"),
        ({"method": "suffix", "num_speculative_token": 3}, "unknown key 'num_speculative_token'; did you mean"),
        ({"method": []}, "cannot be honoured"),
        ({"method": "custom_class"}, "must be the path of a class"),
        ({"method": "custom_class", "model": ""}, "must be the path of a class"),
        ({"method": "custom_class", "model": lambda: None}, "cannot be found by its name; define it at the top level"),
        ({"method": "custom_class", "model": "a:b", "prompt_lookup": 3}, "unknown key 'prompt_lookup'"),
    ],
)
def test_what_is_refused(given, reason):
    with pytest.raises(ConfigError, match=r"(?s).*") as caught:
        make_config("m", {"speculative_config": given})
    assert reason in str(caught.value)
    assert caught.value.info.param == "speculative_config"


def test_a_path_becomes_text(tmp_path):
    given = {"model": tmp_path, "num_speculative_tokens": 2}
    assert make_config("m", {"speculative_config": given}).speculative_config == {**given, "model": str(tmp_path)}


@pytest.mark.parametrize("given", [5, b"x", {"a": 1}, [1.5], [-1], ["x"], "\ud800", object()])
def test_a_draft_is_a_text_or_token_ids(given):
    with pytest.raises(InputError) as caught:
        SamplingParams(draft_text=given)
    assert caught.value.info.param == "draft_text"


def test_a_draft_has_a_limit():
    assert SamplingParams(draft_text=[1, 2]).draft_text == (1, 2)
    with pytest.raises(InputError, match="draft_text has 1,048,577 characters"):
        SamplingLimits().check(SamplingParams(draft_text="x" * (1 + (1 << 20))))
