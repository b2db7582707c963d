"""Wrong options and checkpoint files give errors of one line; the memory plan is computed from sizes alone."""

import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.engine import config as config_module
from sensorium.engine.config import EngineConfig, cache_budget, check_max_model_len, make_config
from sensorium.engine.model_files import load_model_files
from sensorium.engine.setup.implementation import FALLBACK, resolve_architecture

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_length": 5}, "did you mean max_model_len"),
        ({"dtype": "int8"}, "dtype='int8' must be one of auto, float32"),
        ({"generation_config": "other"}, "must be one of auto, none"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be an integer, 1 or above"),
        ({"max_model_len": 2.5}, "max_model_len=2.5"),
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt"),
        ({"gpu_memory_fraction": 0.0}, "gpu_memory_fraction"),
        ({"gpu_memory_utilization": 1.5}, "^gpu_memory_utilization=1.5 must be a number above 0 and at most 1"),
        ({"gpu_memory_fraction": "half"}, "gpu_memory_fraction='half' must be a number"),
        ({"quarantine_seconds": "x"}, "quarantine_seconds='x' must be a number of seconds"),
        ({"quarantine_seconds": True}, "quarantine_seconds=True must be a number of seconds"),
        ({"quarantine_seconds": float("nan")}, "quarantine_seconds=nan"),
        ({"trust_uuid": "yes"}, "trust_uuid='yes' must be True or False"),
        ({"enable_prefix_caching": 0}, "enable_prefix_caching=0 must be True or False"),
        ({"batch_invariant": []}, "batch_invariant=.* must be True or False"),
        ({"device": 5}, "device=5 must be 'auto'"),
        ({"device": "cuda:x"}, "device='cuda:x' must be 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"media_device": "gpu"}, "media_device='gpu' must be 'cpu', 'cuda' or 'cuda:N'"),
        ({"media_device": "auto"}, "media_device='auto' must be 'cpu', 'cuda'"),
        ({"encoder_cache_dir": 5}, "encoder_cache_dir=5 must be the path of a folder"),
        ({"packed_cache_dir": 5}, "packed_cache_dir=5 must be the path of a folder"),
        ({"encoder_cache_dir": b"x"}, "encoder_cache_dir=b'x' must be the path of a folder"),
        ({"encoder_cache_dir": ""}, "encoder_cache_dir='' must be the path of a folder"),
        ({"encoder_cache_dir": "a\0b"}, "is not a folder"),
        ({"encoder_cache_dir": "~\0b"}, "is not a folder"),
        ({"encoder_cache_dir": __file__}, "is not a folder; give a folder, or a path where one can be created"),
        ({"max_model_len": 1 << 63}, "max_model_len=9223372036854775808 must be at most 9223372036854775807"),
        ({"data_parallel_size": 2}, "data_parallel_size=2 cannot be honoured: an engine is one replica"),
        ({"media": {"nope": 1}}, "unknown option 'nope' of media; the known ones are "),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")) as caught:
        make_config("m", options)
    assert "\n" not in str(caught.value)
    assert caught.value.info.param == next(iter(options))


def test_none_means_the_default():
    assert make_config("m", {"mm_processor_kwargs": None, "max_model_len": None}) == EngineConfig("m")


def test_values_with_vllms_names():
    assert EngineConfig("m", kv_cache_dtype="fp8_e4m3") == EngineConfig("m", kv_cache_dtype="fp8")


def test_the_users_own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_config("m", {"encoder_cache_dir": "~/rows"}).encoder_cache_dir == str(tmp_path / "rows")
    assert make_config("m", {"encoder_cache_dir": Path("~/rows")}).encoder_cache_dir == str(tmp_path / "rows")
    assert make_config("m", {"encoder_cache_dir": "a/~"}).encoder_cache_dir == "a/~"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="encoder_cache_dir='~/file' is not a folder"):
        make_config("m", {"encoder_cache_dir": "~/file"})


def test_devices():
    assert EngineConfig("m", device="cpu").torch_device == CPU
    with pytest.raises(ConfigError, match="device='tpu'"):
        EngineConfig("m", device="tpu").torch_device  # noqa: B018
    if not torch.cuda.is_available():
        assert EngineConfig("m").torch_device == CPU
        with pytest.raises(ConfigError, match="no GPU"):
            EngineConfig("m", device="cuda").torch_device  # noqa: B018
        with pytest.raises(ConfigError, match="media_device='cuda:1': torch sees no GPU; use media_device='cpu' or install"):
            EngineConfig("m", media_device="cuda:1").torch_media_device  # noqa: B018


def test_a_gpu_has_a_number(monkeypatch):
    """`torch.cuda.set_device` needs an index, and "cuda" means another device in another thread."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, number in (("auto", 0), ("cuda", 0), ("cuda:1", 1)):
        assert EngineConfig("m", device=name).torch_device == torch.device("cuda", number)
    assert EngineConfig("m", media_device="cuda").torch_media_device == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="device='cuda:2': torch sees 2 GPUs; the first is cuda:0"):
        EngineConfig("m", device="cuda:2").torch_device  # noqa: B018


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_files_are_read_once_and_missing_ones_are_empty(tmp_path):
    files = load_model_files(write(tmp_path, config={"architectures": ["A"], "eos_token_id": 5, "torch_dtype": "bfloat16"}))
    assert (files.architecture, files.eos_token_ids, files.generation_config) == ("A", (5,), {})
    assert files.dtype("auto") == torch.bfloat16
    assert files.dtype("float32") == torch.float32
    write(tmp_path, generation_config={"eos_token_id": [7, 8]})
    assert load_model_files(tmp_path).eos_token_ids == (7, 8)


def test_nested_processor_config(tmp_path):
    nested = {"image_processor": {"patch_size": 14}, "video_processor": {"patch_size": 16}}
    files = load_model_files(write(tmp_path, config={"model_type": "x"}, processor_config=nested))
    assert (files.processors.image, files.processors.video) == ({"patch_size": 14}, {"patch_size": 16})


def test_the_fingerprint_follows_config_and_weights(tmp_path):
    one = load_model_files(write(tmp_path, config={"a": 1})).fingerprint
    assert load_model_files(tmp_path).fingerprint == one
    (tmp_path / "model.safetensors").write_bytes(b"x")
    two = load_model_files(tmp_path).fingerprint
    assert len({one, two, load_model_files(write(tmp_path, config={"a": 2})).fingerprint}) == 3


def test_the_content_digest_reads_every_byte_of_the_weights(tmp_path):
    weights = write(tmp_path, config={"a": 1}) / "model.safetensors"
    weights.write_bytes(b"x" * 3_000_000)
    files, times = load_model_files(tmp_path), (weights.stat().st_atime_ns, weights.stat().st_mtime_ns)
    known = files.content_digest()
    assert files.content_digest() == known
    weights.write_bytes(b"x" * 1_500_000 + b"y" + b"x" * 1_499_999)
    os.utime(weights, ns=times)  # as package stores do that normalise times
    other = load_model_files(tmp_path)
    assert other.fingerprint == files.fingerprint
    assert other.content_digest() != known


@pytest.mark.parametrize("name", ["config", "preprocessor_config", "processor_config", "tokenizer_config"])
def test_remote_code_is_refused_by_name(tmp_path, name):
    write(tmp_path, config={"architectures": ["A"]})
    write(tmp_path, **{name: {"architectures": ["A"], "x": {"auto_map": {"AutoModel": "modeling.Model"}}}})
    with pytest.raises(ConfigError, match=rf"^A: {name}.json asks for remote code \(auto_map\)"):
        resolve_architecture(load_model_files(tmp_path))


def test_the_quantisation_of_a_section_is_found(tmp_path):
    stated = {"quant_method": "fp8"}
    for config in ({"quantization_config": stated}, {"text_config": {"quantization_config": stated}}):
        assert load_model_files(write(tmp_path, config={"architectures": ["A"], **config})).quantization_config == stated


def test_remote_code_in_a_list_is_refused(tmp_path):
    write(tmp_path, config={"architectures": ["A"]}, processor_config={"x": [[{"auto_map": {"AutoModel": "modeling.Model"}}]]})
    with pytest.raises(ConfigError, match=r"processor_config.json asks for remote code \(auto_map\)"):
        resolve_architecture(load_model_files(tmp_path))


@pytest.mark.parametrize("kind", [{"a": 0}, [0]])
@pytest.mark.parametrize("name", ["config", "processor_config"])
@pytest.mark.parametrize("known", ["A", "Qwen2VLForConditionalGeneration"])
def test_json_that_nests_without_end_is_refused(tmp_path, kind, name, known):
    """The nesting is below the limit of the JSON parser, but too deep for later recursion."""
    opened, closed = ('{"a":', "}") if isinstance(kind, dict) else ("[", "]")
    write(tmp_path, config={"architectures": [known]})
    for depth in (100, 900):
        text = '{"architectures": ["' + known + '"], "deep": ' + opened * depth + "0" + closed * depth + "}"
        (tmp_path / f"{name}.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"{name}.json nests objects and lists more than 64 deep; download it again"):
            load_model_files(tmp_path)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"vision_config": [1]}, "vision_config in config.json is a list; it must be an object"),
        ({"text_config": {"num_hidden_layers": 10**9}}, r"num_hidden_layers in config.json is 1e\+09, the limit is 4096"),
        ({"text_config": {"moe_num_experts": [64, 10**12]}}, r"moe_num_experts in config.json is 1e\+12"),
        ({"audio_config": {"deep": {"depth": 5000}}}, "depth in config.json is 5e"),
    ],
)
def test_a_config_with_too_many_layers_is_refused(tmp_path, config, text):
    with pytest.raises(ConfigError, match=text):
        load_model_files(write(tmp_path, config=config))


def test_remote_code_of_an_implemented_architecture_is_ignored(tmp_path):
    code = {"auto_map": {"AutoModel": "modeling.Model"}}
    write(tmp_path, config={"architectures": ["PaddleOCRVLForConditionalGeneration"], **code}, tokenizer_config=code)
    assert load_model_files(tmp_path).architecture == "PaddleOCRVLForConditionalGeneration"
    with pytest.raises(ConfigError, match=r"docs/models\.md"):
        resolve_architecture(load_model_files(write(tmp_path, config={"architectures": ["PaddleOCRVL"], **code})))


def test_remote_code_of_a_class_in_transformers_is_ignored(tmp_path):
    code = {"auto_map": {"AutoProcessor": "processing.Processor"}}
    write(tmp_path, config={"architectures": ["FastVlmForConditionalGeneration"]}, preprocessor_config=code)
    assert resolve_architecture(load_model_files(tmp_path)) is FALLBACK


def test_a_class_that_cannot_be_imported_is_not_called_unknown(tmp_path, monkeypatch):
    class Broken(types.ModuleType):
        __version__ = "5.0"

        def __getattr__(self, name):
            raise ModuleNotFoundError(name) from RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setitem(sys.modules, "transformers", Broken("transformers"))
    files = load_model_files(write(tmp_path, config={"architectures": ["FastVlmForConditionalGeneration"]}))
    with pytest.raises(ConfigError, match=r"^transformers 5.0 cannot import .*torchvision::nms does not exist.* for torch"):
        resolve_architecture(files)


def test_only_keys_that_are_read_as_sections_must_be_objects(tmp_path):
    odd = {"is_llama_config": True, "transformers.js_config": "x", "text_config": {"other_config": [1]}}
    assert load_model_files(write(tmp_path, config={"architectures": ["A"], **odd})).config == {"architectures": ["A"], **odd}


@pytest.mark.parametrize(
    "config",
    [
        {"dtype": "bfloat16", "audio_config": {"torch_dtype": "float16"}},
        {"text_config": {"torch_dtype": "bfloat16"}, "audio_config": {"dtype": "float16"}},
        {"thinker_config": {"dtype": "bfloat16", "text_config": {"dtype": None}}},
        {"thinker_config": {"text_config": {"dtype": "torch.bfloat16"}}},
        {"vision_config": {"dtype": "bfloat16"}, "text_config": {}},
    ],
)
def test_any_section_may_state_the_dtype(tmp_path, config):
    assert load_model_files(write(tmp_path, config={"architectures": ["A"], **config})).dtype("auto") == torch.bfloat16


@pytest.mark.parametrize("more", [{}, {"architectures": None}])
def test_a_published_config_may_name_its_model_type_only(tmp_path, more):
    config = {"model_type": "deepseek_vl_v2", "language_config": {"architectures": ["DeepseekV2ForCausalLM"]}, **more}
    assert load_model_files(write(tmp_path, config=config)).architecture == "DeepseekVLV2ForCausalLM"


def test_a_part_of_a_checkpoint_and_a_folder_above_one_name_the_checkpoint(tmp_path):
    checkpoint = tmp_path / "models--a--b" / "snapshots" / "1234"
    checkpoint.mkdir(parents=True)
    write(checkpoint, config={"architectures": ["A"]})
    (checkpoint / "onnx" / "int8").mkdir(parents=True)
    (checkpoint / "1_Pooling").mkdir()
    write(checkpoint / "1_Pooling", config={"pooling_mode_mean_tokens": True})
    for part in ("onnx", "onnx/int8", "config.json"):
        with pytest.raises(ConfigError, match=f"{part.split('/')[-1]} is in the checkpoint {checkpoint}"):
            load_model_files(checkpoint / part)
    with pytest.raises(CheckpointError, match=f"1_Pooling is in the checkpoint {checkpoint}"):
        load_model_files(checkpoint / "1_Pooling").architecture  # noqa: B018
    for above in (checkpoint.parent, checkpoint.parents[1]):
        with pytest.raises(ConfigError, match=f"contains the checkpoint {checkpoint}"):
            load_model_files(above)


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="did you mean tiny-vl"):
        load_model_files("tiny_vl")
    for address in "https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct", "hf.co/Qwen/Qwen2.5-VL-3B-Instruct/tree/main":
        with pytest.raises(ConfigError, match=r"name, Qwen/Qwen2\.5-VL-3B-Instruct$"):
            load_model_files(address)
    with pytest.raises(ConfigError, match=r"is not a folder; .*hf download"):
        load_model_files(tmp_path / "nowhere")
    (tmp_path / "README.md").write_text("a")
    with pytest.raises(ConfigError, match=r"README.md' is a file, not a checkpoint; .*sensorium pull"):
        load_model_files(tmp_path / "README.md")
    with pytest.raises(ConfigError, match=r"no config.json"):
        load_model_files(tmp_path)
    with pytest.raises(ConfigError, match=r"an empty config.json"):
        load_model_files(write(tmp_path, config={}))
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_model_files(write(tmp_path, config="{"))
    for config in ({"x": 1}, *({"architectures": value} for value in (None, [], "Qwen2VL", [None], {}))):
        with pytest.raises(CheckpointError, match=r'names no architecture: .*"architectures".*must be a list'):
            load_model_files(write(tmp_path, config=config)).architecture  # noqa: B018


def test_context_length():
    assert check_max_model_len(None, 100) == 100
    assert check_max_model_len(50, 100) == 50
    with pytest.raises(ConfigError, match="max_model_len=101 is above the model's max_position_embeddings=100"):
        check_max_model_len(101, 100)


@pytest.mark.parametrize("text", ["1048576\n", "max\n", None])
def test_the_kv_cache_follows_the_container_memory_limit(tmp_path, monkeypatch, text):
    limit = tmp_path / "memory.max"
    if text is not None:
        limit.write_text(text)
    monkeypatch.setattr(config_module, "_MEMORY_LIMITS", (limit,))
    budget = cache_budget(EngineConfig("m"), CPU)
    assert budget == 1 << 18 if text == "1048576\n" else budget > 1 << 26
