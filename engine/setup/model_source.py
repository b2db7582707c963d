"""Builds the model of a checkpoint: on the meta device for plans, on the device with weights, and again after sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...callers.errors import CheckpointError, ConfigError, InputError, SensoriumError, short_repr
from ...checkpoints.adapters import adapter_spec
from ...checkpoints.files import read_json
from ...checkpoints.formats.read import read_quantization
from ...checkpoints.weight_files import ADAPTER_WEIGHTS, file_headers, read_file, read_headers
from ...kernels import native
from ...kernels.bodies import bodies_in_use
from ...kernels.dispatch import multiplies_pairs, use_backends
from ...kernels.kv_quant import CACHE_DTYPES
from ...kernels.linear.int4 import Int4Options
from ...mm.hashing import digest
from ...models.adapters import attach
from ...models.decoder_model import TEXT_PREFIXES, DecoderModel, decoder_on_meta
from ...models.interface import CacheSpec, Model, SupportsAdapters, SupportsLargeViews, SupportsStreams
from ...models.layers.linear import Linear, LmHead, deferred_weights
from ...models.layers.moe import Mixture
from ...models.layers.ranks import Ranks, building_for
from ...models.packed_cache import restore_packed, save_packed
from ...models.quantization import parse_quantization
from ...models.stored_formats import assign
from ...models.updated_weights import UpdatedWeights
from ...models.weights import keep_float16, quantize
from ...models.weights import load as load_weights
from ...processors.files import ADAPTER, MODULES
from ...processors.interface import LimitsViews, ProcessingInfo
from ...processors.sentence_transformers import SentenceTransformersConfig
from ..config import EngineConfig
from ..model_files import ModelFiles, load_model_files, resolve
from .implementation import explain_fallback, is_fallback, resolve_architecture, verify_fallback
from .rank_checks import check_ranks

if TYPE_CHECKING:
    from ...checkpoints.merged_adapter import MergedAdapter

_INVALID_JSON = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)
"""Exceptions of a model's constructor if config.json has values of a wrong type, or sizes too large for any memory."""


