"""vLLM's engine arguments: each is honoured, accepted with one warning, or refused with the reason."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import warnings

import numpy as np
import pytest
import torch
from infos import INFOS
from sensorium import LLM, AsyncEngineArgs, EngineArgs
from sensorium.callers.errors import ConfigError
from sensorium.engine.config import EngineConfig, make_config
from sensorium.engine.vllm_args import IGNORED, NAMES, ONLY, RENAMED, SILENT
from sensorium.models.vllm_architectures import translate_architecture

PLAIN = {  # arguments as scripts give them, all without a warning
    "data_parallel_size": 1,
    "trust_remote_code": False,
    "enforce_eager": False,
    "hf_overrides": {},
    "tokenizer": "m",
    "revision": "main",
    "tokenizer_revision": "main",
    "runner": "pooling",
    "load_format": "auto",
    "disable_log_stats": True,
    "served_model_name": "name",
    "distributed_executor_backend": "mp",
    "cpu_offload_gb": 0,
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PLAIN, {"revision": "main"}),
        ({"gpu_memory_utilization": 0.5}, {"gpu_memory_fraction": 0.5}),
        *(({"dtype": name}, {"dtype": "float16"}) for name in ("half", "float16", torch.float16, torch.half)),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        *(({"max_model_len": auto}, {}) for auto in (-1, "-1", "auto", None)),
        *(({"max_model_len": text}, {"max_model_len": 32_000}) for text in ("32k", "32000", "0.032m")),
        ({"max_model_len": "32K"}, {"max_model_len": 32_768}),
        ({"mm_processor_cache_gb": 2}, {"mm_processor_cache_bytes": 2 << 30}),
        ({"mm_processor_cache_gb": 0}, {"mm_processor_cache_bytes": 1}),
        ({"disable_mm_preprocessor_cache": True}, {"mm_processor_cache_bytes": 1}),
        (
            {"limit_mm_per_prompt": {"image": {"count": 2, "width": 512}, "video": 0}},
            {"limit_mm_per_prompt": {"image": 2, "video": 0}},
        ),
        ({"limit_mm_per_prompt": {"image": {"width": 512}}}, {"limit_mm_per_prompt": {}}),
        ({"hf_overrides": {"a": 1}, "override_generation_config": {"top_k": 2}}, {"hf_overrides": {"a": 1}}),
        ({"generation_config": "vllm"}, {"generation_config": "none"}),
        ({"quantization": "awq_marlin"}, {"quantization": "awq_marlin"}),
        ({"quantization": "fp8", "seed": None, "max_logprobs": 5}, {"quantization": "fp8", "seed": 0, "max_logprobs": 5}),
        ({"media_io_kwargs": {"video": {"num_frames": 8}}}, {"mm_processor_kwargs": {"num_frames": 8}}),
        (
            {"media_io_kwargs": {"video": {"fps": 1}}, "mm_processor_kwargs": {"fps": 2, "max_pixels": 100}},
            {"mm_processor_kwargs": {"fps": 2, "max_pixels": 100}},
        ),
    ],
)
def test_honoured(options, expected):
    config = make_config("m", options)
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_pruning_rate_is_an_override_of_the_config(checkpoint):
    assert make_config("m", {"video_pruning_rate": 0.5}).hf_overrides == {"video_pruning_rate": 0.5}
    given = {"video_pruning_rate": 0.5, "hf_overrides": {"task": "code"}}
    assert make_config("m", given).hf_overrides == {"video_pruning_rate": 0.5, "task": "code"}
    assert make_config("m", {"video_pruning_rate": 0}).hf_overrides == {}
    assert INFOS["NemotronVLProcessingInfo"].prunes_videos
    for options in ({"video_pruning_rate": 0.5}, {"hf_overrides": {"video_pruning_rate": 0.5}}):
        with pytest.raises(
            ConfigError, match=r"^video_pruning_rate=0\.5 cannot be honoured: this model keeps all rows"
        ) as caught:
            LLM(checkpoint, **options)
        assert caught.value.info.param == "video_pruning_rate"
    with pytest.raises(ConfigError, match="hf_overrides is an object; set its video_pruning_rate"):
        make_config("m", {"video_pruning_rate": 0.5, "hf_overrides": dict})


def test_limits_of_media(tmp_path):
    options = {"allowed_local_media_path": str(tmp_path), "allowed_media_domains": ["example.org"]}
    background = {"image": {"rgba_background_color": [1, 2, 3, 255], "image_mode": "RGB"}}
    media = make_config("m", {**options, "media_io_kwargs": background, "media": {"max_bytes": 10}}).media
    assert (media.allowed_local_media_path, media.allowed_media_domains) == (str(tmp_path), ("example.org",))
    assert (media.background, media.max_bytes) == ((1, 2, 3), 10)
    assert make_config("m", {"allowed_local_media_path": ""}).media.allowed_local_media_path is None
    for name in tmp_path / "none", __file__, 5:
        for given in {"allowed_local_media_path": name}, {"media": {"allowed_local_media_path": name}}:
            with pytest.raises(ConfigError, match=r"^allowed_local_media_path=.* is not a folder; create it"):
                make_config("m", given)
    assert not make_config("m", {"language_model_only": True}).takes("image")


def test_how_videos_are_read():
    """vLLM's loaders are decoders; its num_frames beside fps is a maximum."""
    given = {"video": {"frame_recovery": True, "video_backend": "opencv", "num_frames": 32, "fps": 2, "max_duration": 60}}
    config = make_config("m", {"media_io_kwargs": given, "media": {"max_bytes": 10}})
    assert (config.media.frame_recovery, config.media.video_backend, config.media.max_bytes) == (True, "opencv", 10)
    assert config.mm_processor_kwargs == {"max_frames": 32, "fps": 2, "max_duration": 60}
    for options, kwargs in (
        ({"num_frames": -1, "fps": 2}, {"num_frames": -1, "fps": 2}),
        ({"num_frames": 16, "fps": -1}, {"num_frames": 16}),
        ({"num_frames": None, "fps": 1.5, "video_backend": None}, {"fps": 1.5}),
    ):
        assert make_config("m", {"media_io_kwargs": {"video": options}}).mm_processor_kwargs == kwargs
    assert make_config("m", {"media_io_kwargs": {"video": {"video_backend": "opencv_dynamic"}}}).media.video_backend == "opencv"
    for wrong, reason in (
        ({"video_backend": "torchcodec"}, "video_backend"),
        ({"video_backend": 5}, "video_backend"),
        ({"frame_recovery": "yes"}, "it has a wrong type"),
        ({"hw_accel": True}, "the known options are"),
    ):
        with pytest.raises(ConfigError, match=reason):
            make_config("m", {"media_io_kwargs": {"video": wrong}})


