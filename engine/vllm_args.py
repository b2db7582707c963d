"""Translates, ignores or refuses each engine argument of vLLM that is not an option of `EngineConfig`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import torch

from ..callers.errors import ConfigError, equals_one_of, hint, short_repr

_ONE_DEVICE = "an engine runs on one device; start one per GPU and divide the prompts"
_ONE_REPLICA = "an engine is one replica; sensorium.ray.serve_app and sensorium.ray.map_batches run several and divide the work"
_WHOLE_PROMPTS = "processes divide heads, layers and experts, not the positions of a prompt; give tensor_parallel_size"
_ONE_MACHINE = "the processes of an engine run on one machine; use an engine on each"
_POOLING = "each request chooses: PoolingParams(pooling=...) for vectors, PoolingParams(token_ids=...) for logits"

# (reason, accepted values, names): the accepted values ask for what the engine does anyway
_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (_ONE_REPLICA, (1,), "data_parallel_size data_parallel_size_local"),
    (_ONE_REPLICA, (0,), "data_parallel_rank data_parallel_start_rank"),
    (_WHOLE_PROMPTS, (1,), "prefill_context_parallel_size decode_context_parallel_size"),
    (_ONE_MACHINE, (1,), "nnodes"),
    (_ONE_MACHINE, (0,), "node_rank"),
    ("each process has consecutive experts", ("linear",), "expert_placement_strategy"),
    (_ONE_DEVICE, (False,), "enable_dbo enable_eplb enable_elastic_ep ray_workers_use_nsight"),
    (_ONE_MACHINE, ("uni", "mp", "external_launcher"), "distributed_executor_backend"),
    ('give device="cuda:N"', (), "device_ids"),
    ("give speculative_config", (), "speculative_model num_speculative_tokens spec_method spec_model spec_tokens"),
    ("weights and KV cache stay on the device; choose quantization or a smaller max_model_len", (0,), "cpu_offload_gb"),
    ("KV blocks are kept in the host's memory as they are", ("native",), "kv_offloading_backend"),
    ("events of KV blocks are not published", (), "kv_events_config"),
    ("give new weights to LLM.update_weights", (), "weight_transfer_config"),
    ("an adapter's own files say which layers it changes", (), "lora_target_modules"),
    (_POOLING, (), "pooler_config override_pooler_config"),
    (_POOLING, ("auto", "generate", "embed", "embedding", "score", "classify"), "task"),
    (_POOLING, ("auto", "generate", "pooling"), "runner"),
    (_POOLING, ("auto", "none", "embed", "classify"), "convert"),
    ("give it in hf_overrides", (), "rope_scaling rope_theta"),
    ("the tokenizer is always loaded; prompts may be token ids", (False,), "skip_tokenizer_init"),
    ("the tokenizer's files decide", ("auto", "hf", "mistral", "slow"), "tokenizer_mode"),
    (
        "the files decide: safetensors or GGUF; convert others first",
        ("auto", "safetensors", "hf", "mistral", "gguf"),
        "load_format",
    ),
    ("config.json or params.json is read", ("auto", "hf", "mistral"), "config_format"),
    ("the architecture decides; transformers' class runs if sensorium has none", ("auto", "vllm"), "model_impl"),
    ("all files come from model", ("",), "model_weights"),
    ("set the environment variable HF_HUB_CACHE", (), "download_dir"),
    ("set the environment variable HF_TOKEN", (True,), "hf_token"),
    ("register the class with sensorium.register_model", ({},), "model_class_overrides"),
    ("register the family with sensorium.register_model", (), "io_processor_plugin"),
    ("the checkpoint's own is used; quantization= quantises other checkpoints while loading", (), "quantization_config"),
    ("the window is part of the model; give max_model_len", (False,), "disable_sliding_window"),
    ("give kv_cache_memory_bytes", (), "num_gpu_blocks_override"),
    ("give max_waiting to AsyncLLM", (), "max_num_queued_reqs max_num_queued_tokens"),
    ("give logprobs_mode in SamplingParams", ("raw_logprobs",), "logprobs_mode"),
    ("register them with sensorium.register_logits_processor", ([],), "logits_processors"),
    ("give tracing= a TracerProvider", (), "otlp_traces_endpoint"),
    ("this class cannot be replaced", (), "scheduler_cls"),
    ("this class cannot be replaced", ("auto", ""), "worker_cls worker_extension_cls"),
    ("outputs do not have this field", (False,), "enable_return_routed_experts return_sampling_mask"),
    ("requests are not recorded", (False,), "enable_trace_replay"),
    ("diffusion models do not run", (), "diffusion_config"),
)
ONLY = {name: (accepted, reason) for reason, accepted, names in _ONLY for name in names.split()}

# reason why a value has no effect, names
_IGNORED = (
    ("code of a checkpoint never runs", "trust_remote_code code_revision"),
    ("CUDA graphs are captured where they are faster", "enforce_eager cudagraph_capture_sizes max_cudagraph_capture_size"),
    ("CUDA graphs are captured where they are faster", "compilation_config max_seq_len_to_capture optimization_level"),
    ("CUDA graphs are captured where they are faster", "performance_mode"),
    ("the option kernels chooses backends", "attention_backend attention_config mm_encoder_attn_backend mm_encoder_attn_dtype"),
    ("the option kernels chooses backends", "moe_backend linear_backend all2all_backend kernel_config ir_op_priority"),
    ("the option kernels chooses backends", "mamba_config mamba_backend enable_flashinfer_autotune disable_cascade_attn"),
    ("processes gather tensors and reduce none", "disable_custom_all_reduce"),
    ("the processes of an engine run on one machine", "master_addr master_port data_parallel_address data_parallel_rpc_port"),
    ("preempted requests are computed again", "swap_space preemption_mode"),
    ("max_num_batched_tokens limits a step", "enable_chunked_prefill disable_chunked_mm_input max_num_partial_prefills"),
    ("max_num_batched_tokens limits a step", "max_long_partial_prefills long_prefill_token_threshold"),
    ("max_num_batched_tokens limits a step", "max_num_scheduled_tokens"),
    ("the scheduler has no such setting", "watermark prefill_schedule_interval scheduler_reserve_full_isl num_scheduler_steps"),
    ("text is detokenised outside the step loop", "disable_async_output_proc stream_interval multi_step_stream_outputs"),
    ("the KV cache has no such setting", "prefix_caching_hash_algo disable_hybrid_kv_cache_manager calculate_kv_scales"),
    ("memory is planned from the model's limits", "skip_mm_profiling"),
    ("the chat template places the items", "interleave_mm_strings"),
    (
        "processed media are cached in this process",
        "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_hasher_algorithm mm_tensor_ipc",
    ),
    ("media_workers is the number of threads", "renderer_num_workers tokenizer_pool_size"),
    ("max_loras adapters are kept on the model's device, in its dtype", "max_cpu_loras lora_dtype fully_sharded_loras"),
    ("llguidance compiles every format", "structured_outputs_config guided_decoding_backend"),
    ("answers are returned with their reasoning", "reasoning_parser reasoning_parser_plugin reasoning_config"),
    ("weights are mapped from safetensors files", "model_loader_extra_config ignore_patterns pt_load_map_location"),
    ("weights are mapped from safetensors files", "safetensors_load_strategy max_parallel_loading_workers"),
    ("the checkpoint's format is checked when it is loaded", "allow_deprecated_quantization"),
    ("there is no such setting", "additional_config profiler_config use_fp64_gumbel"),
    ("the options metrics and tracing export them", "collect_detailed_traces kv_cache_metrics show_hidden_metrics_for_version"),
)
_EMPTY: tuple[object, ...] = (False, "", (), [], {})
IGNORED = {name: reason for reason, names in _IGNORED for name in names.split()}
_SILENT = (
    "served_model_name disable_log_stats disable_log_requests enable_log_requests use_tqdm_on_load enable_sleep_mode",
    "enable_cumem_allocator enable_mm_embeds aggregate_engine_logging enable_auto_tool_choice",
)
SILENT = frozenset(name for names in _SILENT for name in names.split())  # ignored without a warning


def _gib(value: Any) -> int:
    return max(1, int(value * (1 << 30)))


def _limits(value: Any) -> Any:
    """Return limits with {"count": n, ...} as n. The other options describe the items of vLLM's memory profiling."""
    if not isinstance(value, Mapping):
        return value
    counts = {name: limit.get("count") if isinstance(limit, Mapping) else limit for name, limit in value.items()}
    return {name: count for name, count in counts.items() if count is not None}


