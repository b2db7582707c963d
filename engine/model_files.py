"""The JSON files of a checkpoint."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

import torch

from ..callers.errors import MAX_DEPTH, CheckpointError, ConfigError, SensoriumError, short_repr, suggestion, typed
from ..checkpoints.config import SECTIONS, check_parts, get_text_config, unnest
from ..checkpoints.external import ExternalPart, ExternalWeights, external_parts, find_part_folder, lacks_weights
from ..checkpoints.files import open_regular, read_json
from ..checkpoints.folder import SAVED_WEIGHTS, WEIGHTS_END, CheckpointFolder
from ..checkpoints.gguf.reader import SUFFIX
from ..checkpoints.weight_files import ADAPTER_WEIGHTS, file_headers, read_headers
from ..kernels.dispatch import multiplies_fast
from ..mm.hashing import digest
from ..models.layers.vector_head import VECTOR_HEAD
from ..models.registry import CHECKPOINT_LAYOUTS, architecture_key, architectures_of, find_architecture
from ..models.vllm_architectures import translate_architecture
from ..processors.files import ADAPTER, POOLING, ProcessorFiles, find_template, read_preprocessors
from ..processors.sentence_transformers import (
    SETTINGS,
    SentenceTransformersConfig,
    read_pooling_modes,
    read_sentence_transformer,
    weights_of,
)

SHIPPED = ("tiny-vl", "tiny-asr")
"""Names of the models in the package's assets."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TABLE = re.compile(r"\bembed_tokens(\.base_layer|\.modules_to_save(\.default)?)?\.weight$")
TASK_ADAPTERS = "adapters"  # folder of jina-embeddings-v4
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
)
SECTION_FILES = ("llm_config", "vit_config")
"""Sections that a checkpoint may keep in a file of their own instead of config.json."""

_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
_LEVELS_ABOVE = 3  # folders above a path in which its checkpoint is looked for
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json")
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
_QUANTIZATION = ("quantization_config", "compression_config", "quantization")  # the last one is MLX's


