"""A caller's mistake gives a typed error of one line, and the rest of the batch is answered. Threads may share an LLM."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sensorium import LLM, RequestOutput, SamplingParams, SensoriumError
from sensorium.callers.errors import OF_PROMPTS, CheckpointError, ConfigError, InputError
from sensorium.engine.config import host_memory
from waiting import LONG, assert_idle, heard, hold_steps

PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
CLIP = "<|vision_start|><|video_pad|><|vision_end|>"
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, max_model_len=256, limit_mm_per_prompt={"image": 2, "video": 1})


def make_image(seed: int = 0, width: int = 60, height: int = 60) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def asked(text: str, **media: object) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": media}


def fifo(folder: Path) -> Path:
    path = folder / "pipe"
    os.mkfifo(path)
    return path


BAD = {
    "no placeholder": (lambda _: asked("x", image=make_image()), r"image 0: .*; write <\|image_pad\|> once"),
    "no item": (lambda _: asked(PLACEHOLDER), "image 0"),
    "too many": (lambda _: asked(PLACEHOLDER * 3, image=[make_image()] * 3), "At most 2 image"),
    "too long": (lambda _: asked("def " * 300), "max_model_len"),
    "broken": (lambda _: asked(PLACEHOLDER, image=b"not an image"), "image 0"),
    "second broken": (lambda _: asked(PLACEHOLDER * 2, image=[make_image(), b""]), "image 1: it is empty"),
    "wrong type": (lambda _: asked(PLACEHOLDER, image=3.5), "image 0: a value of type float"),
    "too wide": (lambda _: asked(PLACEHOLDER * 2, image=[make_image(), make_image(0, 2000, 4)]), "image 1: .*200:1"),
    "url": (
        lambda _: asked(PLACEHOLDER, image="http://127.0.0.1/a.png"),
        "127.0.0.1 cannot be fetched from .*its address is not public",
    ),
    "pipe": (lambda folder: asked(PLACEHOLDER, image=fifo(folder)), "not a regular file"),
    "metadata": (lambda _: asked(CLIP, video=(np.zeros((4, 60, 60, 3), np.uint8), {"fps": "x"})), "video 0"),
    "surrogate": (lambda _: asked("\ud800"), "half a character"),
    "modality": (lambda _: asked("x", images=make_image()), "unknown modality 'images'"),
    "key": (lambda _: {"promt": "x"}, "unknown key 'promt'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_fails_alone(name: str, llm: LLM, tmp_path: Path) -> None:
    make, message = BAD[name]
    good = asked(PLACEHOLDER + "def f(x):", image=make_image(1))
    (alone,) = llm.generate(good, GREEDY, use_tqdm=False)
    first, bad, last = llm.generate([good, make(tmp_path), good], GREEDY, use_tqdm=False)
    assert bad.error is not None
    with pytest.raises(InputError, match=message):
        raise InputError(bad.error.message)
    assert "\n" not in bad.error.message
    assert first.outputs[0].token_ids == last.outputs[0].token_ids == alone.outputs[0].token_ids
    assert first.error is None
    assert_idle(llm)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": 5},
        {"stop": [""]},
        {"stop_token_ids": 5},
        {"bad_words": "x"},
        {"logit_bias": 5},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 2},
        {"max_tokens": 0},
        {"n": 0},
        {"seed": "x"},
        {"ignore_eos": 1},
    ],
)
def test_sampling_params_name_what_is_wrong(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    "field", [{"stop_token_ids": [10**6]}, {"logit_bias": {10**6: 1.0}}, {"allowed_token_ids": [1, 10**6]}]
)
def test_tokens_outside_the_vocabulary_are_named_with_their_field(field: dict[str, Any], llm: LLM) -> None:
    (output,) = llm.generate("x", SamplingParams(max_tokens=1, **field), use_tqdm=False)
    assert output.error is not None
    assert f"{next(iter(field))} holds 1000000" in output.error.message


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(4), stop_token_ids=[np.int64(3)])
    assert (params.temperature, params.max_tokens, params.stop_token_ids) == (0.5, 4, (3,))
    assert type(params.max_tokens) is int


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "x"}, "seed"),
        ({"limit_mm_per_prompt": 3}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": {"images": 1}}, "'images'; this model takes image, video"),
        ({"mm_processor_kwargs": 5}, "mm_processor_kwargs"),
        ({"mm_processor_kwargs": {"max_pixels": "x"}}, "max_pixels"),
        ({"mm_processor_kwargs": {"max_pixel": 5}}, "did you mean max_pixels"),
        ({"mm_processor_kwargs": {"fps": 0}}, "fps is 0"),
        ({"mm_processor_kwargs": {"num_frames": "4"}}, "num_frames"),
        ({"max_modellen": 5}, "did you mean max_model_len"),
    ],
)
def test_options_name_what_is_wrong(options: dict[str, Any], message: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(checkpoint, **options)


@pytest.mark.parametrize("model", [None, 3, ""])
def test_model_is_a_path(model: Any) -> None:
    with pytest.raises(ConfigError, match="path of a checkpoint"):
        LLM(model)


def changed(checkpoint: Path, target: Path, **keys: Any) -> Path:
    shutil.copytree(checkpoint, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | keys))
    return target


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}, "architectures": ["Other"]}, "auto_map"),
        ({"architectures": "Qwen2VL"}, "names no architecture"),
        ({"architectures": ["Qwen2VLForConditionalGenerations"]}, "Qwen2VLForConditionalGeneration"),
        ({"image_token_id": 99999}, "image_token_id 99999"),
        ({"text_config": {"hidden_size": "64"}}, "hidden_size|vocab_size"),
    ],
)
def test_configs_name_what_is_wrong(keys: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError if "names" in message else ConfigError, match=message):
        LLM(changed(checkpoint, tmp_path / "m", **keys))


def test_float16_runs_in_float32_on_a_cpu(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = changed(checkpoint, tmp_path / "m", dtype="float16")
    with caplog.at_level("INFO", "sensorium"):
        assert LLM(folder, dtype="float16").engine.loop.core.info.dtype == "float16"
        assert "it runs in float32" not in caplog.text
        assert LLM(folder, device="cpu").engine.loop.core.info.dtype == "float32"
        assert "it runs in float32" in caplog.text


def test_integer_weights_and_shards_outside_the_folder_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = changed(checkpoint, tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    name = next(n for n in stored if n.endswith("q_proj.weight"))
    save_file(stored | {name: stored[name].to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="quantised"):
        LLM(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: "../../secret"}}))
    with pytest.raises(CheckpointError, match="plain file names"):
        LLM(folder)


def test_empty_conversation_and_failing_template(llm: LLM) -> None:
    (empty,) = llm.chat([], GREEDY, use_tqdm=False)
    assert "no messages" in empty.error.message
    (broken,) = llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False, chat_template="{{ 1 / 0 }}")
    assert "template" in broken.error.message
    (silent,) = llm.chat([{"role": "assistant", "content": None}], GREEDY, use_tqdm=False)
    assert "message 0: content is missing" in silent.error.message


def test_threads_share_one_llm(llm: LLM) -> None:
    """Each thread gets the answers it would get alone, and the engine is idle afterwards."""
    prompts = [asked(PLACEHOLDER + f"def f{i}(x):", image=make_image(i)) for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    alone = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    found: dict[int, list[RequestOutput]] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: llm.generate(prompts, params, use_tqdm=False)})) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert [[o.outputs[0].token_ids for o in found[i]] for i in range(4)] == [alone] * 4
    assert_idle(llm)


def test_errors_have_one_base() -> None:
    assert issubclass(ConfigError, SensoriumError)
    assert issubclass(InputError, ValueError)


def test_an_answer_that_cannot_be_assembled_fails_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sensorium.engine.frontend.output_processor import OutputBuilder

    real = OutputBuilder.add

    def add(self: OutputBuilder, output: Any) -> bool:
        if len(self.prepared.token_ids) > 20:
            raise RuntimeError("no text today")
        return real(self, output)

    monkeypatch.setattr(OutputBuilder, "add", add)
    good, bad = llm.generate(["def", "def " * 30], GREEDY, use_tqdm=False)
    assert good.error is None
    assert bad.error.message.startswith("internal error in writing an answer: RuntimeError: no text today; report it")
    assert [record.message for record in caplog.records if record.exc_info] == ["writing an answer failed"]
    assert_idle(llm)


def test_a_bug_in_reading_a_prompt_is_an_internal_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sensorium.engine.frontend.input_processor import InputProcessor

    real = InputProcessor.parse

    def parse(self: InputProcessor, prompt: object, *rest: Any) -> Any:
        return real(self, prompt, *rest) if prompt == "def" else {}["read me"]

    monkeypatch.setattr(InputProcessor, "parse", parse)
    good, bad = llm.generate(["def", "bad"], GREEDY, use_tqdm=False)
    assert good.error is None
    assert bad.error.message == (
        "internal error in reading a prompt: KeyError: 'read me'; report it with its traceback (in the log, or with --debug)"
    )
    assert [record.message for record in caplog.records if record.exc_info] == ["reading a prompt failed"]


@pytest.mark.in_process
def test_an_interrupted_step_leaves_no_caller_waiting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two callers share an interrupted step: both get a typed error, and the next call works."""
    core, broken = llm.engine.loop.core, []
    monkeypatch.setattr(core, "step", core.step)
    hold_steps(core, lambda: broken or heard(llm.engine.loop))  # so that steps are left to interrupt
    other = llm.stream("def f(x):", SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    next(other)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(core.executor.runner, "execute_model", interrupted)
        broken.append(True)
        assert "interrupted" in str(llm.generate("def", GREEDY, use_tqdm=False)[0].error.message)
    assert "interrupted" in list(other)[-1].error.message
    (again,) = llm.generate("def", GREEDY, use_tqdm=False)
    assert again.error is None
    assert_idle(llm)


def test_the_context_shrinks_to_the_cache_unless_asked_for(checkpoint: Path) -> None:
    small = LLM(checkpoint, kv_cache_memory_bytes=1 << 20)
    assert 16 <= small.max_model_len < 4096
    assert small.generate("def", GREEDY, use_tqdm=False)[0].error is None
    with pytest.raises(ConfigError, match="needs"):
        LLM(checkpoint, kv_cache_memory_bytes=1 << 20, max_model_len=4096)


def test_a_cache_above_the_memory_of_the_machine_is_refused(checkpoint: Path) -> None:
    has = host_memory()
    for give in (LLM, partial(LLM, engine_process=True)):
        with pytest.raises(ConfigError, match=rf"^kv_cache_memory_bytes={has + 1} is above the {has:,} bytes") as caught:
            give(checkpoint, device="cpu", kv_cache_memory_bytes=has + 1)
        assert caught.value.info.param == "kv_cache_memory_bytes"


def test_a_cache_that_is_too_small_is_refused_with_the_size_it_needs(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"^1,000 bytes .* raise kv_cache_memory_bytes to \d+ for each 16 tokens") as caught:
        LLM(checkpoint, kv_cache_memory_bytes=1000)
    least = int(str(caught.value).split("kv_cache_memory_bytes to ")[1].split()[0])
    assert LLM(checkpoint, kv_cache_memory_bytes=8 * least).max_model_len == 8 * 16
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes to") as caught:
        LLM(checkpoint, kv_cache_memory_bytes=1 << 20, max_model_len=4096)
    enough = int(str(caught.value).split()[-1])
    assert LLM(checkpoint, kv_cache_memory_bytes=enough, max_model_len=4096).max_model_len == 4096
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes to"):
        LLM(checkpoint, kv_cache_memory_bytes=enough - 1, max_model_len=4096)


def test_code_beside_the_weights_is_never_run(checkpoint: Path, tmp_path: Path) -> None:
    """The JSON files of a supported architecture are read even if they name code."""
    code = {"auto_map": dict.fromkeys(("AutoConfig", "AutoModel", "AutoProcessor", "AutoTokenizer"), "evil.Model")}
    folder = changed(checkpoint, tmp_path / "m", **code)
    for name in ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | code))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise RuntimeError('evil')\n")
    prompt = asked(PLACEHOLDER, image=make_image())
    (answer,) = LLM(folder).generate(prompt, GREEDY, use_tqdm=False)
    assert answer.error is None
    assert answer.outputs[0].token_ids == LLM(checkpoint).generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert not (tmp_path / "ran").exists()
    assert not [name for name in sys.modules if name.split(".")[-1] == "evil"]


