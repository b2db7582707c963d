"""The engine's options, and the JSON files of a checkpoint, read and checked once. Knows no family."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..kernels.dispatch import overrides
from ..kernels.kv8 import CODES
from ..mm.errors import CheckpointError, ConfigError, hint
from ..mm.hashing import MAX_DEPTH, digest
from ..mm.media.policy import MediaPolicy
from ..mm.registry import ARCHITECTURES, LAYOUTS, row_name
from ..models.config import check_parts, text_of
from ..processors.files import ProcessorFiles, read_json, read_preprocessors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_CACHE_BYTES = 4 << 30
_POSITIVE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "media_workers",
    "mm_processor_cache_bytes",
    "max_encoder_tokens",
    "encoder_cache_dir_bytes",
)
_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
)


@dataclass(frozen=True)
class EngineConfig:
    """Every option of `LLM`, checked when made.

    Args:
        model: folder of a checkpoint as the Hub ships it.
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        device: "auto" (a GPU if there is one), "cpu", "cuda" (the first) or "cuda:N".
        max_model_len: tokens of prompt and answer together; None: all positions of the model that the cache has room for.
        max_num_seqs: sequences computed together at most.
        max_num_batched_tokens: rows of one step at most; longer prompts are computed in pieces.
        block_size: tokens per block of the key/value cache.
        kv_cache_memory_bytes: size of the cache; None: what `max_num_seqs` full sequences need, at most 4 GiB or a
            quarter of the memory on a CPU; on a GPU, of `gpu_memory_fraction` of what is free, all that weights, the encoder
            cache and the largest steps leave.
        gpu_memory_fraction: see above, in (0, 1].
        limit_mm_per_prompt: modality -> items one prompt may hold.
        mm_processor_kwargs: options of the family's own preprocessing.
        seed: from which sequences without a seed derive theirs.
        generation_config: "auto" uses the checkpoint's sampling defaults where none are given, "none" does not.
        media_workers: threads that decode and preprocess beside the engine's steps.
        media_device: "cpu", "cuda" or "cuda:N": where decoded media are resized and scaled, or made spectra of. A worker holds
            a picture there, or some 64 MiB of a clip's frames, and what becomes of it, which it brings back to the host.
        media: limits of the media gate, a `mm.media.policy.MediaPolicy` or a mapping of its fields.
        mm_processor_cache_bytes: processed items that are kept for later requests.
        trust_uuid: a uuid in `multi_modal_uuids` stands for its content, which is then not hashed; only where all
            callers are one.
        enable_prefix_caching: keep the keys and values of finished sequences for later ones that begin alike.
        prefix_cache_bytes: of keys and values kept for nobody in particular; None: as far as the cache reaches.
        max_encoder_tokens: rows that encoders make in one step; an item of more is encoded alone.
        encoder_cache_bytes: encoder rows that are held; None: what the largest item of the model needs four times,
            at least 128 MiB.
        encoder_cache_dir: folder where encoder rows outlive the process, `~` is the user's own; None for none.
        encoder_cache_dir_bytes: size of that folder; the least recently used rows go first.
        quarantine_seconds: how long an item that broke the encoder is refused, to the tenant that sent it.
        quantization: None; "int8": weights and activations of linear layers as 8-bit integers; "fp8": as 8-bit floats on
            GPUs that multiply them, elsewhere the weights alone.
        kv_cache_dtype: "auto" (that of the model); "int8" or "fp8" (also "fp8_e4m3"): keys and values are kept in 8 bits with
            a scale for each token and head, in about half the memory of 16 bits; not of latent rows, and not for
            transformers' own classes.
        kernels: which backend runs an op of this engine, "attention=reference,rms_norm=triton", or "torch" for all that have
            it; the rest is chosen by device, dtype and shape (`sensorium doctor` prints what).
        async_scheduling: start a decode step before the tokens of the one before are on the host, and encode items beside
            steps of those that do not need them; None: on a GPU, where it hides what the host does between two steps.
        batch_invariant: the same request gives the same bits whatever runs beside it, however it is cut; slower.

    Raises:
        ConfigError: a value outside its limits.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
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
    enable_prefix_caching: bool = True
    prefix_cache_bytes: int | None = None
    max_encoder_tokens: int = 4096
    encoder_cache_bytes: int | None = None
    encoder_cache_dir: str | None = None
    encoder_cache_dir_bytes: int = 4 << 30
    quarantine_seconds: float = 300.0
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kernels: str = ""
    async_scheduling: bool | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", *DTYPES))
        _one_of("generation_config", self.generation_config, ("auto", "none"))
        _one_of("quantization", self.quantization, (None, "int8", "fp8"))
        if self.kv_cache_dtype == "fp8_e4m3":  # vLLM's other name of it
            object.__setattr__(self, "kv_cache_dtype", "fp8")
        _one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", *CODES))
        for name in _POSITIVE:
            _positive(name, getattr(self, name))
        if not isinstance(self.media, MediaPolicy):
            raise ConfigError(f"media={self.media!r} must be a MediaPolicy or a mapping of its fields")
        for name in ("max_model_len", "kv_cache_memory_bytes", "prefix_cache_bytes", "encoder_cache_bytes"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if not _is_number(self.gpu_memory_fraction) or not 0 < self.gpu_memory_fraction <= 1:
            raise ConfigError(f"gpu_memory_fraction={self.gpu_memory_fraction!r} must be a number above 0 and at most 1")
        if not _is_number(self.quarantine_seconds) or not 0 <= self.quarantine_seconds < math.inf:
            raise ConfigError(f"quarantine_seconds={self.quarantine_seconds!r} must be a number of seconds, 0 or above")
        for name in ("trust_uuid", "enable_prefix_caching", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        _check_kernels(self.kernels)
        if not isinstance(self.async_scheduling, bool | None):
            raise ConfigError(f"async_scheduling={self.async_scheduling!r} must be True, False or None")
        _device_name("device", self.device, ("auto", "cpu"))
        _device_name("media_device", self.media_device, ("cpu",))
        if self.encoder_cache_dir is not None:
            folder = _folder("encoder_cache_dir", self.encoder_cache_dir)
            object.__setattr__(self, "encoder_cache_dir", folder)  # a frozen dataclass is normalised once, here
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed={self.seed!r} must be an integer")
        for name in ("limit_mm_per_prompt", "mm_processor_kwargs"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a mapping")
        for modality, limit in self.limit_mm_per_prompt.items():
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
                raise ConfigError(f"limit_mm_per_prompt[{modality!r}]={limit!r} must be an integer, 0 or above")

    @property
    def overlaps(self) -> bool:
        """Whether a step may start before the one before is looked at, and items are encoded beside steps."""
        return self.torch_device.type == "cuda" if self.async_scheduling is None else self.async_scheduling

    @property
    def torch_device(self) -> torch.device:
        """With its number, since a thread's own GPU is another one; ConfigError for a device that is not there."""
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        return _device("device", auto if self.device == "auto" else self.device)

    @property
    def torch_media_device(self) -> torch.device:
        """Likewise of `media_device`."""
        return _device("media_device", self.media_device)


def _device_name(option: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or (value not in known and not re.fullmatch(r"cuda(:(0|[1-9]\d?))?", value)):
        names = ", ".join(f"'{name}'" for name in (*known, "cuda"))
        raise ConfigError(f"{option}={value!r} must be {names} or 'cuda:N'")


def _device(option: str, name: str) -> torch.device:
    if name == "cpu":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ConfigError(f"{option}={name!r}: torch sees no GPU; use {option}='cpu' or install a CUDA build of torch")
    device = torch.device("cuda:0" if name == "cuda" else name)
    if device.index >= torch.cuda.device_count():
        raise ConfigError(f"{option}={name!r}: torch sees {torch.cuda.device_count()} GPUs, the first is cuda:0")
    return device


def _check_kernels(wanted: str) -> None:
    if not isinstance(wanted, str):
        raise ConfigError(f"kernels={wanted!r} must be text like 'attention=reference,rms_norm=triton', or 'torch' for all ops")
    try:
        overrides(wanted)
    except ValueError as error:
        raise ConfigError(f"kernels: {error}") from None


def make_config(model: str | os.PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
    """From keyword arguments; None for a mapping means an empty one. ConfigError names the nearest option of unknown ones."""
    known = [f.name for f in fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; {hint(name, known[1:])}")
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        raise ConfigError(f"model is the path of a checkpoint's folder, not {model!r}")
    given = {k: v for k, v in options.items() if v is not None}
    if isinstance(given.get("media"), Mapping):
        given["media"] = make_policy(given["media"])
    config = EngineConfig(os.fspath(model), **given)
    return replace(config, limit_mm_per_prompt=dict(config.limit_mm_per_prompt))


def make_policy(options: Mapping[str, Any]) -> MediaPolicy:
    """From a mapping; ConfigError names the nearest field of unknown ones."""
    known = [f.name for f in fields(MediaPolicy)]
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r} of media; {hint(name, known)}")
    return MediaPolicy(**options)


@dataclass(frozen=True)
class ModelFiles:
    """The raw JSON of one checkpoint; files it does not have are empty."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    processors: ProcessorFiles
    fingerprint: str

    @property
    def text_config(self) -> dict[str, Any]:
        """The decoder's part: nested in new checkpoints, flat in old ones."""
        return dict(text_of(self.config))

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or []
        if not names or not isinstance(names, list):
            raise ConfigError(f'{self.path / "config.json"} names no architecture; it needs an "architectures" list')
        return row_name(str(names[0]), self.config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """generation_config.json's, else config.json's; none is allowed."""
        for source in (self.generation_config, self.config, self.text_config):
            ids = source.get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (int(ids),)
        return ()

    def dtype(self, asked: str) -> torch.dtype:
        """`asked`, or for "auto" the checkpoint's own (float32 when it says nothing)."""
        names = (source.get(key) for source in (self.config, self.text_config) for key in ("dtype", "torch_dtype"))
        name = asked if asked != "auto" else next((str(n).removeprefix("torch.") for n in names if n), "float32")
        if name not in DTYPES:
            raise ConfigError(f"the checkpoint's dtype {name!r} is not served; pass dtype= one of {', '.join(DTYPES)}")
        return DTYPES[name]


def load_model_files(folder: str | os.PathLike[str]) -> ModelFiles:
    """Read a checkpoint's JSON files.

    Raises:
        ConfigError: no such folder, no config.json, or one that asks for remote code or describes what no model is.
        CheckpointError: a file that is not a JSON object, or nests without end.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            f"{os.fspath(folder)!r} is not a folder; give the path of a downloaded checkpoint (hf download NAME --local-dir D)"
        )
    raw = {name: read_json(path / name) for name in _JSON_FILES}
    config = raw["config.json"] or _own_layout(path)
    for name, content in raw.items():
        asked = [key for part in _parts(name, content) for key in ("auto_map", "trust_remote_code") if part.get(key)]
        if asked and not _is_ours(config):  # of which nothing but the JSON is needed
            raise ConfigError(
                f"{name} asks for remote code ({asked[0]}), which is never run; "
                "take a checkpoint whose architecture is in docs/models.md or in transformers"
            )
    if not config:
        what = "an empty config.json" if (path / "config.json").is_file() else "no config.json"
        raise ConfigError(f"{path} has {what}; it is not a checkpoint as the Hub ships it")
    check_parts(config)
    if config.get("quantization_config"):
        raise ConfigError(f"{path / 'config.json'} has a quantization_config; quantised checkpoints are not supported yet")
    processors = replace(read_preprocessors(path), config=config)
    weights = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in path.glob("*.safetensors"))
    return ModelFiles(path, config, raw["generation_config.json"], processors, digest("sensorium.model", config, weights))


def _own_layout(path: Path) -> dict[str, Any]:
    """The config of a checkpoint in its publisher's own layout as the Hub's config.json, empty where it is in none."""
    for name, layout in LAYOUTS.items():
        content = read_json(path / name)
        if content:
            kind, config = resolve(layout.reader)(content)
            return {**config, "architectures": [layout.rows[kind]]}
    return {}


def resolve(name: str) -> Any:
    """`"module:attribute"` below the package."""
    module, _, attribute = name.partition(":")
    package = __name__.rsplit(".", 2)[0]
    return getattr(import_module(f".{module}", package), attribute)


def check_max_model_len(asked: int | None, most: int) -> int:
    """ConfigError when more is asked for than the model has positions."""
    if asked is not None and asked > most:
        raise ConfigError(f"max_model_len={asked} is above the model's max_position_embeddings={most}")
    return asked or most


def cache_budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the key/value cache may take; for a GPU they are in the options once `memory.settle` has seen them."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    assert device.type == "cpu", "what is free on a GPU is looked at once"
    return min(_DEFAULT_CACHE_BYTES, _host_bytes() // 4)


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _is_ours(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and row_name(str(names[0]), config) in ARCHITECTURES


def _parts(name: str, content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All objects of a JSON file; CheckpointError where they nest deeper than whatever reads them later may recurse."""
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        yield from (part for part in level if isinstance(part, dict))
        inner = (one for part in level for one in (part.values() if isinstance(part, dict) else part))
        level = [one for one in inner if isinstance(one, dict | list)]
        if not level:
            return
    raise CheckpointError(f"{name} nests objects and lists more than {MAX_DEPTH} deep; download it again")


def _one_of(name: str, value: object, known: tuple[str | None, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(str, known))}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _folder(name: str, value: object) -> str:
    """Its path with `~` expanded; it need not be there yet."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str) or not os.fspath(value):
        raise ConfigError(f"{name}={value!r} must be the path of a folder")
    if "\0" in os.fspath(value) or (os.path.exists(path := os.path.expanduser(value)) and not os.path.isdir(path)):
        raise ConfigError(f"{name}={os.fspath(value)!r} is not a folder; name one, or one that can be made")
    return path


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be an integer, 1 or above")
