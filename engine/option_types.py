"""Keyword arguments of `LLM` and `AsyncLLM` as types, for type checkers and editors. Values are checked when a call is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch

from ..mm.media.policy import MediaPolicy
from .lora_request import LoRARequest


class VllmEngineArgs(TypedDict, total=False):
    """Engine arguments that only vLLM has; `vllm_args` says which values are accepted."""

    additional_config: Any
    aggregate_engine_logging: Any
    all2all_backend: Any
    allow_deprecated_quantization: Any
    allowed_local_media_path: Any
    allowed_media_domains: Any
    attention_backend: Any
    attention_config: Any
    calculate_kv_scales: Any
    code_revision: Any
    collect_detailed_traces: Any
    compilation_config: Any
    config_format: Any
    convert: Any
    cpu_offload_gb: Any
    cudagraph_capture_sizes: Any
    data_parallel_address: Any
    data_parallel_rank: Any
    data_parallel_rpc_port: Any
    data_parallel_size: Any
    data_parallel_size_local: Any
    data_parallel_start_rank: Any
    decode_context_parallel_size: Any
    device_ids: Any
    diffusion_config: Any
    disable_async_output_proc: Any
    disable_cascade_attn: Any
    disable_chunked_mm_input: Any
    disable_custom_all_reduce: Any
    disable_hybrid_kv_cache_manager: Any
    disable_log_requests: Any
    disable_log_stats: Any
    disable_mm_preprocessor_cache: Any
    disable_sliding_window: Any
    distributed_executor_backend: Any
    download_dir: Any
    enable_auto_tool_choice: Any
    enable_chunked_prefill: Any
    enable_cumem_allocator: Any
    enable_dbo: Any
    enable_elastic_ep: Any
    enable_eplb: Any
    enable_flashinfer_autotune: Any
    enable_log_requests: Any
    enable_mm_embeds: Any
    enable_return_routed_experts: Any
    enable_sleep_mode: Any
    enable_trace_replay: Any
    enforce_eager: Any
    expert_placement_strategy: Any
    fully_sharded_loras: Any
    gpu_memory_utilization: Any
    guided_decoding_backend: Any
    hf_config_path: Any
    hf_token: Any
    ignore_patterns: Any
    interleave_mm_strings: Any
    io_processor_plugin: Any
    ir_op_priority: Any
    kernel_config: Any
    kv_cache_metrics: Any
    kv_events_config: Any
    kv_offloading_backend: Any
    language_model_only: Any
    linear_backend: Any
    load_format: Any
    logits_processors: Any
    logprobs_mode: Any
    long_prefill_token_threshold: Any
    lora_dtype: Any
    lora_target_modules: Any
    mamba_backend: Any
    mamba_config: Any
    master_addr: Any
    master_port: Any
    max_cpu_loras: Any
    max_cudagraph_capture_size: Any
    max_long_partial_prefills: Any
    max_num_partial_prefills: Any
    max_num_queued_reqs: Any
    max_num_queued_tokens: Any
    max_num_scheduled_tokens: Any
    max_parallel_loading_workers: Any
    max_seq_len_to_capture: Any
    media_io_kwargs: Any
    mm_encoder_attn_backend: Any
    mm_encoder_attn_dtype: Any
    mm_encoder_only: Any
    mm_hasher_algorithm: Any
    mm_processor_cache_gb: Any
    mm_processor_cache_type: Any
    mm_shm_cache_max_object_size_mb: Any
    mm_tensor_ipc: Any
    model_class_overrides: Any
    model_impl: Any
    model_loader_extra_config: Any
    model_weights: Any
    moe_backend: Any
    multi_step_stream_outputs: Any
    nnodes: Any
    node_rank: Any
    num_gpu_blocks_override: Any
    num_scheduler_steps: Any
    num_speculative_tokens: Any
    optimization_level: Any
    otlp_traces_endpoint: Any
    override_pooler_config: Any
    performance_mode: Any
    pooler_config: Any
    preemption_mode: Any
    prefill_context_parallel_size: Any
    prefill_schedule_interval: Any
    prefix_caching_hash_algo: Any
    profiler_config: Any
    pt_load_map_location: Any
    quantization_config: Any
    ray_workers_use_nsight: Any
    reasoning_config: Any
    reasoning_parser: Any
    reasoning_parser_plugin: Any
    renderer_num_workers: Any
    return_sampling_mask: Any
    rope_scaling: Any
    rope_theta: Any
    runner: Any
    safetensors_load_strategy: Any
    scheduler_cls: Any
    scheduler_reserve_full_isl: Any
    served_model_name: Any
    show_hidden_metrics_for_version: Any
    skip_mm_profiling: Any
    skip_tokenizer_init: Any
    spec_method: Any
    spec_model: Any
    spec_tokens: Any
    speculative_model: Any
    stream_interval: Any
    structured_outputs_config: Any
    swap_space: Any
    task: Any
    tokenizer: Any
    tokenizer_mode: Any
    tokenizer_pool_size: Any
    tokenizer_revision: Any
    trust_remote_code: Any
    use_fp64_gumbel: Any
    use_tqdm_on_load: Any
    video_pruning_rate: Any
    watermark: Any
    weight_transfer_config: Any
    worker_cls: Any
    worker_extension_cls: Any


class EngineOptions(VllmEngineArgs, total=False):
    """Options of `EngineConfig` that `LLM` does not name in its own signature. None means the default."""

    max_live_streams: int | None
    max_speech_streams: int | None
    max_num_batched_tokens: int | None
    block_size: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_fraction: float | None
    media_workers: int | None
    media_device: str | None
    media: MediaPolicy | Mapping[str, Any] | None
    mm_processor_cache_bytes: int | None
    trust_uuid: bool | None
    parts: Literal["all", "encoder", "decoder"] | None
    enable_prompt_embeds: bool | None
    enable_prefix_caching: bool | None
    prefix_cache_bytes: int | None
    max_encoder_tokens: int | None
    encoder_cache_bytes: int | None
    encoder_cache_dir: str | os.PathLike[str] | None
    encoder_cache_dir_bytes: int | None
    ec_transfer_config: Mapping[str, Any] | None
    kv_offloading_size: float | None
    kv_transfer_config: Mapping[str, Any] | None
    encoder: str | Sequence[str] | None
    encoder_listen: str | None
    encoder_seconds: float | None
    packed_cache_dir: str | os.PathLike[str] | None
    quarantine_seconds: float | None
    quantization: str | Mapping[str, Any] | None
    kv_cache_dtype: str | None
    kernels: str | None
    async_scheduling: bool | None
    scheduling_policy: Literal["fcfs", "priority", "shortest_prompt_first"] | None
    warm_up: bool | None
    load_talker: bool | None
    load_mtp: bool | None
    batch_invariant: bool | None
    speculative_config: Mapping[str, Any] | None
    engine_process: bool | None
    engine_restarts: int | None
    engine_standby: bool | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    enable_expert_parallel: bool | None
    mm_encoder_tp_mode: Literal["weights", "data"] | None
    max_logprobs: int | None
    max_sampling_chars: int | None
    max_uuids: int | None
    max_template_seconds: float | None
    max_template_chars: int | None
    max_grammar_chars: int | None
    grammar_seconds: float | None
    revision: str | None
    offline: bool | None
    adapter: str | os.PathLike[str] | None
    enable_lora: bool | None
    max_loras: int | None
    max_lora_rank: int | None
    lora_resolvers: Sequence[str] | None
    default_mm_loras: Mapping[str, str] | None
    hf_overrides: Mapping[str, Any] | Callable[[Any], Any] | None
    override_generation_config: Mapping[str, Any] | None


class ConfigOptions(EngineOptions, total=False):
    """All options of `EngineConfig` but the model, as `LLM` takes them."""

    dtype: str | torch.dtype | None
    device: str | None
    max_model_len: int | str | None
    max_num_seqs: int | None
    limit_mm_per_prompt: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    seed: int | None
    generation_config: str | None


class LLMOptions(ConfigOptions, total=False):
    """All options of `LLM` but the model."""

    metrics: Any
    tracing: Any
    chat_template: str | os.PathLike[str] | None


class VllmArguments(TypedDict, total=False):
    """Arguments of vLLM's calls that have another name, or no meaning, here."""

    lora_request: LoRARequest | Sequence[LoRARequest | None] | None
    prompt_adapter_request: None
    guided_options_request: None
    tokenization_kwargs: None
    chat_template_content_format: Literal["auto"] | None


class RequestOptions(VllmArguments, total=False):
    """Keys of a prompt of `generate` that `chat` takes as arguments."""

    mm_processor_kwargs: Mapping[str, Any] | None
    cache_salt: str | None
    fit: Literal["context"] | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None


class ChatOptions(RequestOptions, total=False):
    """Options of `chat` for calls that also take prompts."""

    adapter: str | LoRARequest | Sequence[str | LoRARequest | None] | None
    add_generation_prompt: bool
    chat_template: str | os.PathLike[str] | None
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
