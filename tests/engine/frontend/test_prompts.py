"""Every valid form of a prompt gives a Prompt; every other form gives an error of one line."""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import Any

import measured
import numpy as np
import pytest
import torch
from sensorium.callers.errors import InputError
from sensorium.engine.frontend.prompts import EncoderDecoderPrompt, Prompt, find_salt, read_prompt, read_token_ids

IDS = Prompt(token_ids=[1, 2])
FULL = {
    "prompt": "x",
    "multi_modal_data": {"image": [b"a", b"b"]},
    "multi_modal_uuids": {"image": ["u", None]},
    "mm_processor_kwargs": {"max_pixels": 9},
    "cache_salt": "me",
    "fit": "context",
}


class Number(enum.IntEnum):
    ONE = 1


def test_a_salt_that_is_refused_later_is_none() -> None:
    assert find_salt({"prompt": "x", "cache_salt": ["s"]}) is None


FORMS = [
    ("x", Prompt("x")),
    ("", Prompt("")),
    ([1, 2], IDS),
    ((1, 2), IDS),
    ([], Prompt(token_ids=[])),
    (np.array([1, 2], np.int16), IDS),
    (torch.tensor([1, 2]), IDS),
    ({"prompt": "x"}, Prompt("x")),
    ({"prompt": "x", "prompt_token_ids": None, "multi_modal_data": None, "fit": None}, Prompt("x")),
    (MappingProxyType({"prompt": "x"}), Prompt("x")),
    ({"prompt_token_ids": [np.int64(1), torch.tensor(2)]}, IDS),
    ({"prompt_token_ids": [Number.ONE, 2]}, IDS),
    ({"prompt_token_ids": range(1, 3)}, IDS),
    ({"prompt_token_ids": [-5, 10**9]}, Prompt(token_ids=[-5, 10**9])),  # the core checks the vocabulary
    (FULL, Prompt("x", None, {"image": [b"a", b"b"]}, {"image": ["u", None]}, {"max_pixels": 9}, "me", "context")),
    ({"encoder_prompt": "x", "decoder_prompt": None}, EncoderDecoderPrompt(Prompt("x"))),
    ({"encoder_prompt": "x"}, EncoderDecoderPrompt(Prompt("x"))),
    (
        {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": b"s"}}, "decoder_prompt": [1, 2]},
        EncoderDecoderPrompt(Prompt("", media={"audio": b"s"}), IDS),
    ),
    ({"encoder_prompt": [1, 2], "decoder_prompt": {"prompt": "y"}}, EncoderDecoderPrompt(IDS, Prompt("y"))),
]


@pytest.mark.parametrize(("prompt", "want"), FORMS)
def test_forms(prompt: object, want: object) -> None:
    read = read_prompt(prompt)
    assert read == want
    assert find_salt(prompt) == (read.encoder if isinstance(read, EncoderDecoderPrompt) else read).salt


def test_tokens_are_plain_integers() -> None:
    for ids in (np.array([1, 2]), torch.tensor([1, 2], dtype=torch.int32), [np.uint8(1), Number.ONE]):
        assert [type(token) for token in read_token_ids(ids)] == [int, int]
    given = [1, 2]
    assert read_token_ids(given) is not given


def test_too_many_tokens_are_refused_before_they_are_read() -> None:
    class Unread(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("it is read")

    for prompt in (Unread([5] * 9), {"prompt_token_ids": Unread([5] * 9)}, np.zeros(9, int), {"prompt_token_ids": range(9)}):
        with pytest.raises(InputError, match="the prompt takes 9 tokens, but max_model_len is 9; shorten it"):
            read_prompt(prompt, 9)


REFUSED: list[tuple[Any, str]] = [
    (None, "a prompt must be a string, token ids or .*, not None"),
    (3, "not an int"),
    (b"x", "not a bytes"),
    ({1, 2}, "not a set"),
    ({}, 'needs either "prompt" or "prompt_token_ids"; it has neither'),
    ({"prompt": "x", "prompt_token_ids": [1]}, 'needs either "prompt" or "prompt_token_ids"; it has both'),
    ({"promt": "x"}, "unknown key 'promt' in a prompt; did you mean prompt. The known ones are prompt, prompt_token_ids"),
    ({"prompt": "x", "multimodal_data": {}}, "did you mean multi_modal_data"),
    ({"prompt": "x", 3: 4}, "unknown key 3"),
    ({"prompt": b"x"}, '"prompt" must be a string, not a bytes'),
    ({"prompt": ["x"]}, '"prompt" must be a string, not a list'),
    ({"prompt": "x", "multi_modal_data": [b""]}, '"multi_modal_data" must map modalities to items, .* not a list'),
    ({"prompt": "x", "multi_modal_uuids": "u"}, '"multi_modal_uuids" must map modalities to uuids, .* not a str'),
    ({"prompt": "x", "mm_processor_kwargs": 5}, '"mm_processor_kwargs" must map options to values, .* not an int'),
    ({"prompt": "x", "cache_salt": "s" * 4097}, '"cache_salt" has 4097 characters; give at most 4096'),
    ({"prompt": "x", "cache_salt": ""}, '"cache_salt" must be a non-empty string'),
    ({"prompt": "x", "cache_salt": 7}, '"cache_salt" must be a non-empty string, not 7'),
    ({"prompt": "x", "fit": "window"}, '"fit" must be "context" or left out, not \'window\''),
    ({"prompt_token_ids": "12"}, "a list of integers, not a str"),
    ({"prompt_token_ids": 7}, "a list of integers, not an int"),
    ({"prompt_token_ids": {1: 2}}, "a list of integers, not a dict"),
    ({"prompt_token_ids": [1, True]}, "entry 1 is True"),
    ({"prompt_token_ids": np.array([True])}, "entry 0 is True"),
    ({"prompt_token_ids": [1, 2.0]}, "entry 1 is 2.0"),
    ({"prompt_token_ids": np.array([1.0])}, "entry 0 is .*1.0"),
    ({"prompt_token_ids": [np.float32(1)]}, "entry 0 is .*1.0"),
    ({"prompt_token_ids": np.array(3)}, "a list of integers, not an int"),
    ({"prompt_token_ids": torch.tensor([[1, 2]])}, "entry 0 is"),
    ({"prompt_token_ids": [torch.tensor([1, 2])]}, "entry 0 is"),
    ({"prompt_token_ids": [[1]]}, "entry 0 is"),
    (["a", "b"], "entry 0 is 'a'"),
    ({"decoder_prompt": "x"}, '"encoder_prompt" is missing'),
    ({"encoder_prompt": None, "decoder_prompt": "x"}, '"encoder_prompt" is missing'),
    ({"encoder_prompt": "x", "prompt": "y"}, "unknown key 'prompt'"),
    ({"encoder_prompt": {"encoder_prompt": "x"}}, "unknown key 'encoder_prompt'"),
    ({"encoder_prompt": "x", "decoder_prompt": 5}, "not an int"),
]


@pytest.mark.parametrize(("prompt", "text"), REFUSED)
def test_refusals(prompt: object, text: str) -> None:
    with pytest.raises(InputError, match=text) as error:
        read_prompt(prompt)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_errors_of_large_prompts_are_short_and_cheap() -> None:
    for prompt in (
        {"prompt_token_ids": [0.5] * 10**6},
        {"prompt_token_ids": "x" * 10**8},
        {"x" * 10**6: 1},
        {"fit": "x" * 10**6},
    ):
        with measured.allocating_at_most(1 << 20), pytest.raises(InputError) as error:
            read_prompt(prompt)
        assert len(str(error.value)) < 300