def test_a_tensor_stored_twice_is_named(checkpoint: Path, tmp_path: Path) -> None:
    folder = changed(checkpoint, tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    name = next(n for n in stored if "visual." in n)
    other = name.removeprefix("model.") if name.startswith("model.") else f"model.{name}"
    save_file(stored | {other: stored[name].clone()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="twice"):
        LLM(folder)


def test_a_later_thread_keeps_its_torch_threads(llm: LLM) -> None:
    if torch.get_num_threads() == 1:
        pytest.skip("one torch thread in all")
    llm.generate(asked(PLACEHOLDER, image=make_image()), GREEDY, use_tqdm=False)
    found: list[int] = []

    def work() -> None:
        llm.generate("def", GREEDY, use_tqdm=False)
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG)
    assert found == [torch.get_num_threads()]


def test_batching_does_not_change_an_answer_in_bfloat16() -> None:
    """The attention backend depends on the shape of the item alone."""
    llm = LLM(Path(__file__).parents[3] / "assets" / "tiny-vl", dtype="bfloat16")
    prompts = [f"user {i} moves left" for i in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    together = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    assert together == [llm.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]


def test_answers_of_adjacent_seeds_differ(llm: LLM) -> None:
    """The second of two answers with seed 5 differs from the first with seed 6."""

    def sampled(seed: int, n: int) -> list[tuple[int, ...]]:
        params = SamplingParams(n=n, seed=seed, temperature=5.0, max_tokens=12, ignore_eos=True)
        return [tuple(o.token_ids) for o in llm.generate("def", params, use_tqdm=False)[0].outputs]

    first, second = sampled(5, 2)
    assert first != second
    assert second not in sampled(6, 2)
    assert sampled(5, 2) == [first, second]


@pytest.mark.parametrize("value", [np.zeros(2), "yes", 1], ids=repr)
def test_switches_are_true_or_false(llm: LLM, value: object) -> None:
    messages = [{"role": "user", "content": "a"}]
    for name in ("add_generation_prompt", "continue_final_message"):
        with pytest.raises(InputError, match=f"{name} must be True or False"):
            llm.chat(messages, GREEDY, chat_template="a", use_tqdm=False, **{name: value})
    with pytest.raises(InputError, match=r'use_tqdm=.* must be True, False, "log" or a class'):
        llm.generate("a", GREEDY, use_tqdm=value)


def test_serve_refuses_prompts_that_are_not_requests(llm: LLM) -> None:
    for handles in (None, ["a"], [None], 5):
        with pytest.raises(InputError, match="handles must be a list"):
            list(llm.serve(handles))


def test_template_variables_have_names(llm: LLM) -> None:
    with pytest.raises(InputError, match="chat_template_kwargs must be a mapping from names"):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, chat_template="a", chat_template_kwargs={1: 2})


class Unreadable:
    """An object that cannot be compared, shown or iterated over."""

    def fail(self, *_: object) -> Any:
        raise KeyError("broken")

    __iter__ = __len__ = __getitem__ = __eq__ = __bool__ = __str__ = __repr__ = fail
    __hash__ = None  # type: ignore[assignment]


def test_an_object_of_another_class_is_refused_in_any_place(llm: LLM) -> None:
    """It ends the call or its request with an InputError that names the parameter."""
    value: Any = Unreadable()
    message = {"role": "user", "content": "x"}
    prompts: dict[str, Any] = {
        "multi_modal_data": asked(PLACEHOLDER, image=value),
        "multi_modal_uuids": {**asked(PLACEHOLDER, image=make_image()), "multi_modal_uuids": {"image": value}},
        "mm_processor_kwargs": {**asked(PLACEHOLDER, image=make_image()), "mm_processor_kwargs": {"min_pixels": value}},
        "prompt_token_ids": {"prompt_token_ids": value},
        "cache_salt": {"prompt": "x", "cache_salt": value},
    }
    errors = {name: llm.generate(prompt, GREEDY, use_tqdm=False)[0].error for name, prompt in prompts.items()}
    chats: dict[str, Any] = {
        "role": {"messages": [{**message, "role": value}]},
        "content": {"messages": [{**message, "content": value}]},
        "part": {"messages": [{**message, "content": [value]}]},
        "image": {"messages": [{**message, "content": [{"type": "image", "image": value}]}]},
        "image_url": {"messages": [{**message, "content": [{"type": "image_url", "image_url": value}]}]},
        "type": {"messages": [{**message, "content": [{"type": value}]}]},
        "tools": {"messages": [message], "tools": [value]},
        "chat_template_kwargs": {"messages": [message], "chat_template_kwargs": {"x": value}},
        "documents": {"messages": [message], "chat_template_kwargs": {"documents": [{"text": value}]}},
    }
    for name, chat in chats.items():
        try:
            errors[name] = llm.chat(**chat, sampling_params=GREEDY, use_tqdm=False)[0].error
        except InputError as error:
            errors[name] = error.info
    for name in ("stop", "bad_words", "logit_bias", "logits_processors", "allowed_token_ids", "temperature", "seed"):
        with pytest.raises(InputError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.info.param == name
    assert all(
        error is not None and error.code in (*OF_PROMPTS, "invalid_media", "invalid_config") for error in errors.values()
    ), errors


def test_template_variables_are_limited(checkpoint: Path) -> None:
    message = {"role": "user", "content": "x"}
    with LLM(checkpoint, max_model_len=256, max_template_chars=2000) as small:
        tool = {"type": "function", "function": {"name": "f", "description": "x" * 2000}}
        for options in ({"tools": [tool]}, {"chat_template_kwargs": {"documents": [{"text": "x"}] * 100}}):
            with pytest.raises(InputError, match=r"has more than 2,000 characters .*raise max_template_chars") as caught:
                small.chat([message], GREEDY, use_tqdm=False, **options)
            assert caught.value.info.param == next(iter(options))
        assert small.chat([message], GREEDY, use_tqdm=False, chat_template_kwargs={"documents": ["x"]})[0].error is None