def computing_dtype(config: EngineConfig, files: ModelFiles) -> torch.dtype:
    """Return the dtype that the model computes in.

    On a CPU, "auto" is float32 for float16 checkpoints. In int8 it is bfloat16 if the CPU has dot products of bfloat16:
    products round their inputs to 8 bits anyway, and attention takes half the time.
    """
    dtype = files.dtype(config.dtype, config.torch_device)
    is_widened = dtype == torch.float32 and files.dtype(config.dtype) == torch.float16
    return torch.bfloat16 if is_widened and config.quantization == "int8" and multiplies_pairs() else dtype


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint and the options that its model is built with.

    Args:
        info: its processing, built with the same options.
        ranks: the groups of processes that share the model, if there are several.
        updates: weights that have replaced those of the checkpoint.
    """

    config: EngineConfig
    files: ModelFiles
    info: ProcessingInfo
    ranks: Sequence[Ranks] = ()
    updates: UpdatedWeights = field(default_factory=UpdatedWeights)

    @property
    def dtype(self) -> torch.dtype:
        return computing_dtype(self.config, self.files)

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self.info.modalities)

    def build_on_meta(self) -> Model:
        """Return the model on the meta device, which has its specs and takes no memory."""
        return self._build(torch.device("meta"))

    def build_for_plan(self) -> Model:
        """Return the model on the meta device, with the memory of a fallback model measured."""
        model = self.build_on_meta()
        verify_fallback(self.files, model, self.info, self.dtype)
        return model

    def build_on_device(self) -> Model:
        """Return the model with memory for its weights. Raise ConfigError as `build_model` and `with_cache_dtype` do."""
        return self._build(self.config.torch_device)

    def load_weights(self, model: Model) -> None:
        """Load the weights into a model of `build_on_device`.

        Raises:
            CheckpointError: missing, surplus or misshapen weights.
            ConfigError: a fallback model whose results differ from ours.
        """
        adapter = read_merged_adapter(self.files.adapter, model, read_file)
        merge, external = None if adapter is None else adapter.merge, self.files.external
        packed = self._packed_file()
        names = set() if packed is None else restore_packed(cast(nn.Module, model), packed)
        load_weights(self.files.path, model, self.updates.merge if self.updates else merge, external)
        if packed is not None:
            save_packed(cast(nn.Module, model), packed, names)
        if self.config.torch_device.type == "cuda":
            torch.cuda.synchronize(self.config.torch_device)  # steps read weights on other streams than the copies
        verify_fallback(self.files, model, self.info, self.dtype)

    def _packed_file(self) -> Path | None:
        """Return the file of this model's packed weights: named by the checkpoint, the formats and the CPU's kernels."""
        config = self.config
        if config.packed_cache_dir is None or config.torch_device.type != "cpu" or self.files.adapter is not None:
            return None
        if self.updates:
            return None
        kernels = (native.ABI, bodies_in_use(), config.kernels, config.dtype == "auto", str(self.dtype))
        part = [number for group in self.ranks for number in (group.rank, group.size, group.layers, group.experts)]
        name = digest("sensorium.packed", self.files.stat_digest(), config.quantization, kernels, *part)
        return Path(config.packed_cache_dir) / f"{name}.safetensors"

    def stage_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Let the next `reload` take these tensors in place of the checkpoint's. Errors: see `UpdatedWeights.stage`.

        Raises:
            InputError: an adapter is merged into the weights.
        """
        if self.files.adapter is not None:
            raise InputError("the weights of a model with a merged adapter cannot be updated", code="unsupported")
        self.updates.stage(self.build_on_meta(), read_headers(self.files.path), weights)

    def reload(self) -> Model:
        """Return the model built again with its weights.

        Raises:
            CheckpointError: the checkpoint was changed since it was loaded, or cannot be read.
        """
        self.check_unchanged()
        with use_backends(self.config.kernels):
            model = self.build_on_device()
            self.load_weights(model)
        return model

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the checkpoint was changed since its files were read."""
        files = load_model_files(self.files.root, self.config.adapter, self.config.hf_overrides)
        if files.fingerprint != self.files.fingerprint:
            raise CheckpointError(f"{self.files.path} was changed since it was loaded; make a new engine from it")

    def _build(self, device: torch.device) -> Model:
        modalities = [name for name in self.modalities if self.config.encodes(name)]
        wanted = ModelParts(modalities, self.config.parts, self.config.load_mtp)
        with building_for(*self.ranks):
            model = build_model(self.files, self.info, self.dtype, device, wanted)
        for group in self.ranks:
            check_ranks(model, group, self.files.architecture)
        self._check_quantization(model)
        if isinstance(model, DecoderModel) and (self.config.enable_prompt_embeds or self.config.parts == "decoder"):
            model.reads_encoder_rows = True
        if self.config.enable_lora:
            from ...models.request_adapters import AdaptedLayers

            adapters = AdaptedLayers(model, read_headers(self.files.path))
            cast(SupportsAdapters, model).request_adapters = adapters
        if isinstance(model, SupportsLargeViews) and isinstance(self.info, LimitsViews):
            model.most_patches = self.info.most_patches
        if isinstance(model, SupportsStreams):
            model.max_streams = self.config.max_streams
        if self.config.quantization is not None:
            quantize(cast(nn.Module, model), self.config.quantization)
            self._check_int4(model, self.config.quantization)
        half = self.config.dtype == "auto" and self.files.dtype("auto") == torch.float16 and self.dtype == torch.float32
        if half and self.files.adapter is None:  # merged weights may not fit float16
            keep_float16(cast(nn.Module, model))
        model.cache_specs = with_cache_dtype(self.config.kv_cache_dtype, model.cache_specs)
        if isinstance(model, DecoderModel):
            model.mtp_cache_specs = with_cache_dtype(self.config.kv_cache_dtype, model.mtp_cache_specs)
        return model

    def _check_int4(self, model: Model, quantization: str | Mapping[str, Any]) -> None:
        """Raise ConfigError if 4 bits are given and no layer has them, except for parts="encoder", which has no decoder."""
        if self.config.parts == "encoder" or not parse_quantization(quantization).uses_int4:
            return
        layers = (module for module in cast(nn.Module, model).modules() if isinstance(module, Linear))
        if not any(isinstance(layer.quantization, Int4Options) for layer in layers):
            reason = f"<<param=>>{short_repr(quantization)}, but {self.files.architecture} has no layer for 4 bits"
            raise ConfigError(f"{reason}; use 'int8', or leave it out", param="quantization")

    def _check_quantization(self, model: Model) -> None:
        """Raise ConfigError if `quantization` is given for a quantised checkpoint, unless it stores that format."""
        quantization = self.config.quantization
        if quantization is None or getattr(model, "formats", None) is None:
            return
        method = parse_quantization(quantization).text
        layers = (module for module in cast(nn.Module, model).modules() if isinstance(module, Linear))
        if not any(layer.stores(str(method)) for layer in layers):
            reason = "is for checkpoints that are not quantised yet" + (
                f", or that store {method} with one scale per output" if method in ("int8", "fp8") else ""
            )
            raise ConfigError(f"<<param=>>{short_repr(quantization)} {reason}; leave it out", param="quantization")


def with_cache_dtype(name: str, specs: Sequence[CacheSpec]) -> Sequence[CacheSpec]:
    """Return the cache specs with `kv_cache_dtype` applied. Raise ConfigError for latent attention with 8 bits."""
    if name == "auto":
        return specs
    if any(spec.kind == "latent" for spec in specs):
        raise ConfigError(
            f"<<param=>>{name!r} is for keys and values, but this model caches latent rows, which are small already; "
            "leave it out",
            param="kv_cache_dtype",
        )
    return [spec if spec.kind == "state" else replace(spec, quant_dtype=CACHE_DTYPES[name]) for spec in specs]


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model that are built.

    Args:
        modalities: those whose encoders are needed.
        parts, load_mtp: as in EngineConfig.
    """

    modalities: Sequence[str]
    parts: str = "all"
    load_mtp: bool = False


