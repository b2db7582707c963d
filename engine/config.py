"""Options of the engine."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..callers.errors import ConfigError, hint, short_repr
from ..kernels.bodies import requested
from ..kernels.dispatch import parse_overrides
from ..kernels.kv_quant import CACHE_DTYPES
from ..mm.media.policy import MediaPolicy
from ..models.quantization import METHODS, parse_quantization
from .model_files import DTYPES
from .sampling_params import SamplingLimits, check_generation_overrides
from .speculative_config import read_speculative_config, with_paths
from .transfer_config import (
    ECTransferOptions,
    KVTransferOptions,
    check_encoder_listen,
    read_ec_transfer,
    read_encoders,
    read_kv_transfer,
)
from .vllm_args import as_given, translate_options

_DEFAULT_CACHE_BYTES = 4 << 30
_LARGEST = (1 << 63) - 1  # the largest integer that messages to the engine's process hold
_MEMORY_LIMITS = tuple(map(Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")))  # v2, v1
PUBLISHED_FORMATS = (  # config.json names the format, and weights are read in it
    *("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "modelopt_fp4", "mxfp4", "torchao", "gguf"),
    "bitsandbytes",
)
SCHEDULING_POLICIES = ("fcfs", "priority", "shortest_prompt_first")
_KEPT_ROW_BYTES = 512 << 20
MAX_STREAM_ROWS = 7500  # 10 minutes of a live stream: a sequence with more rows ends at the next pause
MEDIA_BYTES = 512 << 20  # processed items of running requests; above this, no further media are processed
_POSITIVE = (
    "max_num_seqs",
    "max_live_streams",
    "max_speech_streams",
    "max_num_batched_tokens",
    "block_size",
    "media_workers",
    "mm_processor_cache_bytes",
    "max_encoder_tokens",
    "encoder_cache_dir_bytes",
    "max_logprobs",
    "max_template_chars",
    "max_sampling_chars",
    "max_uuids",
    "max_grammar_chars",
    "max_loras",
    "max_lora_rank",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)
_FLAGS = (
    "offline",
    "trust_uuid",
    "enable_prompt_embeds",
    "enable_prefix_caching",
    "batch_invariant",
    "engine_process",
    "engine_standby",
    "warm_up",
    "load_talker",
    "load_mtp",
    "enable_lora",
    "enable_expert_parallel",
)


@dataclass(frozen=True)
class EngineConfig:
    """All options of `LLM`.

    Args:
        model: path of a checkpoint's folder in the layout of the Hugging Face Hub, or a model's name there (ORG/NAME), which
            is downloaded unless the Hub's cache holds it, or "tiny-vl" or "tiny-asr", the shipped models. An existing folder
            takes precedence. Loading replaces it with the path of the folder.
        dtype: data type of weights and activations: "auto" (the checkpoint's, but float32 on a CPU without fast kernels for
            it; no CPU has them for float16), "float32", "bfloat16" or "float16". LLM also takes torch's dtypes, "half" and
            "float".
        device: "auto" (the first GPU if there is one, else the CPU), "cpu", "cuda" (the first GPU) or "cuda:N".
        max_model_len: maximum number of tokens of prompt and answer together. None uses the model's maximum, or less if the KV
            cache cannot hold it. LLM also takes -1 for None, and "32k" (32,000) or "32K" (32,768).
        max_num_seqs: maximum number of sequences per step.
        max_live_streams: maximum number of live streams for which the encoder keeps a state; at most `max_num_seqs`. The memory
            plan has room for all of them. With more streams, Voxtral-Realtime (268 MB each) refuses the new one. Moonshine
            Streaming (2 MB each) drops the state used least recently, and encodes that window from its start in its next pass.
        max_speech_streams: maximum number of answers that the talker speaks at a time: streams of `stream_speak` that have not
            ended, and answers of `speak`, which are spoken one by one. The memory plan has room for all of them.
        max_num_batched_tokens: maximum number of tokens per step. Longer prompts are prefilled in chunks.
        block_size: number of tokens per block of the KV cache.
        kv_cache_memory_bytes: size of the KV cache in bytes, at most the memory of the device. None sizes it automatically.
            On a CPU it holds `max_num_seqs` sequences of `max_model_len` tokens, but takes at most 4 GiB and a quarter of the
            host's memory. On a GPU it takes `gpu_memory_fraction` of the free memory, less weights, encoder cache and the
            largest step.
        gpu_memory_fraction: fraction of the free GPU memory that the engine may use, in (0, 1].
        limit_mm_per_prompt: maximum number of items per prompt, by modality. Encoders that no prompt can use are not loaded.
        mm_processor_kwargs: options of the model's processor, such as {"max_pixels": 1003520}. Requests can override them.
        seed: random seed of the engine. Requests without a seed derive theirs from it.
        hf_overrides: values that replace those of config.json, in nested objects too. LLM also takes a function that gets the
            config, a mapping whose keys are also attributes, and changes it in place or returns a new one that replaces it.
        override_generation_config: values that replace those of generation_config.json; a temperature also replaces
            `do_sample: false`.
        generation_config: "auto" takes default sampling parameters from generation_config.json, "none" ignores the file.
        media_workers: number of threads that decode and process media.
        media_device: device that resizes and normalises images and computes spectrograms: "cpu", "cuda" or "cuda:N". On a GPU,
            each worker holds one image or about 64 MiB of a video's frames, and copies the results back to the host.
        media: limits on media inputs, as a `mm.media.policy.MediaPolicy` or a mapping of its fields.
        mm_processor_cache_bytes: size of the cache of processed items in bytes.
        trust_uuid: take the uuids in `multi_modal_uuids` as the identity of their content instead of hashing the content.
            Safe only if all requests come from one trusted caller.
        parts: "all", "encoder" (encoders only, for `LLM.encode_media`; no decoder and no KV cache), or "decoder" (no encoders;
            media are given as encoder rows).
        enable_prompt_embeds: accept prompts of the form {"prompt_embeds": [tokens, hidden]}. The encoder cache then holds their
            rows, also for text models.
        enable_prefix_caching: keep KV blocks of finished sequences and reuse them for prompts with the same prefix.
        prefix_cache_bytes: maximum size of KV blocks that are kept only for reuse. None: the whole KV cache.
        max_encoder_tokens: maximum number of encoder rows per step. A larger item is encoded alone.
        encoder_cache_bytes: size of the encoder cache in bytes. None makes room for four items of the model's maximum size,
            for all items of a prompt that is read by cross-attention, and for at least 128 MiB. With `encoder_listen`, it is
            the size of the rows that are kept in the host's memory for further requests (None: 512 MiB).
        encoder_cache_dir: folder where encoder rows are kept across restarts; `~` is expanded. None keeps them in memory only.
            All weight files are hashed at start, so that rows of one checkpoint are never served for another.
        encoder_cache_dir_bytes: maximum size of that folder. The least recently used rows are deleted first.
        ec_transfer_config: where encoder rows and processed items are kept for this engine and for others, as a mapping in
            vLLM's form, in place of `encoder_cache_dir` (docs/scaling.md).
        kv_offloading_size: GiB of the host's memory that keep KV blocks which the KV cache has no room for (docs/scaling.md).
        kv_transfer_config: where KV blocks are kept outside the KV cache, for this engine and for others, as a mapping in
            vLLM's form (docs/scaling.md).
        encoder: address of an encoder, host:port, or a list of them: engines with `encoder_listen`, which encode this engine's
            items (docs/scaling.md). With `parts="decoder"`, requests then take media, and fail if no encoder answers. Otherwise
            this engine encodes such items, and counts them as `fallbacks` of its `stats.transfers`.
        encoder_listen: address, host:port, where an engine with `parts="encoder"` gives rows to engines with `encoder`.
        encoder_seconds: time limit of sending an item to an encoder and getting its rows.
        packed_cache_dir: folder where the weights of linear layers are kept as the C++ kernels read them; `~` is expanded. The
            next start of an engine with the same checkpoint and quantization on a CPU with the same instructions maps them.
            The checkpoint is recognised by config.json and by inodes, sizes and times of change of its weight files. Nothing is
            deleted.
        quarantine_seconds: how long an item that made the encoder fail is refused. This affects its tenant only.
        quantization: None, "int8" (weights and activations of linear layers as 8-bit integers), "fp8" (8-bit floats on GPUs
            that support them, elsewhere the weights only), or "int4" (the decoder's weights in 4 bits). A mapping has `method`
            and options: {"method": "int4", "group_size": 64, "symmetric": False, "activations": "int8", "towers": "int8"}
            (docs/quantisation.md). For a quantised checkpoint, names of published formats, such as "awq", mean the same as
            None, and "int8" is valid if it stores int8.
        kv_cache_dtype: "auto" (the model's data type), or "int8" or "fp8" (also "fp8_e4m3") to store keys and values in 8 bits
            with one scale per token and head, in about half the memory of 16 bits. Models with latent attention and models
            that run through transformers' classes support "auto" only.
        kernels: backends of single ops, such as "attention=reference,rms_norm=triton", or "torch" for all ops that have a torch
            backend. Other ops choose by device, dtype and shape; `sensorium doctor` prints the choice.
        async_scheduling: start a decode step before the tokens of the previous step are on the host, and run the encoder beside
            steps that do not need its results. None enables it on GPUs, where it hides the host's work between two steps.
        scheduling_policy: which requests come first among those of equal priority (smaller priorities always do): "fcfs" or, in
            vLLM's other word, "priority" takes them in order of arrival; "shortest_prompt_first" takes the one with the fewest
            prompt tokens left, so that a long prompt waits while shorter ones arrive.
        engine_process: load and run the model in a separate process. Tokenizing, media and text stay in this process and no
            longer delay the steps, but each step takes more memory and time (benchmarks/README.md).
        engine_restarts: how often in 10 minutes the engine's process is restarted after it has died. Requests that it
            computes end with an error, and items that were being encoded are refused for `quarantine_seconds`.
        engine_standby: keep a second process, which has imported its modules and no model (160 MB), to take the place of an
            engine's process that has died. It saves the seconds of the imports.
        tensor_parallel_size: number of processes that divide the decoder's heads, MLPs and head among them, each with its part
            of the weights and of the KV cache. Answers have the same bits as with 1. Above 1, it implies `engine_process`, and
            runs on a CPU.
        pipeline_parallel_size: number of processes that divide the decoder's layers among them, one after the other, each with
            the weights and the KV cache of its layers. With `tensor_parallel_size`, each of them is a group of so
            many processes.
        enable_expert_parallel: the processes of `tensor_parallel_size` divide the experts of mixtures among them. Otherwise
            each has all of them.
        mm_encoder_tp_mode: what several processes of a model do with media items: "weights", each encodes all items, or
            "data", they divide the items among them. Each has the whole encoder. (In vLLM, "weights" divides the encoder.)
        max_logprobs: maximum of `logprobs` and `prompt_logprobs` of a request. All answers of a request together may have 64
            times as many per step.
        max_sampling_chars: maximum number of characters in `stop`, and in `bad_words`, of a request.
        max_grammar_chars: maximum number of characters of `structured_outputs`.
        grammar_seconds: maximum time to compile `structured_outputs`. They are compiled in a worker process first; a
            grammar that takes longer or crashes there is refused for `quarantine_seconds`.
        max_uuids: maximum number of uuids, of all `cache_salt`s together, whose content is remembered. The oldest uuid of the
            salt with the most is forgotten first.
        max_template_seconds: maximum time to render a chat template.
        max_template_chars: maximum characters of `tools`, and of `chat_template_kwargs`, where each entry of a list or object
            counts as 16.
        revision: branch, tag or commit of a model that is given by name. None is the cached commit of the branch main, or the
            newest if none is cached. After loading, it is the commit.
        offline: take a model that is given by name from the cache only, as with HF_HUB_OFFLINE=1.
        adapter: folder of a LoRA adapter in the layout of peft, or its name on the Hub. It is merged into the weights of
            `model`. If `model` is itself such an adapter, it becomes this option, and `model` its base model.
        enable_lora: requests may choose adapters (docs/adapters.md).
        max_loras: adapters of the largest rank for which memory is planned. Smaller ones take less, so that more of them fit.
        max_lora_rank: largest rank of an adapter of requests.
        lora_resolvers: where to look for adapters whose names are not loaded, in order: a folder of adapters, "hub:PATTERN"
            for names on the Hub that match (as in "hub:my-org/*"), or a function of the entry point group
            sensorium.lora_resolvers.
        default_mm_loras: by modality, the folder of the adapter of prompts with such items that name no adapter.
        warm_up: after loading, run a small item of each modality through the encoder (on a CPU if it has few patches). A thread
            also imports and runs the media processing, so that the first item of a request delays no other request.
        load_talker: also load the part of the model that speaks, for `LLM.speak`. It stays in this process.
        load_mtp: also load the layers for multi-token prediction (`DecoderModel.draft`), which
            `speculative_config={"method": "mtp"}` drafts with. Their weights are ignored otherwise.
        batch_invariant: give a request bit-identical results regardless of the other requests in a batch. This is slower.
        speculative_config: what drafts tokens, as in vLLM: {"method": "suffix"} or {"method": "ngram"}, and limits such as
            "num_speculative_tokens" (the most per sequence and step; 0 drafts nothing). {"method": "mtp"} runs
            the model's layers for multi-token prediction, {"model": PATH} a smaller model, {"method": "eagle3", "model": PATH}
            an EAGLE-3 head. With "custom_class", "model" is a class of proposers or its path "module:name". None: only the
            `draft_text` of requests. Answers do not depend on it; see docs/speculation.md.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_live_streams: int = 16
    max_speech_streams: int = 1
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    gpu_memory_fraction: float = 0.85
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    generation_config: str = "auto"
    media_workers: int = 2
    media_device: str = "cpu"
    media: MediaPolicy = field(default_factory=MediaPolicy)
    mm_processor_cache_bytes: int = 512 << 20
    trust_uuid: bool = False
    parts: str = "all"
    enable_prompt_embeds: bool = False
    enable_prefix_caching: bool = True
    prefix_cache_bytes: int | None = None
    max_encoder_tokens: int = 4096
    encoder_cache_bytes: int | None = None
    encoder_cache_dir: str | None = None
    encoder_cache_dir_bytes: int = 4 << 30
    ec_transfer_config: Mapping[str, Any] | None = None
    kv_offloading_size: float | None = None
    kv_transfer_config: Mapping[str, Any] | None = field(default=None, repr=False)  # it may hold a token or a password
    encoder: str | Sequence[str] | None = None
    encoder_listen: str | None = None
    encoder_seconds: float = 60.0
    packed_cache_dir: str | None = None
    quarantine_seconds: float = 300.0
    quantization: str | Mapping[str, Any] | None = None
    kv_cache_dtype: str = "auto"
    kernels: str = ""
    async_scheduling: bool | None = None
    scheduling_policy: str = "fcfs"
    warm_up: bool = True
    load_talker: bool = False
    load_mtp: bool = False
    batch_invariant: bool = False
    speculative_config: Mapping[str, Any] | None = None
    engine_process: bool = False
    engine_restarts: int = 3
    engine_standby: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    mm_encoder_tp_mode: str = "weights"
    max_logprobs: int = 20
    max_sampling_chars: int = 1 << 14
    max_uuids: int = 1 << 16
    max_template_seconds: float = 10.0
    max_template_chars: int = 1 << 22
    max_grammar_chars: int = 1 << 18
    grammar_seconds: float = 10.0
    revision: str | None = None
    offline: bool = False
    adapter: str | None = None
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16
    lora_resolvers: Sequence[str] = ()
    default_mm_loras: Mapping[str, str] = field(default_factory=dict)
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("generation_config", self.generation_config, ("auto", "none"))
        if isinstance(self.quantization, Mapping):
            parse_quantization(self.quantization)
        else:
            _check_choice("quantization", self.quantization, (None, *METHODS, *PUBLISHED_FORMATS))
        _check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _check_choice("mm_encoder_tp_mode", self.mm_encoder_tp_mode, ("weights", "data"))
        _check_choice("parts", self.parts, ("all", "encoder", "decoder"))
        if isinstance(self.kv_cache_dtype, str) and self.kv_cache_dtype == "fp8_e4m3":  # vLLM's other name for it
            object.__setattr__(self, "kv_cache_dtype", "fp8")
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", *CACHE_DTYPES))
        object.__setattr__(self, "speculative_config", with_paths(self.speculative_config))
        limits = read_speculative_config(self.speculative_config)
        if limits.predicted and limits.method == "mtp":
            object.__setattr__(self, "load_mtp", True)
        for name in _POSITIVE:
            _check_positive(name, getattr(self, name))
        if self.kv_transfer and (not self.enable_prefix_caching or self.parts == "encoder"):
            param = "kv_offloading_size" if self.kv_transfer_config is None else "kv_transfer_config"
            wanted = "<<parts=>>'all' or 'decoder'" if self.parts == "encoder" else "<<enable_prefix_caching=>>True"
            raise ConfigError(f"<<param>> needs {wanted}", param=param)
        if self.num_ranks > 1:
            object.__setattr__(self, "engine_process", True)
        if not isinstance(self.media, MediaPolicy):
            raise _error("media", self.media, "must be a MediaPolicy or a mapping of its fields")
        for name in ("max_model_len", "kv_cache_memory_bytes", "prefix_cache_bytes", "encoder_cache_bytes"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        self._check_numbers()
        if self.revision is not None and (not isinstance(self.revision, str) or not self.revision):
            raise _error("revision", self.revision, "must be the name of a branch, a tag or a commit")
        if self.adapter is not None:
            if not isinstance(self.adapter, str | os.PathLike) or not os.fspath(self.adapter):
                raise _error("adapter", self.adapter, "must be the path of an adapter's folder or its name on the Hub")
            object.__setattr__(self, "adapter", os.fspath(self.adapter))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "must be True or False")
        _check_kernels(self.kernels)
        if not isinstance(self.async_scheduling, bool | None):
            raise _error("async_scheduling", self.async_scheduling, "must be True, False or None")
        _check_device_name("device", self.device, ("auto", "cpu"))
        _check_device_name("media_device", self.media_device, ("cpu",))
        self._check_folders()
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise _error("seed", self.seed, "must be an integer")
        self._check_adapters()
        self._check_encoder()
        for name in ("limit_mm_per_prompt", "mm_processor_kwargs", "hf_overrides", "override_generation_config"):
            if not isinstance(getattr(self, name), Mapping) and not (name == "hf_overrides" and callable(self.hf_overrides)):
                raise _error(name, getattr(self, name), "must be a mapping")
        check_generation_overrides(self.override_generation_config)
        for modality, limit in self.limit_mm_per_prompt.items():
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
                raise _error(f"limit_mm_per_prompt[{modality!r}]", limit, "must be an integer, 0 or above")

    def _check_folders(self) -> None:
        """Expand `~` in the folders of caches. Raise ConfigError for what is no folder."""
        for name in ("encoder_cache_dir", "packed_cache_dir"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _expand_folder(name, getattr(self, name)))
        if self.ec_transfer_config is not None and self.ec_transfer.folder:
            _expand_folder("ec_transfer_config", self.ec_transfer.folder)

    def _check_adapters(self) -> None:
        """Raise ConfigError for wrong values of the options on adapters of requests."""
        resolvers, defaults = self.lora_resolvers, self.default_mm_loras
        resolvers = (resolvers,) if isinstance(resolvers, str) else resolvers
        if not isinstance(resolvers, list | tuple) or not all(isinstance(source, str) and source for source in resolvers):
            raise _error("lora_resolvers", resolvers, "must be a list of folders, hub:PATTERN or names of resolvers")
        object.__setattr__(self, "lora_resolvers", tuple(resolvers))
        is_mapping = isinstance(defaults, Mapping)
        if not is_mapping or not all(isinstance(path, str | os.PathLike) and os.fspath(path) for path in defaults.values()):
            raise _error("default_mm_loras", defaults, "must be an object of modalities and folders")
        object.__setattr__(self, "default_mm_loras", {name: os.fspath(path) for name, path in defaults.items()})
        for name in ("lora_resolvers", "default_mm_loras"):
            if getattr(self, name) and not self.enable_lora:
                raise _error(name, getattr(self, name), "needs <<enable_lora=>>True")

    def _check_encoder(self) -> None:
        """Raise ConfigError for wrong values of the options on encoders of other engines, or ones that exclude each other."""
        object.__setattr__(self, "encoder", read_encoders(self.encoder) or None)
        check_encoder_listen(self.encoder_listen)
        if not _is_number(self.encoder_seconds) or not 0 < self.encoder_seconds <= 3600:
            raise _error("encoder_seconds", self.encoder_seconds, "must be a number of seconds, above 0 and at most 3600")
        if self.encoder_listen is not None and self.parts != "encoder":
            raise _error("encoder_listen", self.encoder_listen, "needs <<parts=>>'encoder'")
        if self.encoder is not None and self.parts == "encoder":
            raise _error("encoder", self.encoder, "cannot be combined with <<parts=>>'encoder', which encodes items itself")
        if self.encoder is not None and self.enable_lora:
            reason = "cannot be combined with <<enable_lora>>: adapters may change the encoder; leave one of them out"
            raise _error("encoder", self.encoder, reason)

    def _check_numbers(self) -> None:
        """Raise ConfigError for a fraction, a number of seconds or of restarts that is out of range."""
        if not _is_number(self.gpu_memory_fraction) or not 0 < self.gpu_memory_fraction <= 1:
            raise _error("gpu_memory_fraction", self.gpu_memory_fraction, "must be a number above 0 and at most 1")
        if not _is_number(self.quarantine_seconds) or not 0 <= self.quarantine_seconds < math.inf:
            raise _error("quarantine_seconds", self.quarantine_seconds, "must be a number of seconds, 0 or above")
        if not _is_number(self.grammar_seconds) or not 0 < self.grammar_seconds < math.inf:
            raise _error("grammar_seconds", self.grammar_seconds, "must be a number of seconds above 0")
        if not _is_number(self.max_template_seconds) or not 0 < self.max_template_seconds < math.inf:
            raise _error("max_template_seconds", self.max_template_seconds, "must be a number of seconds above 0")
        if isinstance(self.engine_restarts, bool) or not isinstance(self.engine_restarts, int) or self.engine_restarts < 0:
            raise _error("engine_restarts", self.engine_restarts, "must be an integer, 0 or above")

    @property
    def num_ranks(self) -> int:
        """Number of processes that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def kv_transfer(self) -> KVTransferOptions:
        """The connectors of KV blocks."""
        return read_kv_transfer(self.kv_transfer_config, self.kv_offloading_size)

    @property
    def ec_transfer(self) -> ECTransferOptions:
        """The connector of encoder rows and processed items."""
        return read_ec_transfer(self.ec_transfer_config, self.encoder_cache_dir, self.encoder_cache_dir_bytes)

    @property
    def kept_row_bytes(self) -> int:
        """Bytes of encoder rows that an engine with `encoder_listen` keeps for further requests."""
        if self.encoder_listen is None:
            return 0
        return _KEPT_ROW_BYTES if self.encoder_cache_bytes is None else self.encoder_cache_bytes

    def takes(self, modality: str) -> bool:
        """Return whether requests may have items of this modality."""
        return self.limit_mm_per_prompt.get(modality, 1) > 0

    def encodes(self, modality: str) -> bool:
        """Return whether the engine has the encoder of this modality."""
        return self.parts != "decoder" and self.takes(modality)

    @property
    def sampling_limits(self) -> SamplingLimits:
        return SamplingLimits(self.max_logprobs, self.max_sampling_chars, self.max_grammar_chars)

    @property
    def uses_async_scheduling(self) -> bool:
        """`async_scheduling`, with None resolved by the device."""
        return self.torch_device.type == "cuda" if self.async_scheduling is None else self.async_scheduling

    @property
    def max_streams(self) -> int:
        """`max_live_streams`, or `max_num_seqs` if that is less."""
        return min(self.max_live_streams, self.max_num_seqs)

    @property
    def torch_device(self) -> torch.device:
        """The device with its index, because the current GPU differs by thread. Raises ConfigError if it does not exist."""
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        return _find_device("device", auto if self.device == "auto" else self.device)

    @property
    def torch_media_device(self) -> torch.device:
        """`media_device` with its index. Raises ConfigError if it does not exist."""
        return _find_device("media_device", self.media_device)


def _check_device_name(option: str, value: object, valid: tuple[str, ...]) -> None:
    if not isinstance(value, str) or (value not in valid and not re.fullmatch(r"cuda(:(0|[1-9]\d?))?", value)):
        names = ", ".join(f"'{name}'" for name in (*valid, "cuda"))
        raise _error(option, value, f"must be {names} or 'cuda:N'")


def _find_device(option: str, name: str) -> torch.device:
    if name == "cpu":
        return torch.device(name)
    if not torch.cuda.is_available():
        reason = f"<<param=>>{name!r}: torch sees no GPU; use <<param=>>'cpu' or install a CUDA build of torch"
        raise ConfigError(reason, param=option)
    device = torch.device("cuda:0" if name == "cuda" else name)
    if device.index >= torch.cuda.device_count():
        reason = f"<<param=>>{name!r}: torch sees {torch.cuda.device_count()} GPUs; the first is cuda:0"
        raise ConfigError(reason, param=option)
    return device


def _check_kernels(kernels: str) -> None:
    if not isinstance(kernels, str):
        raise _error("kernels", kernels, "must be a string like 'attention=reference,rms_norm=triton', or 'torch' for all ops")
    try:
        parse_overrides(kernels)
    except ValueError as error:
        raise ConfigError(f"kernels: {error}", param="kernels") from None
    try:
        requested()
    except ValueError as error:
        raise ConfigError(str(error), param="SENSORIUM_CPU") from None


def make_config(model: str | os.PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
    """Make a config from keyword arguments, where None means the default. Engine arguments of vLLM are translated.

    Raises:
        ConfigError: an unknown option, with the nearest known one in the message, or a value that is out of range or cannot be
            honoured.
    """
    config = check_options(model, options)
    try:
        _check_media_folder(config.media.allowed_local_media_path)
    except ConfigError as error:
        raise as_given(error, options) from None
    return config


def check_options(model: str | os.PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
    """Return the config of an engine that may run on another machine, whose folders for media are not looked for here.

    Raises:
        ConfigError: see `make_config`.
    """
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        reason = f"model must be the path of a checkpoint's folder or a model's name on the Hub, not {short_repr(model)}"
        raise ConfigError(reason, param="model")
    values = translate_options(model, options, [f.name for f in fields(EngineConfig)][1:])
    if isinstance(values.get("media"), Mapping):
        values["media"] = make_policy(values["media"])
    path = model if isinstance(model, str) else os.path.join(os.curdir, model)  # a Path is never a name on the Hub
    try:
        config = EngineConfig(path, **values)
    except ConfigError as error:
        raise as_given(error, options) from None
    return replace(config, limit_mm_per_prompt=dict(config.limit_mm_per_prompt))


def _check_media_folder(folder: object) -> None:
    if folder is not None and not (isinstance(folder, str | os.PathLike) and os.path.isdir(folder)):
        raise _error("allowed_local_media_path", folder, "is not a folder; create it, or give another one")


def make_policy(options: Mapping[str, Any]) -> MediaPolicy:
    """Make a MediaPolicy from a mapping. Raise ConfigError for an unknown field; it names the nearest known one."""
    names = [f.name for f in fields(MediaPolicy)]
    for name in options:
        if name not in names:
            raise ConfigError(f"unknown option {short_repr(name)} of media; {hint(name, names)}", param="media")
    return MediaPolicy(**options)


def check_max_model_len(max_model_len: int | None, limit: int) -> int:
    """Return `max_model_len`, or the model's limit if it is None. Raise ConfigError if it is above the limit."""
    if max_model_len is not None and max_model_len > limit:
        reason = f"<<param=>>{max_model_len} is above the model's max_position_embeddings={limit}; lower it"
        raise ConfigError(reason, param="max_model_len")
    return max_model_len or limit


def cache_budget(config: EngineConfig, device: torch.device) -> int:
    """Return the bytes that the KV cache may take. On a GPU, `memory.resolve_cache_memory` must have set them."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    assert device.type == "cpu", "on a GPU, memory.resolve_cache_memory sets kv_cache_memory_bytes"
    return min(_DEFAULT_CACHE_BYTES, host_memory() // 4) // config.tensor_parallel_size


def host_memory() -> int:
    """Return the bytes of this machine's memory, or of the limit of the container that this process runs in."""
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # no control groups of this version, or "max"
            num_bytes = min(num_bytes, int(limit.read_text("ascii")))
    return num_bytes


def _error(name: str, value: object, reason: str) -> ConfigError:
    """Return an error about an option, or about one of its entries as in "limit_mm_per_prompt['image']"."""
    param, bracket, entry = name.partition("[")
    option = f"<<param>>[{entry}=" if bracket else "<<param=>>"
    return ConfigError(f"{option}{short_repr(value)} {reason}", param=param, value=short_repr(value))


def _check_choice(name: str, value: object, valid: tuple[str | None, ...]) -> None:
    if not isinstance(value, str | None) or value not in valid:
        raise _error(name, value, f"must be one of {', '.join(map(str, valid))}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _expand_folder(name: str, value: object) -> str:
    """Return the path with `~` expanded; the folder need not exist yet."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str) or not os.fspath(value):
        raise _error(name, value, "must be the path of a folder")
    if "\0" in os.fspath(value) or (os.path.exists(path := os.path.expanduser(value)) and not os.path.isdir(path)):
        raise _error(name, os.fspath(value), "is not a folder; give a folder, or a path where one can be created")
    return path


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _error(name, value, "must be an integer, 1 or above")
    if value > _LARGEST:
        raise _error(name, value, f"must be at most {_LARGEST}")
