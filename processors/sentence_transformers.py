"""Folders in the layout of sentence-transformers: what it does to a text before the model, and to hidden states after it.

`modules.json` lists the modules: a transformer, a pooling, and layers on the pooled vector. Facts are those of
sentence-transformers 6.2 (https://github.com/huggingface/sentence-transformers), which writes and reads these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..callers.errors import CheckpointError, ConfigError, short_repr
from ..checkpoints.files import read_file, read_json
from .files import MODULES

TRANSFORMER_CONFIGS = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the transformer module's settings, from the newest to the oldest. The first that exists counts."""
SETTINGS = "config_sentence_transformers.json"
_LEGACY_MODES = {  # in the order in which vectors of several modes are joined
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_VECTOR = "sentence_embedding"


@dataclass(frozen=True)
class VectorStep:
    """A layer on the pooled vector.

    Args:
        layer_type: "Dense", "LayerNorm" or "Normalize".
        config: its config.json.
        folder: holds its weights.
    """

    layer_type: str
    config: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class SentenceTransformersConfig:
    """The settings of a folder in this layout. The defaults are those of a folder without `modules.json`.

    Args:
        folder: holds modules.json.
        transformer: name of the folder of config.json and weights in it; empty: `folder` itself.
        max_tokens: texts are cut to this many tokens, special tokens included; None: to the tokenizer's maximum.
        lower_cases: texts are lower-cased.
        pooling: modes in sentence-transformers' words; the vectors of several are joined. Empty: the model's own.
        include_prompt: False leaves the tokens of the prompt out of the pooling.
        steps: layers on the pooled vector, in order.
        prompts: name -> text put before an input. default_prompt: name of the one that is used if a call names none.
        similarity: "cosine", "dot", "euclidean" or "manhattan".
        truncate_dim: vectors are cut to this length and not scaled again; None: they are not cut.
    """

    folder: Path
    transformer: str = ""
    max_tokens: int | None = None
    lower_cases: bool = False
    pooling: tuple[str, ...] = ()
    include_prompt: bool = True
    steps: tuple[VectorStep, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"
    truncate_dim: int | None = None

    @property
    def normalizes(self) -> bool:
        """True if vectors have length 1 at the end."""
        return bool(self.steps) and self.steps[-1].layer_type == "Normalize"

    @property
    def head(self) -> tuple[VectorStep, ...]:
        """The steps before the last scaling to length 1, which a request may leave out."""
        return self.steps[:-1] if self.normalizes else self.steps


def read_sentence_transformer(folder: Path) -> SentenceTransformersConfig | None:
    """Read the settings of a folder; None if it has no list of modules.

    Raises:
        CheckpointError: a file is not valid.
        ConfigError: a module is not supported, or stores its weights as pickle only.
    """
    modules = _read_modules(folder / MODULES)
    if not modules:
        return None
    settings = read_json(folder / SETTINGS)
    first, *others = modules
    kind, name = _kind(first), _folder_name(first)
    if kind in ("StaticEmbedding", "BoW", "WordEmbeddings", "Router", "Asym", "MLMTransformer"):
        reason = (
            f"{folder / MODULES} begins with the module {kind}, which is not a transformer; give a checkpoint of a transformer"
        )
        raise ConfigError(reason)
    transformer = next((config for file in TRANSFORMER_CONFIGS if (config := read_json(folder / name / file))), {})
    max_tokens = transformer.get("max_seq_length")
    if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens > 0):
        raise CheckpointError(f"max_seq_length of {folder} is {short_repr(max_tokens)}; it must be a positive integer or null")
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"prompts in {folder / SETTINGS} must map names to texts")
    if default is not None and default not in prompts:
        raise CheckpointError(f"default_prompt_name in {folder / SETTINGS} is {short_repr(default)}, which prompts do not have")
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in _SIMILARITIES:
        names = ", ".join(_SIMILARITIES)
        raise ConfigError(f"similarity_fn_name in {folder / SETTINGS} is {short_repr(similarity)}; known are {names}")
    truncate_dim = settings.get("truncate_dim")
    if truncate_dim is not None and not (type(truncate_dim) is int and truncate_dim > 0):
        reason = f"truncate_dim in {folder / SETTINGS} is {short_repr(truncate_dim)}; it must be a positive integer or null"
        raise CheckpointError(reason)
    pooling, include_prompt, steps = _read_layers(folder, others)
    return SentenceTransformersConfig(
        folder,
        name,
        max_tokens,
        bool(transformer.get("do_lower_case")),
        pooling,
        include_prompt,
        steps,
        prompts,
        default,
        similarity,
        truncate_dim,
    )


