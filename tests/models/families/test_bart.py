"""BART: answers to texts, alone and in batches, with both forms of prompts, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from sensorium import LLM, SamplingParams
from tokenizers.processors import TemplateProcessing

ensure_torchvision()
import transformers as tf  # noqa: E402

SPECIALS = ["<s>", "<pad>", "</s>"]
TEXTS = ["def f(x): return x", "import os", "class A: pass\n" * 6, "x = [i for i in range(10)]"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)


def build(folder: Path, **changes: Any) -> tuple[Any, Any]:
    words = fast_tokenizer(SPECIALS, pad_token="<pad>", eos_token="</s>", bos_token="<s>")
    ids = {name: words.convert_tokens_to_ids(name) for name in SPECIALS}
    words.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=list(ids.items()))
    sizes = text_config(words) | {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 96, "decoder_ffn_dim": 128, "max_position_embeddings": 100, "decoder_start_token_id": ids["</s>"],
        "forced_eos_token_id": None, "tie_word_embeddings": True,
    }  # fmt: skip
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        del sizes[name]
    model = tf.BartForConditionalGeneration(tf.BartConfig(**sizes | changes)).eval()
    randomise(model, 0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
            parameter.data.add_(1)
    model.final_logits_bias.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(1))
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model, words


def expected(model: Any, words: Any, text: str, begin: str = "") -> list[int]:
    """Return the greedy tokens of the oracle after `begin`."""
    ids = words(text, return_tensors="pt")["input_ids"]
    first = [model.config.decoder_start_token_id, *words.encode(begin, add_special_tokens=False)]
    decoder = torch.tensor([first])
    with torch.inference_mode():
        for _ in range(GREEDY.max_tokens):
            logits = model(input_ids=ids, decoder_input_ids=decoder).logits[0, -1]
            decoder = torch.cat((decoder, logits.argmax()[None, None]), 1)
    return decoder[0, len(first) :].tolist()


@pytest.mark.parametrize("change", [{}, {"scale_embedding": True, "activation_function": "relu"}], ids=str)
def test_answers(change: dict[str, Any], tmp_path: Path) -> None:
    """In a batch, alone, again from the caches, and in small steps."""
    model, words = build(tmp_path, **change)
    wanted = [expected(model, words, text) for text in TEXTS]
    assert len({tuple(answer) for answer in wanted}) == len(TEXTS)
    with LLM(tmp_path, max_num_seqs=4) as llm:
        for prompts in (TEXTS, TEXTS[:1], TEXTS):
            found = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, GREEDY, use_tqdm=False)]
            assert found == wanted[: len(prompts)]
    with LLM(tmp_path, max_num_seqs=2, max_num_batched_tokens=16, block_size=16) as llm:
        found = [list(one.outputs[0].token_ids) for one in llm.generate(TEXTS, GREEDY, use_tqdm=False)]
    assert found == wanted


def test_forms_of_prompts(tmp_path: Path) -> None:
    """The decoder's first tokens, and token ids in place of texts."""
    model, words = build(tmp_path)
    begin = "import sys"
    ids, start = words(TEXTS[0])["input_ids"], words.encode(begin, add_special_tokens=False)
    with LLM(tmp_path, max_num_seqs=4) as llm:
        found = llm.generate(
            [
                {"encoder_prompt": TEXTS[0], "decoder_prompt": None},
                {"encoder_prompt": {"prompt_token_ids": ids}, "decoder_prompt": begin},
                {"encoder_prompt": TEXTS[0], "decoder_prompt": {"prompt_token_ids": start}},
                {"prompt_token_ids": ids},
            ],
            GREEDY,
            use_tqdm=False,
        )
    answers = [list(one.outputs[0].token_ids) for one in found]
    plain, begun = expected(model, words, TEXTS[0]), expected(model, words, TEXTS[0], begin)
    assert plain != begun
    assert answers == [plain, begun, begun, plain]
    assert found[1].prompt_token_ids == [model.config.decoder_start_token_id, *start]


@pytest.mark.parametrize(
    ("prompt", "code", "param"),
    [
        ({"prompt_token_ids": []}, None, "encoder_prompt"),
        ({"prompt_token_ids": [5] * 101}, "too_long", None),
        ({"prompt_token_ids": [5, 9999]}, "invalid_value", "encoder_prompt"),
        ({"prompt": "a", "multi_modal_data": {"image": "x.png"}}, "unsupported", "multi_modal_data"),
        ({"prompt": "a", "multi_modal_data": {"text": "b"}}, "unsupported", "multi_modal_data"),
        ({"encoder_prompt": {"prompt": "a", "multi_modal_data": {"image": "x.png"}}}, "unsupported", "multi_modal_data"),
    ],
    ids=str,
)
def test_prompts_that_are_refused(prompt: Any, code: str | None, param: str | None, tmp_path: Path) -> None:
    build(tmp_path)
    with LLM(tmp_path) as llm:
        found = llm.generate(prompt, GREEDY, use_tqdm=False)[0].error
        messages = [{"role": "user", "content": "a"}]
        chat = llm.chat(messages, GREEDY, chat_template="{{ messages[0].content }}", use_tqdm=False)[0].error
    assert found is not None
    assert (code or found.code, param or found.param) == (found.code, found.param)
    assert chat is not None
    assert "answers prompts, not conversations" in chat.message