def build_model(
    files: ModelFiles,
    info: ProcessingInfo,
    dtype: torch.dtype,
    device: torch.device,
    wanted: ModelParts,
) -> Model:
    """Build a checkpoint's model and its adapters, without weights.

    Raises:
        ConfigError: config.json describes no model, or the model cannot be built in parts or with `load_mtp`.
        CheckpointError: a scheme of a quantised checkpoint is not supported, or the stored tensors do not fit the model.
    """
    row, quantization, parts = resolve_architecture(files), read_quantization(files.quantization_config), wanted.parts
    headers = read_headers(files.path)
    for part, folder in files.external:
        headers |= dict(part.rename(read_headers(folder).items()))
    with (
        explain_fallback(row, files),
        deferred_weights() if quantization else nullcontext(),
        decoder_on_meta() if parts == "encoder" else nullcontext(),
    ):
        if quantization is not None and is_fallback(row):
            reason = "runs through transformers, where quantised checkpoints are not supported; use one that is not quantised"
            raise ConfigError(f"{files.architecture} {reason}")
        model = cast(Model, build_from_json("model", resolve(row.model), files.config, dtype, device))
        adapter = read_merged_adapter(files.adapter, model, lambda file: file_headers(file).items() if headers else ())
        if adapter is not None and headers:
            headers = adapter.add_headers(headers)
        model.choose_head(headers)
        if adapter is not None and adapter.changes_embeddings and (is_fallback(row) or _has_tied_head(model)):
            reason = "changes the token embeddings, to which the model's head is tied; merge it into the model"
            raise CheckpointError(f"the adapter {files.adapter} {reason}")
        _keep_parts(model, parts, wanted.modalities)
        if wanted.load_mtp:
            _add_mtp(model, parts, headers)
        if files.sentence_transformers is not None and parts != "encoder":
            _add_vector_head(model, files.sentence_transformers)
    if quantization is not None:
        assign(cast(nn.Module, model), quantization, headers or None)
    adapters = dict.fromkeys(() if parts == "encoder" else info.adapters.values())
    stored = getattr(model, "stored_adapters", {})
    specs = [
        adapter_spec(name, stored[name] if name in stored else read_json(files.path / name / ADAPTER)) for name in adapters
    ]
    if stored:  # their tensors are among those that are compared
        attach(model, specs)
    if headers:
        model.check_weights(headers)
    if not stored:
        attach(model, specs)
    return model