def test_only_the_encoder():
    assert make_config("m", {"mm_encoder_only": True}).parts == "encoder"
    assert make_config("m", {"mm_encoder_only": False}).parts == make_config("m", {}).parts


def test_names_of_architectures():
    def name(config, stored=None):
        return translate_architecture(config, stored or config)["architectures"]

    reranker = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    for stack, own in ("Qwen3VL", "Qwen3VLForConditionalGeneration"), ("Qwen3", "Qwen3ForCausalLM"):
        assert name({"architectures": [f"{stack}ForSequenceClassification"], **reranker}) == [own]
    two_way = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
    assert name({"architectures": ["Qwen2ForSequenceClassification"], **two_way}) == ["Qwen2ForCausalLM"]
    assert name({"architectures": ["Qwen3ForSequenceClassification"]}) == ["Qwen3ForSequenceClassification"]
    assert name({"architectures": ["Qwen3ForCausalLM"], **reranker}) == ["Qwen3ForCausalLM"]
    for wrong in {"classifier_from_token": ["Yes"], "method": "no_post_processing"}, {"classifier_from_token": ["0", "1"]}:
        with pytest.raises(ConfigError, match="score compares") as caught:
            name({"architectures": ["GemmaForSequenceClassification"], **wrong})
        assert caught.value.info.param == "hf_overrides"
    assert name({"architectures": ["VoxtralRealtimeGeneration"]}) == ["VoxtralRealtimeForConditionalGeneration"]
    assert name({"architectures": ["PixtralForConditionalGeneration"]}) == ["LlavaForConditionalGeneration"]
    assert name({"architectures": ["LightOnOCRForConditionalGeneration"]}) == ["LightOnOcrForConditionalGeneration"]
    assert name({"architectures": ["Qwen3ASRRealtimeGeneration"]}) == ["Qwen3ASRForConditionalGeneration"]
    stored = {"architectures": ["PixtralConsolidated"]}
    for given in "PixtralForConditionalGeneration", "MistralForCausalLM", "VoxtralForConditionalGeneration":
        assert name({"architectures": [given]}, stored) == ["PixtralConsolidated"]
    stored = {"architectures": ["VoxtralRealtimeConsolidated"]}
    assert name({"architectures": ["VoxtralRealtimeGeneration"]}, stored) == ["VoxtralRealtimeConsolidated"]
    for odd in {}, {"architectures": []}, {"architectures": [3]}, {"architectures": "Qwen3ForCausalLM"}:
        assert translate_architecture(odd, {}) == odd


