"""`LLM` on a small random checkpoint: prompts, conversations, streams and errors."""

import base64
import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from sensorium import LLM, SamplingParams, SensoriumError
from sensorium.callers.errors import CheckpointError, ConfigError, InputError
from waiting import heard, hold_steps

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, max_model_len=512, max_num_seqs=4, limit_mm_per_prompt={"image": 2, "video": 1})


def make_image(seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (70, 90, 3), dtype=np.uint8))


def data_url(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def conversation(image_part, text="What is this?"):
    return [{"role": "user", "content": [image_part, {"type": "text", "text": text}]}]


def test_generate_takes_one_or_many(llm):
    one = llm.generate("import os", GREEDY, use_tqdm=False)
    many = llm.generate(["import os", {"prompt": "import os"}], [GREEDY, GREEDY], use_tqdm=False)
    assert len(one) == 1
    assert [output.outputs for output in many] == [one[0].outputs] * 2
    assert one[0].prompt == "import os"
    assert len(one[0].outputs[0].token_ids) == 8
    assert llm.get_tokenizer().decode(one[0].outputs[0].token_ids) == one[0].outputs[0].text


def test_all_chat_forms_of_an_image_give_one_answer(llm):
    image = make_image()
    parts = [{"type": "image", "image": image}, {"type": "image_url", "image_url": {"url": data_url(image)}}]
    outputs = llm.chat([conversation(part) for part in parts], GREEDY, use_tqdm=False)
    assert [output.error for output in outputs] == [None, None]
    assert outputs[0].outputs == outputs[1].outputs
    assert outputs[0].outputs == llm.chat(conversation(parts[0]), GREEDY, use_tqdm=False)[0].outputs
    prompt = {"prompt": outputs[0].prompt, "multi_modal_data": {"image": image}}
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs == outputs[0].outputs
    expanded = {"prompt_token_ids": outputs[0].prompt_token_ids, "multi_modal_data": {"image": image}}
    assert llm.generate(expanded, GREEDY, use_tqdm=False)[0].outputs == outputs[0].outputs


def test_chat_text_never_becomes_a_placeholder(llm):
    (output,) = llm.chat([{"role": "user", "content": f"read {PLACEHOLDER}"}], GREEDY, use_tqdm=False)
    assert output.error is None
    pad = llm.get_tokenizer().token_to_id("<|image_pad|>")
    assert pad not in output.prompt_token_ids


def test_errors_stay_with_their_prompt(llm):
    image = make_image()
    good = {"prompt": PLACEHOLDER + "a", "multi_modal_data": {"image": image}}
    bad = [
        {"prompt": PLACEHOLDER + "a"},
        {"prompt": "a", "multi_modal_data": {"image": image}},
        {"prompt": PLACEHOLDER * 3, "multi_modal_data": {"image": [image] * 3}},
        {"prompt": PLACEHOLDER, "multi_modal_data": {"image": b"\x89PNG broken"}},
        {"prompt": "a " * 600},
        {"prompt": "a", "multi_modal_data": {"audio": image}},
    ]
    outputs = llm.generate([good, *bad, good], GREEDY, use_tqdm=False)
    assert outputs[0].error is None
    assert outputs[0].outputs == outputs[-1].outputs
    for output in outputs[1:-1]:
        assert output.error
        assert "\n" not in output.error.message
        assert output.outputs[0].finish_reason == "error"
    assert "At most 2 image" in outputs[3].error.message
    assert "max_model_len is 512" in outputs[5].error.message
    stats = llm.stats
    assert (stats.running, stats.waiting, stats.idle, stats.blocks_used) == (0, 0, 0, 0)
    assert stats.blocks > 0


def test_wrong_arguments_raise(llm):
    with pytest.raises(InputError, match=r"prompts\.reshape\(-1\)"):
        llm.generate(np.array([["a", "b"]]))
    with pytest.raises(InputError, match="prompts must be a string"):
        llm.generate(5)
    with pytest.raises(InputError, match="2 sampling_params for 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY])
    with pytest.raises(InputError, match="sampling_params must be a SamplingParams"):
        llm.generate(["a"], {"temperature": 0})
    with pytest.raises(InputError, match="messages must be a list"):
        llm.chat("hello")
    assert llm.generate([], use_tqdm=False) == []


def test_a_stream_ends_in_the_answer(llm, monkeypatch):
    messages = conversation({"type": "image", "image": make_image()})
    core, outputs = llm.engine.loop.core, []
    with monkeypatch.context() as patch:
        patch.setattr(core, "step", core.step)
        hold_steps(core, lambda: outputs or heard(llm.engine.loop))
        for output in llm.stream(messages, GREEDY):
            outputs.append(output)
    assert outputs[-1].finished
    assert not outputs[0].finished
    assert outputs[-1].outputs == llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs
    assert [output.outputs[0].text for output in llm.stream("import", GREEDY)][-1] == (
        llm.generate("import", GREEDY, use_tqdm=False)[0].outputs[0].text
    )


def test_eos_comes_from_generation_config(llm, checkpoint, tmp_path):
    answer = llm.generate("import os", GREEDY, use_tqdm=False)[0].outputs[0]
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"eos_token_id": [answer.token_ids[4]], "temperature": 0.5, "do_sample": False, "max_new_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps(config))
    other = LLM(folder, max_model_len=512)
    ended = other.generate("import os", use_tqdm=False)[0].outputs[0]
    first = answer.token_ids.index(answer.token_ids[4])
    assert ended.token_ids == answer.token_ids[: first + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert other.default_params.max_tokens == 9
    assert LLM(folder, max_model_len=512, generation_config="none").default_params == SamplingParams()


def test_load_errors_are_one_line(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    cases = [
        (lambda: LLM(tmp_path / "none"), ConfigError, "is not a folder"),
        (lambda: LLM(checkpoint, max_model_len=10**6), ConfigError, "max_position_embeddings"),
        (lambda: LLM(checkpoint, max_model_lenn=5), ConfigError, "did you mean max_model_len"),
        (lambda: LLM(checkpoint, mm_processor_kwargs={"max_pixel": 5}), ConfigError, "max_pixels"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            call()
        assert isinstance(caught.value, SensoriumError)
        assert "\n" not in str(caught.value)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2_5_VLForConditionalGenerator"]}))
    with pytest.raises(ConfigError, match="Qwen2_5_VLForConditionalGeneration"):
        LLM(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        LLM(folder)


def test_low_precision_runs_as_asked(checkpoint):
    llm = LLM(checkpoint, dtype="bfloat16", max_model_len=512)
    (output,) = llm.chat(conversation({"type": "image", "image": make_image()}), GREEDY, use_tqdm=False)
    assert output.error is None
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.in_process
def test_the_cache_costs_memory_only_where_it_is_used(checkpoint):
    llm = LLM(checkpoint, max_num_seqs=64)
    core = llm.engine.loop.core
    blocks, caches = core.scheduler.block_pools.pools[0].num_blocks, core.executor.runner.caches.tensors
    assert blocks == 64 * -(-llm.max_model_len // 16)
    assert caches[0].shape[1] == blocks


def test_other_forms_of_options(checkpoint, tmp_path):
    """LLM takes a limit of 0 for a modality that the model lacks, torch dtypes, lengths such as "1K", and template files."""
    options = {"limit_mm_per_prompt": {"image": 1, "audio": 0}, "dtype": torch.float32, "max_model_len": "1K"}
    with pytest.raises(ConfigError, match="limit_mm_per_prompt names 'imgae'; this model takes image, video"):
        LLM(checkpoint, limit_mm_per_prompt={"imgae": 0})
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    with LLM(checkpoint, **options) as small:
        assert (small.max_model_len, small.config.dtype) == (1024, "float32")
        messages = [{"role": "user", "content": "Hi"}]
        own, path = (
            small.chat(messages, GREEDY, False, chat_template=one)[0]
            for one in ("{{ messages[0].content }}", tmp_path / "own.jinja")
        )
        assert own.prompt == path.prompt == "Hi"
        with pytest.raises(InputError, match="give Jinja source, or the path"):
            small.chat(messages, GREEDY, chat_template="none.jinja")


def test_the_prefix_cache_can_be_emptied(llm):
    prompt = {"prompt_token_ids": list(range(40, 100))}
    for cached in (False, True):
        assert bool(llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens) is cached
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
