"""Errors about unknown arguments suggest our name for another library's name or a typing error."""

from __future__ import annotations

from typing import Any

import pytest
from sensorium import LLM, BeamSearchParams, Media, PoolingParams, SamplingParams, StructuredOutputsParams
from sensorium.callers.errors import ConfigError, InputError, hint
from sensorium.callers.other_names import _NAMES


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, max_model_len=256, warm_up=False) as llm:
        yield llm


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (SamplingParams, "max_new_tokens", "did you mean max_tokens?"),
        (SamplingParams, "max_completion_tokens", "did you mean max_tokens?"),
        (SamplingParams, "do_sample", "do_sample=False is temperature=0."),
        (SamplingParams, "num_beams", "LLM.beam_search"),
        (SamplingParams, "num_return_sequences", "did you mean n?"),
        (SamplingParams, "stop_sequences", "did you mean stop?"),
        (SamplingParams, "eos_token_id", "did you mean stop_token_ids?"),
        (SamplingParams, "guided_json", "did you mean structured_outputs?"),
        (SamplingParams, "frequency_penality", "did you mean frequency_penalty?"),
        (BeamSearchParams, "num_beams", "did you mean beam_width?"),
        (StructuredOutputsParams, "choices", "did you mean choice?"),
        (PoolingParams, "dimension", "did you mean dimensions?"),
        (Media, "max_pixel", "did you mean max_pixels?"),
    ],
)
def test_unknown_keyword_of_a_class(kind: Any, name: str, said: str):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'") as caught:
        kind(**{name: 1})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch_dtype", "did you mean dtype?"),
        ("compute_type", "did you mean dtype?"),
        ("device_map", "did you mean device?"),
        ("max_length", "did you mean max_model_len?"),
        ("n_ctx", "did you mean max_model_len?"),
        ("load_in_8bit", "did you mean quantization?"),
        ("model_name", "did you mean model?"),
        ("use_auth_token", "HF_TOKEN"),
        ("cache_dir", "HF_HUB_CACHE"),
    ],
)
def test_unknown_option_of_an_engine(name: str, said: str):
    with pytest.raises(ConfigError) as caught:
        LLM("nowhere", **{name: 1})
    assert said in str(caught.value)


def test_a_request_that_was_not_sent_can_be_shown(llm):
    assert "RequestHandle" in repr(llm.request("a"))


def test_arguments_of_other_transcribers(llm):
    for name, said in (
        ("num_beams", "did you mean beam_size"),
        ("word_timestamps", 'timestamps="word" gives the times of words'),
        ("vad_filter", "did you mean vad"),
        ("initial_prompt", "did you mean prompt"),
        ("clip_timestamps", "cut the samples"),
        ("suppress_tokens", "the checkpoint suppresses"),
        ("repetition_penalty", r"SamplingParams\(repetition_penalty"),
        ("return_timestamps", "did you mean timestamps"),
        ("max_new_tokens", r"SamplingParams\(max_tokens"),
        ("best_of", "did you mean beam_size"),
        ("n", "there is one answer for each input; leave it out"),
        ("thinking_token_budget", "'thinking_token_budget'; give max_tokens$"),
        ("logprob_token_ids", "'logprob_token_ids'; give logprobs"),
    ):
        with pytest.raises(InputError, match=said):
            llm.transcribe("a.wav", **{name: 5})


def test_sampling_parameters_that_are_given_to_a_call(llm):
    messages = [{"role": "user", "content": "a"}]
    for call in (
        lambda **values: llm.generate("a", **values),
        lambda **values: llm.chat(messages, **values),
        lambda **values: llm.stream("a", **values),
        lambda **values: llm.live("a", **values),
        lambda **values: llm.ocr([], **values),
    ):
        with pytest.raises(InputError, match=r"give sampling_params=SamplingParams\(temperature=\.\.\.\)"):
            call(temperature=0.0)
        with pytest.raises(InputError, match=r"SamplingParams\(max_tokens=|did you mean max_tokens"):  # ocr has max_tokens
            call(max_new_tokens=3)
    with pytest.raises(InputError) as caught:
        llm.generate("a", best_of=3)
    assert (caught.value.info.code, caught.value.info.param) == ("unknown_name", "best_of")
    with pytest.raises(InputError, match=r"SamplingParams\(n="):
        llm.generate("a", n=3)
    with pytest.raises(InputError, match=r"SamplingParams\(extra_args="):
        llm.generate("a", extra_args={"a": 1})
    with pytest.raises(InputError, match=r"unknown argument .images.*put each item into its message, as in"):
        llm.chat(messages, images=[])
    with pytest.raises(InputError, match="vectors have length 1 unless pooling_params="):
        llm.embed("a", normalize_embeddings=True)
    with pytest.raises(InputError, match="one batch"):
        llm.embed("a", batch_size=3)


def test_every_entry_gives_a_hint():
    for name, meant in _NAMES.items():
        assert hint(name, ["other", *meant]) != hint("xyz", ["other", *meant]), name
        assert name not in meant


def test_the_repr_says_that_an_engine_is_closed(checkpoint):
    with LLM(checkpoint, max_model_len=256, warm_up=False) as llm:
        assert "closed" not in repr(llm)
    assert repr(llm).endswith(", closed=True)")
