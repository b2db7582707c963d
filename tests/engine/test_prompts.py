"""Every form of a prompt becomes one, and what is no prompt is said in one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sensorium.engine.prompts import EncoderDecoderPrompt, Prompt, normalise
from sensorium.mm.errors import InputError

FULL = {
    "prompt": "x",
    "multi_modal_data": {"image": 1},
    "multi_modal_uuids": {"image": ["a"]},
    "mm_processor_kwargs": {"max_pixels": 5},
    "cache_salt": "s",
    "fit": "context",
}


@pytest.mark.parametrize(
    ("form", "prompt"),
    [
        ("x", Prompt("x")),
        ({"prompt": "x"}, Prompt("x")),
        ({"prompt": ""}, Prompt("")),
        ([5, 6], Prompt(token_ids=[5, 6])),
        ((5, np.int64(6)), Prompt(token_ids=[5, 6])),
        ({"prompt_token_ids": torch.tensor([5, 6])}, Prompt(token_ids=[5, 6])),
        ({"prompt_token_ids": np.array([5, 6])}, Prompt(token_ids=[5, 6])),
        ({"prompt_token_ids": []}, Prompt(token_ids=[])),
        ({"prompt": "x", "multi_modal_data": None, "fit": None}, Prompt("x")),
        (FULL, Prompt("x", None, {"image": 1}, {"image": ["a"]}, {"max_pixels": 5}, "s", "context")),
        ({"encoder_prompt": "x"}, EncoderDecoderPrompt(Prompt("x"))),
        (
            {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": 1}}, "decoder_prompt": [7]},
            EncoderDecoderPrompt(Prompt("", None, {"audio": 1}), Prompt(token_ids=[7])),
        ),
    ],
)
def test_forms(form, prompt):
    assert normalise(form) == prompt


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (7, "a prompt is a string, token ids or"),
        (None, "a prompt is a string, token ids or"),
        (b"x", "a prompt is a string, token ids or"),
        ({}, "needs either"),
        ({"prompt": "x", "prompt_token_ids": [5]}, "needs either"),
        ({"prompt": 5}, '"prompt" is a string, not a int'),
        ({"prompt": "x", "images": []}, "unknown key 'images'"),
        ({"prompt": "x", "multi_modal_dta": {}}, "did you mean multi_modal_data?"),
        ({"prompt": "x", "multi_modal_data": [1]}, "maps modality to items"),
        ({"prompt": "x", "multi_modal_uuids": "a"}, "maps modality to names"),
        ({"prompt": "x", "mm_processor_kwargs": 5}, "maps options to values"),
        ({"prompt": "x", "cache_salt": ""}, '"cache_salt" is a text'),
        ({"prompt": "x", "cache_salt": 5}, '"cache_salt" is a text'),
        ({"prompt": "x", "fit": "window"}, '"fit" is "context" or missing'),
        ({"prompt_token_ids": "123"}, "list of integers"),
        ({"prompt_token_ids": [1.5]}, "list of integers"),
        ({"prompt_token_ids": [True]}, "True and False"),
        ({"prompt_token_ids": 5}, "list of integers"),
        (["x", "y"], "list of integers"),
        ({"encoder_prompt": "x", "prompt": "y"}, "unknown key 'prompt' in a prompt; did you mean"),
        ({"decoder_prompt": "x"}, '"encoder_prompt" is missing'),
        ({"encoder_prompt": {"encoder_prompt": "x"}}, "unknown key 'encoder_prompt'"),
    ],
)
def test_what_is_no_prompt(form, reason):
    with pytest.raises(InputError, match=reason):
        normalise(form)