def test_one_warning_for_all_without_effect():
    options = {"enforce_eager": True, "swap_space": 4, "trust_remote_code": True}
    with pytest.warns(
        UserWarning, match=r"without effect here: enforce_eager \(.*\); swap_space \(.*\); trust_remote_code"
    ) as found:
        make_config("m", options)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data_parallel_size": 2},
            "data_parallel_size=2 cannot be honoured: an engine is one replica; sensorium.ray.serve_app",
        ),
        ({"data_parallel_size": True}, "data_parallel_size=True cannot"),
        ({"prefill_context_parallel_size": 2}, "give tensor_parallel_size"),
        ({"nnodes": 2}, "the processes of an engine run on one machine"),
        ({"tokenizer": "other"}, "tokenizer='other' cannot be honoured: all files come from model"),
        (
            {"revision": "a", "tokenizer_revision": "b"},
            "tokenizer_revision='b' cannot be honoured: all files come from revision",
        ),
        ({"num_speculative_tokens": 3}, "give speculative_config"),
        ({"load_format": "dummy"}, "the files decide: safetensors or GGUF"),
        ({"media_io_kwargs": {"video": {"frames": 1}}}, "the known options are num_frames of video, fps of video"),
        ({"media_io_kwargs": 5}, "it must map modalities to options"),
        ({"mm_processor_cache_gb": "much"}, "mm_processor_cache_gb='much' cannot be honoured: it has a wrong type"),
        ({"tensor_paralel_size": 1}, "unknown option 'tensor_paralel_size'; did you mean tensor_parallel_size?"),
        ({"tokeniser": "x"}, "did you mean tokenizer?"),
        ({"nonsense": 1}, "unknown option 'nonsense'; the known ones are dtype, device"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ConfigError) as caught:
        make_config("m", options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.info.param in options


@pytest.mark.parametrize("array", [np.zeros(3), torch.zeros(2)], ids=["array", "tensor"])
def test_arrays_are_typed_errors(array):
    taken = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*NAMES, "kv_cache_dtype"):
            with contextlib.suppress(ConfigError):
                make_config("m", {name: array})
                taken.add(name)
    assert taken <= IGNORED.keys() | SILENT
    with pytest.raises(ConfigError, match="the known options are"):
        make_config("m", {"media_io_kwargs": {"image": {"image_mode": array}}})


def test_every_name_is_in_one_table():
    tables = [set(ONLY), set(IGNORED), set(SILENT), set(RENAMED)]
    assert sum(map(len, tables)) == len(set.union(*tables))
    own = {field.name for field in dataclasses.fields(EngineConfig)}
    assert not own & (NAMES - set(RENAMED))


def test_default_values_of_every_name_pass():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_config("m", dataclasses.asdict(EngineArgs("m")) | {"model": None}) == make_config("m", {})
        for name, (accepted, _) in ONLY.items():
            for value in accepted:
                make_config("m", {name: value})


def test_engine_args():
    args = EngineArgs(model="m", max_model_len=64, limit_mm_per_prompt={"image": 2}, trust_remote_code=False)
    options = dataclasses.asdict(args) | {"seed": 3}
    assert make_config(options.pop("model"), options) == make_config(
        "m", {"max_model_len": 64, "limit_mm_per_prompt": {"image": 2}, "seed": 3}
    )
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    parsed = parser.parse_args(
        ["--model", "m", "--max-model-len", "64", "--enforce-eager", "--limit-mm-per-prompt", '{"image": 2}']
    )
    made = AsyncEngineArgs.from_cli_args(parsed)
    assert (made.model, made.max_model_len, made.enforce_eager, made.limit_mm_per_prompt, made.seed) == (
        "m",
        64,
        True,
        {"image": 2},
        None,
    )


@pytest.mark.parametrize("value", ["32q", "1.5K", "k", "1e3", "", -2, 0, 1.5, True, "9" * 40 + "k"])
def test_invalid_lengths_are_refused(value):
    with pytest.raises(ConfigError, match=r"^max_model_len=.* must be an integer, 1 or above"):
        make_config("m", {"max_model_len": value})


@pytest.mark.parametrize("value", ["fp8", torch.int8, 16, ["half"]])
def test_invalid_dtypes_are_refused(value):
    with pytest.raises(ConfigError, match=r"^dtype=.* (must be one of|cannot be honoured)"):
        make_config("m", {"dtype": value})