def _dtype(value: Any) -> Any:
    """Return the name of a torch dtype, or of one of vLLM's short names."""
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    return {"half": "float16", "float": "float32"}.get(name, name)


def _length(value: Any) -> Any:
    """Return a number of tokens as in vLLM: "1k" is 1000, "1K" is 1024, and -1 or "auto" is the model's maximum."""
    if value in (-1, "-1", "auto"):
        return None
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([kmgtKMGT]?)", value) if isinstance(value, str) else None
    if match is None or ("." in match[1] and not match[2].islower()):
        return value
    power = " kmgt".index(match[2].lower() or " ")
    return int(Decimal(match[1]) * (1000 if match[2].islower() else 1024) ** power)


def _no_media(only_text: object) -> dict[str, int] | None:
    return dict.fromkeys(("image", "video", "audio", "vision_chunk"), 0) if only_text else None


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _video_backend(value: Any) -> Any:
    """Return the decoder of one of vLLM's video loaders. Which frames a loader chooses is the model family's own rule here."""
    return {"opencv_dynamic": "opencv"}.get(value, value) if isinstance(value, str) else value


# name -> an option of the engine or an entry of one that is a mapping, and how the value is converted
RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "dtype": ("dtype", _dtype),
    "max_model_len": ("max_model_len", _length),
    "gpu_memory_utilization": ("gpu_memory_fraction", lambda value: value),
    "mm_processor_cache_gb": ("mm_processor_cache_bytes", _gib),
    "disable_mm_preprocessor_cache": ("mm_processor_cache_bytes", lambda value: 1 if value else None),
    "limit_mm_per_prompt": ("limit_mm_per_prompt", _limits),
    "language_model_only": ("limit_mm_per_prompt", _no_media),
    "quantization": ("quantization", lambda value: value),
    "generation_config": ("generation_config", lambda value: "none" if value == "vllm" else value),
    "allowed_local_media_path": ("media.allowed_local_media_path", lambda value: value or None),
    "allowed_media_domains": ("media.allowed_media_domains", lambda value: tuple(value) or None),
    "mm_encoder_only": ("parts", lambda value: "encoder" if value else None),
    "video_pruning_rate": ("hf_overrides.video_pruning_rate", lambda value: value or None),
}
_MEDIA_IO: dict[tuple[str, str], tuple[str, Callable[[Any], Any]]] = {  # (modality, key) of media_io_kwargs
    ("video", "num_frames"): ("mm_processor_kwargs.num_frames", lambda value: value),
    ("video", "fps"): ("mm_processor_kwargs.fps", lambda value: None if value == -1 else value),
    ("video", "max_duration"): ("mm_processor_kwargs.max_duration", lambda value: value),
    ("video", "frame_recovery"): ("media.frame_recovery", _flag),
    ("video", "video_backend"): ("media.video_backend", _video_backend),
    ("image", "rgba_background_color"): ("media.background", lambda value: tuple(value)[:3]),
}
_SAME_AS = {"tokenizer": "model", "hf_config_path": "model", "tokenizer_revision": "revision"}
NAMES = frozenset((*ONLY, *IGNORED, *SILENT, *RENAMED, *_SAME_AS, "media_io_kwargs"))