def _keep_parts(model: Model, parts: str, modalities: Sequence[str]) -> None:
    """Remove encoders of other modalities and, for parts="encoder", the decoder."""
    if isinstance(model, DecoderModel):
        model.keep_encoders(modalities)
    elif parts != "all":
        reason = "needs a decoder-only model that does not run through transformers"
        raise ConfigError(f"<<param=>>{parts!r} {reason}; leave it out", param="parts")
    if parts == "encoder" and isinstance(model, DecoderModel):
        if not modalities:
            reason = "<<param=>>'encoder', but no encoder is left; leave it out, or raise <<limit_mm_per_prompt>>"
            raise ConfigError(reason, param="parts")
        model.remove_decoder()


def _add_vector_head(model: Model, settings: SentenceTransformersConfig) -> None:
    """Add what sentence-transformers computes from a pooled vector. It says whether vectors have length 1."""
    if isinstance(model, DecoderModel):
        model.normalizes = settings.normalizes
        if settings.head:
            model.add_vector_head([(step.layer_type, step.config) for step in settings.head])
    elif settings.head:
        reason = "are supported in models of a decoder or an encoder that do not run through transformers"
        raise ConfigError(f"the layers after the pooling in {settings.folder / MODULES} {reason}")


def _add_mtp(model: Model, parts: str, headers: Mapping[str, Tensor]) -> None:
    """Add the layers for multi-token prediction."""
    if not isinstance(model, DecoderModel):
        reason = "needs a decoder-only model that does not run through transformers; leave <<param>> out"
        raise ConfigError(f"<<param=>>True {reason}", param="load_mtp")
    if parts == "encoder":
        raise ConfigError("<<param=>>True needs the decoder, not <<parts=>>'encoder'; leave one of them out", param="load_mtp")
    model.add_mtp(headers)


def read_merged_adapter(
    folder: Path | None, model: Model, read: Callable[[Path], Iterable[tuple[str, Tensor]]]
) -> MergedAdapter | None:
    """Return the adapter of a folder for a model, with the tensors that `read` returns; None for no folder."""
    if folder is None:
        return None
    from ...checkpoints.merged_adapter import MergedAdapter, tensors_of_task

    prefixes, dtype = getattr(model, "prefixes", TEXT_PREFIXES), model.cache_specs[0].dtype
    tensors = tensors_of_task(read(folder / ADAPTER_WEIGHTS), getattr(model, "task", None))
    mixtures = [module for module in cast(nn.Module, model).modules() if isinstance(module, Mixture)]
    transposed = any(mixture.transposed for mixture in mixtures)
    return MergedAdapter(read_json(folder / ADAPTER), tensors, prefixes, dtype, transposed)


def _has_tied_head(model: Model) -> bool:
    heads = (module for module in cast(nn.Module, model).modules() if isinstance(module, LmHead))
    return any(head.tied_to for head in heads)


def build_from_json(what: str, kind: Callable[..., object], *arguments: object) -> object:
    """Return `kind(*arguments)`, whose arguments come from a checkpoint's JSON. Raise ConfigError if that fails."""
    try:
        return kind(*arguments)
    except SensoriumError:
        raise
    except _INVALID_JSON as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"the {what} cannot be built from the checkpoint's JSON files ({reason})") from error