def read_pooling_modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modes of a pooling's config.json: one key in new files, a key for each mode in older ones."""
    mode = config.get("pooling_mode")
    if mode is None:
        modes = tuple(name for key, name in _LEGACY_MODES.items() if config.get(key))
        return modes or (("mean",) if config.keys() & _LEGACY_MODES.keys() else ())
    modes = tuple(mode) if isinstance(mode, list) else (mode,)
    for name in modes:
        if name not in _LEGACY_MODES.values():
            raise ConfigError(
                f"pooling mode {short_repr(name)} is not supported; known are {', '.join(_LEGACY_MODES.values())}"
            )
    return modes


def weights_of(step: VectorStep) -> Path | None:
    """Return the folder of a step's weights, None if it has none.

    Raises:
        CheckpointError: the weights are missing, or stored as pickle only.
    """
    if step.layer_type == "Normalize":
        return None
    if not (step.folder / "model.safetensors").is_file():
        if (step.folder / "pytorch_model.bin").is_file():
            reason = "holds pytorch_model.bin only, a pickle, which is never loaded; save it as model.safetensors"
            raise CheckpointError(f"{step.folder} {reason} (sentence-transformers' save_pretrained does)")
        raise CheckpointError(f"{step.folder} lacks model.safetensors; download it as well")
    return step.folder


def _read_layers(folder: Path, modules: list[Mapping[str, Any]]) -> tuple[tuple[str, ...], bool, tuple[VectorStep, ...]]:
    """Return modes and `include_prompt` of the pooling, and the steps after it."""
    pooling: tuple[str, ...] = ()
    include_prompt, steps = True, list[VectorStep]()
    for module in modules:
        kind, module_folder = _kind(module), folder / _folder_name(module)
        config = read_json(module_folder / "config.json")
        if kind == "Pooling":
            pooling, include_prompt = read_pooling_modes(config) or ("mean",), bool(config.get("include_prompt", True))
        elif kind in ("Dense", "LayerNorm", "Normalize"):
            source = config.get("module_input_name", _VECTOR)
            if source != _VECTOR or config.get("module_output_name") not in (None, _VECTOR):
                reason = f"{module_folder} works on {short_repr(source)}, and only layers on the pooled vector are supported"
                raise ConfigError(f"{reason}; give another checkpoint")
            steps.append(VectorStep(kind, config, module_folder))
        elif kind not in ("Dropout", "LogitScore"):  # nothing after training, and what `score` computes anyway
            supported = "Pooling, Dense, LayerNorm, Normalize and Dropout"
            raise ConfigError(
                f"{folder / MODULES} has the module {short_repr(kind)}; supported after the transformer are {supported}"
            )
    return pooling, include_prompt, tuple(steps)


def _read_modules(path: Path) -> list[Mapping[str, Any]]:
    """Return the entries of modules.json in their order, none if there is no such file."""
    content = read_file(path)
    try:
        modules = [] if content is None else json.loads(content)
        valid = isinstance(modules, list) and all(
            isinstance(module, dict) and isinstance(module["type"], str) for module in modules
        )
    except (ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download it again") from None
    if not valid:
        raise CheckpointError(f"{path} must be a list of objects with type and path; download it again")
    return list(modules)


def _kind(module: Mapping[str, Any]) -> str:
    return str(module["type"]).rpartition(".")[2]


def _folder_name(module: Mapping[str, Any]) -> str:
    """Return the folder of a module below modules.json. Raise CheckpointError for any other path."""
    name = module.get("path") or ""
    if not isinstance(name, str) or "\0" in name or name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise CheckpointError(f"modules.json names the path {short_repr(name)}; it must be a folder below the checkpoint's")
    return name