def translate_options(model: object, options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return options of the engine from options and engine arguments of vLLM. None means the default.

    Warns once about all arguments that have no effect.

    Args:
        known: names of the engine's options.

    Raises:
        ConfigError: an argument cannot be honoured, or is neither an option nor an argument of vLLM.
    """
    set_options = {name: value for name, value in options.items() if value is not None}
    result: dict[str, Any] = {name: value for name, value in set_options.items() if name in names and name not in RENAMED}
    without_effect: list[str] = []
    for name, value in set_options.items():
        if name in RENAMED:
            _set(result, name, value, *RENAMED[name])
        elif name in names or name in SILENT:
            continue
        elif name == "media_io_kwargs":
            _set_media_io(result, value)
        elif name in ONLY:
            accepted, reason = ONLY[name]
            if not _is_one_of(value, accepted):
                raise _refusal(name, value, reason)
        elif name in IGNORED:
            without_effect += [f"{name} ({IGNORED[name]})"] if not equals_one_of(value, _EMPTY) else []
        elif name in _SAME_AS:
            if str(value) != str({"model": model, **set_options}.get(_SAME_AS[name])):
                raise _refusal(name, value, f"all files come from {_SAME_AS[name]}")
        else:
            meant = hint(name, names, ["model", *NAMES])
            raise ConfigError(f"unknown option {short_repr(name)}; {meant}", param=str(name))
    if without_effect:
        warnings.warn(f"options without effect here: {'; '.join(without_effect)}", UserWarning, stacklevel=6)
    return result


def as_given(error: ConfigError, options: Mapping[str, Any]) -> ConfigError:
    """Return the error about an option with the name that the caller has given it."""
    param = error.info.param
    written = next((name for name, (target, _) in RENAMED.items() if target == param and options.get(name) is not None), param)
    error.info = replace(error.info, param=written)
    return error


def _set(result: dict[str, Any], name: str, value: Any, target: str, convert: Callable[[Any], Any]) -> None:
    """Set the option `target`; "a.b" sets the entry b of the option a, unless the caller has given that entry."""
    try:
        converted = convert(value)
    except ConfigError:
        raise
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor
        raise _refusal(name, value, "it has a wrong type") from None
    if converted is None:
        return
    option, _, key = target.partition(".")
    if not key:
        result[option] = converted
    elif isinstance(result.get(option, {}), Mapping):
        result[option] = {key: converted, **result.get(option, {})}
    else:
        raise _refusal(name, value, f"{option} is an object; set its {key}")


def _set_media_io(result: dict[str, Any], value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(options, Mapping) for options in value.values()):
        raise _refusal("media_io_kwargs", value, "it must map modalities to options")
    for modality, options in value.items():
        both = modality == "video" and None not in (options.get("fps"), options.get("num_frames"))
        if both and -1 not in (options["fps"], options["num_frames"]):  # num_frames is then the most that fps may give
            _set(result, "media_io_kwargs", options["num_frames"], "mm_processor_kwargs.max_frames", lambda value: value)
            options = {key: option for key, option in options.items() if key != "num_frames"}
        for key, option in options.items():
            if option is None:
                continue
            if (modality, key) in _MEDIA_IO:
                _set(result, "media_io_kwargs", option, *_MEDIA_IO[modality, key])
            elif (modality, key) != ("image", "image_mode") or not equals_one_of(option, ("RGB",)):
                options_known = ", ".join(f"{key} of {modality}" for modality, key in _MEDIA_IO)
                raise _refusal("media_io_kwargs", value, f"the known options are {options_known}")


def _is_one_of(value: object, accepted: Collection[object]) -> bool:
    """Return whether a value is among these; True is not 1."""
    return equals_one_of(value, [choice for choice in accepted if isinstance(value, bool) == isinstance(choice, bool)])


def _refusal(name: str, value: object, reason: str) -> ConfigError:
    return ConfigError(f"<<param=>>{short_repr(value)} cannot be honoured: {reason}", param=name)