@dataclass(frozen=True)
class ModelFiles:
    """The JSON files of a checkpoint. A file that does not exist is an empty mapping.

    Args:
        fingerprint: hash of config.json and of names, sizes and times of the weight files. It tells whether a folder changed
            while an engine runs; `content_digest` tells two checkpoints apart.
        remote_code: names the file that asks for code of the checkpoint, which is never run; empty if none does.
        adapter: folder of an adapter that is merged into the weights.
        external: parts whose weights are in other folders.
        sentence_transformers: settings of a folder in the layout of sentence-transformers, else None.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    processors: ProcessorFiles
    fingerprint: str
    remote_code: str = ""
    adapter: Path | None = None
    external: tuple[ExternalWeights, ...] = ()
    sentence_transformers: SentenceTransformersConfig | None = None

    @property
    def root(self) -> Path:
        """The folder that a caller gives: `path`, or the one whose modules.json names it."""
        return self.path if self.sentence_transformers is None else self.sentence_transformers.folder

    @property
    def is_cross_encoder(self) -> bool:
        """True if sentence-transformers wrote the checkpoint of a classification head."""
        return "sentence_transformers" in self.config or (self.root / SETTINGS).is_file()

    @property
    def text_config(self) -> dict[str, Any]:
        """The decoder's config, which is nested in config.json or is config.json itself."""
        return dict(get_text_config(self.config))

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """The quantization_config of config.json or of one of its sections, None for a checkpoint that is not quantised."""
        sections, keys = [self.config, *(part for part in self.config.values() if isinstance(part, Mapping))], _QUANTIZATION
        values = (part.get(key) for part in sections for key in keys)
        return next((section for section in values if section and isinstance(section, dict)), None)

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or architectures_of(self.config)
        if not (isinstance(names, list) and names and isinstance(names[0], str)):
            what = f'"architectures" is {short_repr(names)}' if "architectures" in self.config else 'it lacks "architectures"'
            reason = f"{self.path / 'config.json'} names no architecture: {what}"
            how = _checkpoint_near(self.path) or "it must be a list with the name of the model's class"
            raise CheckpointError(f"{reason}; {how}")
        return architecture_key(names[0], self.config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """EOS tokens of generation_config.json, else of config.json; may be empty."""
        for source in (self.generation_config, self.config, self.text_config):
            ids = source.get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (int(ids),)
        return ()

    @property
    def tokenizer_folder(self) -> Path:
        """The folder with the tokenizer: the adapter's if it ships one."""
        in_adapter = self.adapter is not None and any((self.adapter / name).is_file() for name in _TOKENIZERS)
        return self.adapter if in_adapter and self.adapter is not None else self.path

    def find_template(self) -> str | None:
        """Return the chat template of the adapter or, if it ships none, of the checkpoint."""
        template = None if self.adapter is None else find_template(self.adapter)
        return find_template(self.path) if template is None else template

    def content_digest(self) -> str:
        """Return a hash of config.json and of all bytes of the weight files, which takes about 1 s per 2 GB.

        Raises:
            CheckpointError: a weight file cannot be read.
        """
        files, names = self._weights()
        with ThreadPoolExecutor(min(8, len(files) or 1), "sensorium-digest") as pool:
            contents = list(pool.map(_file_digest, files))
        return digest("sensorium.content", self.config, names, contents)

    def processing_digest(self) -> str:
        """Return a hash of the JSON that says how items are processed. Copies of a checkpoint have the same one."""
        files = self.processors
        return digest("sensorium.processing", self.config, files.image, files.video, files.audio, files.generation)

    def stat_digest(self) -> str:
        """Return a hash of config.json and of what only a new write of a weight file gives: inode and time of its change.

        Unlike the time of modification, the time of change cannot be set.
        """
        stats = [file.stat() for file in self._weights()[0]]
        keys = [(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for status in stats]
        return digest("sensorium.stat", self.config, keys)

    def _weights(self) -> tuple[list[Path], list[str]]:
        """Return all weight files, and the names of those in the checkpoint's folder."""
        model = CheckpointFolder(self.path).gguf
        paths = [*self.path.glob(f"**/*{WEIGHTS_END}"), *self.path.glob(SAVED_WEIGHTS)] if model is None else model.files
        files = sorted(file for file in paths if file.is_file())
        names = [str(file.relative_to(self.path if model is None else model.path.parent)) for file in files]
        if self.adapter is not None:
            files += [self.adapter / name for name in (ADAPTER, ADAPTER_WEIGHTS)]
        return files + [file for _, folder in self.external for file in sorted(folder.glob(f"*{WEIGHTS_END}"))], names

    def dtype(self, name: str, device: torch.device | None = None) -> torch.dtype:
        """Return the named dtype, or for "auto" the checkpoint's, which any section may state; float32 if none does.

        `device`: "auto" is float32 on a CPU without fast products in the checkpoint's dtype.
        """
        sections = (part for name in sorted(SECTIONS) if isinstance(part := self.config.get(name), Mapping))
        sources = (self.config, self.text_config, *sections)
        names = (source.get(key) for source in sources for key in ("dtype", "torch_dtype"))
        requested = name
        if name == "auto":
            name = next((str(n).removeprefix("torch.") for n in names if n), "float32")
        if name not in DTYPES:
            reason = f"the checkpoint's dtype {short_repr(name)} is not supported; pass <<dtype=>> one of {', '.join(DTYPES)}"
            raise ConfigError(reason, param="dtype")
        slow = requested == "auto" and device is not None and device.type == "cpu" and not multiplies_fast(DTYPES[name])
        return torch.float32 if slow else DTYPES[name]


def load_model_files(
    folder: str | os.PathLike[str], adapter: str | None = None, hf_overrides: Mapping[str, Any] = MappingProxyType({})
) -> ModelFiles:
    """Read a checkpoint's JSON files. `adapter`, `hf_overrides`: as in EngineConfig; the adapter is a folder.

    Raises:
        ConfigError: the folder or its config.json does not exist, or config.json is not valid.
        CheckpointError: a file is not a JSON object, or is nested too deeply.
    """
    path = Path(folder)
    if path.suffix != SUFFIX and not os.path.isdir(path):  # False for a name that no folder can have
        if os.path.isfile(path):
            how = "give a checkpoint's folder or a GGUF file; `sensorium pull ORG/NAME` downloads a model from the Hub"
            how = _checkpoint_near(path) or how
            raise ConfigError(f"{short_repr(os.fspath(folder), 200)} is a file, not a checkpoint; {how}")
        how = "give a checkpoint's folder, or a name that `hf download` takes, as in Qwen/Qwen2.5-VL-3B-Instruct"
        address = _ADDRESS.match(os.fspath(folder))
        near = suggestion(os.fspath(folder), SHIPPED)
        how = f"give the model's name, {address[1]}" if address else f"{near} Or {how}" if near else how
        raise ConfigError(f"{short_repr(os.fspath(folder), 200)} is not a folder; {how}")
    vector_settings = None if path.suffix == SUFFIX else read_sentence_transformer(path)
    if vector_settings is not None:
        path = path / vector_settings.transformer if vector_settings.transformer else path
    checkpoint = CheckpointFolder(path)
    contents, model = {name: checkpoint.json(name) for name in JSON_FILES}, checkpoint.gguf
    config = _read_config(checkpoint)
    remote_code = [
        f"{name} asks for remote code ({key})"
        for name, content in contents.items()
        for part in _objects(name, content)
        for key in ("auto_map", "trust_remote_code")
        if part.get(key)
    ]
    if not config:
        what = "an empty config.json" if (path / "config.json").is_file() else "no config.json"
        near = _checkpoint_near(path)
        raise ConfigError(f"{path} has {what}; it is not a checkpoint in the Hub's layout{near and f'; {near}'}")
    overridden = translate_architecture(_override(config, hf_overrides), config)
    config, external = _find_parts(path, unnest(overridden))
    if adapter is not None:
        config = _with_vocabulary(config, Path(adapter))
    check_parts(config)
    modes = read_pooling_modes(checkpoint.json(POOLING)) if vector_settings is None else vector_settings.pooling
    if modes:
        config = {**config, "pooling_mode": "+".join(modes)}
    external = (*external, *(() if vector_settings is None else _vector_weights(vector_settings)))
    if adapter is None and "task_names" in config and (path / TASK_ADAPTERS / ADAPTER).is_file():
        adapter = str(path / TASK_ADAPTERS)
    in_adapter = adapter is not None and any(Path(adapter, name).is_file() for name in _PREPROCESSORS)
    generation = contents["generation_config.json"]
    processors = read_preprocessors(adapter if adapter is not None and in_adapter else checkpoint)
    processors = replace(processors, config=config, generation=generation, folder=path)
    stored = [*path.glob(f"*{WEIGHTS_END}"), *path.glob(SAVED_WEIGHTS)] if model is None else model.files
    others = [*([] if adapter is None else [Path(adapter)]), *(subfolder for _, subfolder in external)]
    files = sorted([*stored, *(file for subfolder in others for file in subfolder.glob(f"*{WEIGHTS_END}"))])
    weights = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    fingerprint = digest("sensorium.model", config, weights)
    code = next(iter(remote_code), "")
    merged = None if adapter is None else Path(adapter)
    return ModelFiles(path, config, generation, processors, fingerprint, code, merged, external, vector_settings)


def _with_vocabulary(config: dict[str, Any], adapter: Path) -> dict[str, Any]:
    """Return a config with the number of token embeddings that an adapter with other tokens has."""
    file, text = adapter / ADAPTER_WEIGHTS, get_text_config(config)
    headers = file_headers(file) if file.is_file() else {}
    tables = (tensor.shape[0] for name, tensor in headers.items() if _TABLE.search(name) and tensor.ndim == 2)
    rows = next(tables, text.get("vocab_size"))
    if rows == text.get("vocab_size"):
        return config

    def changed(part: Mapping[str, Any]) -> dict[str, Any]:
        nested = {key: changed(value) for key, value in part.items() if isinstance(value, Mapping)}
        return {**part, **nested, **({"vocab_size": rows} if part is text else {})}

    return changed(config)


def _vector_weights(settings: SentenceTransformersConfig) -> Iterator[ExternalWeights]:
    """Yield the parts of `VectorHead` with the folders of their weights."""
    for index, step in enumerate(settings.head):
        folder = weights_of(step)
        if folder is not None:
            yield ExternalPart("", "", f"{VECTOR_HEAD}.layers.{index}."), folder


def _checkpoint_near(path: Path) -> str:
    """Return advice that names the checkpoint that a file or a part of it belongs to, or that a folder contains; "" if none.

    The folders of a model in the Hub's cache hold it below "snapshots".
    """
    path = Path(os.path.abspath(path))
    above = next((folder for folder in list(path.parents)[:_LEVELS_ABOVE] if _names_architecture(folder)), None)
    if above is not None:
        return f"{path.name} is in the checkpoint {above}; give that folder"
    below = (file.parent for pattern in ("*/config.json", "snapshots/*/config.json") for file in sorted(path.glob(pattern)))
    inner = next((folder for folder in below if _names_architecture(folder)), None)
    return "" if inner is None else f"it contains the checkpoint {inner}; give that folder"


def _names_architecture(folder: Path) -> bool:
    try:
        config = read_json(folder / "config.json")
        return bool(config.get("architectures") or architectures_of(config))
    except SensoriumError:
        return False


@dataclass(frozen=True)
class WholeConfig(Mapping[str, Any]):
    """A config that replaces config.json: the result of an `hf_overrides` function."""

    values_by_key: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.values_by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)


def _as_json(value: Any) -> Any:
    """Return a value with the types of JSON: messages between processes turn lists into tuples."""
    if isinstance(value, Mapping):
        return {key: _as_json(inner) for key, inner in value.items()}
    return [_as_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def _override(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with other values, merged in nested objects. A WholeConfig replaces the config."""
    if isinstance(overrides, WholeConfig):
        return dict(_as_json(overrides))
    overrides = _as_json(overrides)
    merged = {**config, **overrides}
    for name, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(config.get(name), Mapping):
            merged[name] = _override(config[name], value)
    return merged


class _Config(dict[str, Any]):
    """A mapping of config.json whose keys are also attributes, like transformers' PretrainedConfig."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"config.json has no {name!r}; read it with config.get({name!r})")
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def to_dict(self) -> dict[str, Any]:
        return self


def call_overrides(folder: str, function: Callable[[Any], Any]) -> WholeConfig:
    """Call a function with the checkpoint's config, which its result replaces. Raise ConfigError if that is not a config."""

    def wrap(value: Any) -> Any:
        return _Config({key: wrap(inner) for key, inner in value.items()}) if isinstance(value, Mapping) else value

    config = wrap(load_model_files(folder).config)
    named = "architectures" in config
    result = function(config)
    result = config if result is None else result
    if not isinstance(result, Mapping):
        raise ConfigError(f"<<param>> must return the config or None, not {typed(result)}", param="hf_overrides")
    if named and "architectures" not in result:
        raise ConfigError("<<param>> returns a config without architectures; return all of the config", param="hf_overrides")
    return WholeConfig(dict(result))


def local_folder(path: Path, name: str) -> Path | None:
    """Return the folder that a checkpoint's config.json names: in it, beside it, or in the Hub's cache; None without it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if (folder := find_part_folder(path, name)) is not None:
        return folder
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _find_parts(path: Path, config: dict[str, Any]) -> tuple[dict[str, Any], tuple[ExternalWeights, ...]]:
    """Return config.json with the sections that it names in other folders, and the parts whose weights are there."""
    external: list[ExternalWeights] = []
    for part, name in external_parts(config):
        folder = local_folder(path, name)
        if folder is None:
            continue
        if not config.get(part.section):
            config = {**config, part.section: dict(get_text_config(read_json(folder / "config.json")))}
        if lacks_weights(read_headers(path), part):
            external.append((part, folder))
    return config, tuple(external)


def _file_digest(file: Path) -> str:
    try:
        with open_regular(file) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror or error})") from None


def _read_config(checkpoint: CheckpointFolder) -> dict[str, Any]:
    """Return config.json, or the config of a publisher's layout converted to the Hub's; an empty one if there is none.

    If both exist, the weight files decide: a folder with `consolidated*` and without `model*` has the publisher's layout.
    Headers of GGUF files are converted, too.
    """
    if checkpoint.gguf is not None:
        from ..checkpoints.gguf.tensors import hub_config

        return hub_config(checkpoint.gguf)
    hub = checkpoint.json("config.json")
    names = {file.name.partition(".")[0] for file in checkpoint.path.glob(f"*{WEIGHTS_END}*")}
    if hub and not (
        any(name.startswith("consolidated") for name in names) and not any(name.startswith("model") for name in names)
    ):
        beside = {name: checkpoint.json(f"{name}.json") for name in SECTION_FILES if not hub.get(name)}
        return {**hub, **{name: section for name, section in beside.items() if section}}
    for name, layout in CHECKPOINT_LAYOUTS.items():
        content = checkpoint.json(name)
        if content:
            kind, config = resolve(layout.reader)(content, checkpoint.json(layout.tokenizer_file))
            return {**config, "architectures": [layout.architectures[kind]]}
    return hub


def nested_adapters(folder: Path) -> list[str]:
    """Return the folders below a checkpoint's whose adapters its model uses; none if no model of ours runs it.

    Settings of adapters (adapter_config.json) must be there already.
    """
    try:
        files = load_model_files(folder)
        info = resolve(find_architecture(files.architecture).processing)
    except SensoriumError:
        return []
    places = [subfolder for subfolder in getattr(info, "adapter_folders", {}).values() if subfolder != "."]
    return places if files.adapter is None else [files.adapter.name, *places]


def resolve(name: str) -> Any:
    """Import `"package.module:attribute"`. Raise ConfigError if that fails, as it may for another package's classes."""
    try:
        return resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name} cannot be imported ({type(error).__name__}: {error}); install what it needs") from error


def _objects(name: str, content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield all objects of a JSON file. Raise CheckpointError if they nest too deeply for the recursion of later readers."""
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        yield from (part for part in level if isinstance(part, dict))
        inner = (nested for part in level for nested in (part.values() if isinstance(part, dict) else part))
        level = [nested for nested in inner if isinstance(nested, dict | list)]
        if not level:
            return
    raise CheckpointError(f"{name} nests objects and lists more than {MAX_DEPTH} deep; download it again")
