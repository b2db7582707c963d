"""A checkpoint's model, made as often as it is wanted: with its weights, or without memory. Knows no cache and no step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from ..kernels.dispatch import using
from ..kernels.kv8 import CODES
from ..mm.errors import CheckpointError, ConfigError, SensoriumError
from ..mm.registry import Architecture
from ..models.adapters import adapter_spec, attach
from ..models.interface import CacheSpec, Model
from ..models.weights import load as load_weights
from ..processors.files import ADAPTER, read_json
from ..processors.interface import ProcessingInfo
from .config import EngineConfig, ModelFiles, load_model_files, resolve
from .paths import rehearse

_NONSENSE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)
"""What JSON raises that is read as something it is not, or as sizes that no memory holds."""


@dataclass(frozen=True)
class Source:
    """`row`: of the registry, for these files; `info`: made of them with the same options."""

    config: EngineConfig
    files: ModelFiles
    row: Architecture
    info: ProcessingInfo

    @property
    def dtype(self) -> torch.dtype:
        return self.files.dtype(self.config.dtype)

    def empty(self) -> Model:
        """On the meta device: it answers what it is and takes no memory."""
        return self._on(torch.device("meta"))

    def planned(self) -> Model:
        """Likewise, for a plan: what no closed form knows of it has been tried out."""
        model = self.empty()
        rehearse(model, self.info, self.dtype)
        return model

    def on_device(self) -> Model:
        """With memory for its weights; ConfigError as `build_model`, and where its caches cannot be kept as is asked for."""
        return self._on(self.config.torch_device)

    def fill(self, model: Model) -> None:
        """CheckpointError for missing, surplus or misshapen weights, ConfigError for a model that cannot be served."""
        load_weights(self.files.path, model, self.config.quantization)
        if self.config.torch_device.type == "cuda":
            torch.cuda.synchronize(self.config.torch_device)  # they are read from other streams than they were written in
        rehearse(model, self.info, self.dtype)

    def again(self) -> Model:
        """Made anew, with the weights that it was made with first.

        Raises:
            CheckpointError: they are not there any more.
        """
        if load_model_files(self.files.path).fingerprint != self.files.fingerprint:
            raise CheckpointError(f"{self.files.path} was changed since it was loaded; make a new engine of it")
        with using(self.config.kernels):
            model = self.on_device()
            self.fill(model)
        return model

    def _on(self, device: torch.device) -> Model:
        model = build_model(self.row, self.files, self.info, self.dtype, device)
        model.cache_specs = kept_as(self.config.kv_cache_dtype, model.cache_specs)
        return model


def kept_as(name: str, specs: Sequence[CacheSpec]) -> Sequence[CacheSpec]:
    """With keys and values as `kv_cache_dtype` says; ConfigError for latent rows in 8 bits."""
    if name == "auto":
        return specs
    if any(spec.kind == "latent" for spec in specs):
        raise ConfigError(
            f"kv_cache_dtype={name!r} is for keys and values; this model keeps latent rows, which are small as they are: "
            "leave it out"
        )
    return [replace(spec, codes=CODES[name]) for spec in specs]


def build_model(row: Architecture, files: ModelFiles, info: ProcessingInfo, dtype: torch.dtype, device: torch.device) -> Model:
    """Without weights, with the adapters it comes with; ConfigError for a config.json of which no model can be made."""
    model = cast(Model, made("model", resolve(row.model), files.config, dtype, device))
    adapters = dict.fromkeys(info.adapters.values())
    attach(model, [adapter_spec(name, read_json(files.path / name / ADAPTER)) for name in adapters])
    return model


def made(what: str, kind: Callable[..., object], *arguments: object) -> object:
    """`kind(*arguments)`; ConfigError where that fails, since it is made of what the checkpoint's JSON says."""
    try:
        return kind(*arguments)
    except SensoriumError:
        raise
    except _NONSENSE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"the checkpoint's JSON does not say how its {what} can be made ({reason})") from error
