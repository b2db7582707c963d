"""The base of all models with a decoder-only stack: a decoder, its head, and weight loading. Families add their encoders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..callers.errors import ConfigError
from ..checkpoints.weight_files import rename
from .interface import CacheSpec, ForwardBatch, StepLimits
from .layers.adapter import AdapterMask, LowRank, adapter_bytes
from .layers.basic import WeightedLayer
from .layers.linear import LmHead
from .layers.ranks import is_below
from .stored_formats import Formats
from .text.attention import gathered_bytes
from .text.decoder import Decoder, decoder_bytes
from .text.mtp import COPIES, MTP, build_mtp, mtp_prefixes, stored_stems
from .text.spec import DecoderSpec
from .weights import check, fill

if TYPE_CHECKING:
    from .layers.vector_head import VectorHead
    from .talker import Talker

TEXT_PREFIXES = (
    ("model.language_model.model.", "language_model."),
    ("model.language_model.", "language_model."),
    ("language_model.model.model.", "language_model."),
    ("language_model.model.", "language_model."),
    ("language_model.lm_head.", "head.lm_head."),
    ("lm_head.", "head.lm_head."),
)
"""Name prefixes of decoder and head in multimodal checkpoints of transformers 5 and 4."""
_HEAD = "head.lm_head."
_HEADS = ("head", "classifier")
_MTP = ("mtp.", "model.mtp", "language_model.mtp")  # prefixes of tensors for multi-token prediction
_on_meta = ContextVar("sensorium_decoder_on_meta", default=False)


@contextmanager
def decoder_on_meta() -> Iterator[None]:
    """Build decoders and heads without memory, for `DecoderModel.remove_decoder`."""
    token = _on_meta.set(True)
    try:
        yield
    finally:
        _on_meta.reset(token)


class DecoderModel(nn.Module):
    """Implements `models.interface.Model` except for the encoders: a family adds them, `embed_multimodal` and their memory.

    Attributes:
        prefixes: (stored, canonical) prefixes of tensor names; the first match is replaced. `TEXT_PREFIXES` are for
            checkpoints with the decoder under `language_model.`; a family puts its own before them.
        reads_encoder_rows: False if no step replaces token embeddings (`keep_encoders`).
        text_parts: modules that a model of texts alone needs (`keep_encoders`).
        stored_adapters: name -> settings, as in adapter_config.json, of adapters whose tensors are among the model's own, under
            the names of `layers.adapter.tensor_name`.
        ignored: canonical prefixes of stored tensors that are not used. All other unknown tensors are refused.
        absent: canonical paths of modules that other ranks hold.
        head: None in a checkpoint for embeddings, which stores no head.
        mtp_layers: layers for multi-token prediction, if `add_mtp` was called. mtp_cache_specs: formats of their KV caches.
        request_adapters: see `request_adapters.adapted_layers`.
        talker: class of the part that speaks (`models.talker.Talker`), if there is one; `LLM(load_talker=True)` builds it.
    """

    __call__: Callable[..., Tensor]

    prefixes: Sequence[tuple[str, str]] = ()
    ignored: Sequence[str] = ()
    talker: ClassVar[Callable[..., Talker] | None] = None
    routes_by_modality: Mapping[str, int] = {}
    adapters: Sequence[str] = ()
    stored_adapters: Mapping[str, Mapping[str, Any]] = {}
    reads_encoder_rows = True
    recordable = True
    pooling = "last"
    normalizes = True
    pools_items = False
    mtp_cache_specs: Sequence[CacheSpec] = ()
    text_parts: ClassVar[Sequence[str]] = ("language_model", "head")
    formats: Formats | None = None  # of a quantised checkpoint
    request_adapters: object | None = None

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, decoder: Decoder | None = None) -> None:
        super().__init__()
        self.spec, self.dtype, self.adapter_mask = spec, dtype, AdapterMask()
        self.rope_axes, self.vocab_size, self.max_positions = spec.rope_axes, spec.vocab_size, spec.max_positions
        self.hidden_size, self.row_size = spec.hidden_size, spec.hidden_size * (1 + len(spec.deepstack))
        self.vector_size = self.token_size = spec.hidden_size
        self.language_model = decoder or _decoder_class(spec)(spec, dtype, torch.device("meta") if _on_meta.get() else device)
        self.cache_specs = self.language_model.cache_specs
        self.absent = frozenset(f"language_model.{path}" for path in self.language_model.absent)
        self.head: LmHead | None = self._build_head(spec.tied)
        self.mtp_layers: nn.ModuleList
        self.vector_head: VectorHead | None = None

    def _build_head(self, tied: bool) -> LmHead:
        spec, embedding = self.spec, self.language_model.embed_tokens
        tied_to, device = embedding if tied else None, embedding.weight.device
        return LmHead(
            spec.hidden_size,
            spec.vocab_size,
            tied_to,
            self.dtype,
            device,
            scale=spec.logit_scale,
            cap=spec.logit_cap,
            bias=spec.head_bias,
            unpredicted=spec.unpredicted,
        )

    @property
    def decoder_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """See SupportsAdapters."""
        return (("language_model", module) for module in (self.language_model,) if module is not None)

    @property
    def head_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """See SupportsAdapters."""
        return ((name, module) for name, module in self.named_children() if name in _HEADS)

    @property
    def encoder_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Names and modules of encoders and connectors: no other method than `embed_multimodal` runs their layers."""
        others = (*self.text_parts, *_HEADS, "vector_head", "mtp_layers")
        return ((name, module) for name, module in self.named_children() if name not in others)

    @property
    def can_generate(self) -> bool:
        return self.head is not None

    @property
    def captured_layers(self) -> int:
        """Number of layers after which `forward` can capture hidden states.

        0 for stacks of several streams or two inputs, and if other ranks hold some of the layers.
        """
        captures = type(self.language_model) is Decoder and not self.spec.cross_attentions and self.language_model.ranks is None
        return len(self.spec.layers) if captures else 0

    def project_hidden(self, hidden: Tensor, tokens: bool) -> Tensor:
        return hidden

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.adapter_mask.set(batch.adapters, len(self.adapters))
        return self.language_model(batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(hidden)

    def draft(self, batch: ForwardBatch, hidden: Tensor, layer: int = 0) -> Tensor:
        """Run a layer for multi-token prediction on tokens and the hidden states from which they were predicted.

        The layer attends to earlier rows through a KV cache of its own, as a decoder layer does. `compute_logits` of the
        result gives logits of the tokens after those of the batch, and `draft` with the next layer predicts a token further
        from it, if there are several.

        Args:
            batch: `input_ids` are the tokens that follow the hidden states, `positions` those of the hidden states. Only
                their differences matter, except that GLM's and DeepSeek's layers take zeros for the embedding of a row at
                position 0. `kv_caches` and `attn` have one entry, of `mtp_cache_specs[layer]`. `embed_index` and
                `embed_rows` are for tokens that are placeholders.
            hidden: `[rows, hidden]` of `forward` (layer 0), or of `draft` with the layer before. It is not changed.
            layer: number of the layer.

        Returns:
            Normed hidden states `[rows, hidden]`.

        Raises:
            ConfigError: the model was loaded without such a layer.
        """
        decoder, spec, count = self.language_model, self.spec.mtp, len(self.mtp_cache_specs)
        if spec is None or not 0 <= layer < count:
            reason = f"layer {layer} for multi-token prediction was asked for, and {count} are loaded"
            raise ConfigError(f"{reason}; load the model with <<param=>>True, or give a lower number", param="load_mtp")
        x = decoder.embed(batch)
        decoder.put_encoder_rows(x, batch)
        if spec.zeroes_first:
            x.masked_fill_((batch.positions[0] == 0)[:, None], 0)
        rope = getattr(spec.layer.mixer, "rope", None)
        cos_sin = None if rope is None else decoder.rotaries[self.spec.ropes.index(rope)](batch.positions)
        (cache,), (attn,) = batch.kv_caches, batch.attn
        drafted: Tensor = self.mtp_layers[layer](x, hidden, cos_sin, cache, attn, batch.modality_ids)
        return drafted

    def forward_bytes(self, limits: StepLimits) -> int:
        adapters = [module for module in self.modules() if isinstance(module, LowRank)]
        mixers = [adapter for adapter in adapters if ".mlp." not in adapter.stem]
        mlps = [adapter for adapter in adapters if ".mlp." in adapter.stem or ".mixer." in adapter.stem]
        in_mixers, in_mlps = (adapter_bytes(some, self.hidden_size, limits, self.dtype) for some in (mixers, mlps))
        decoder = decoder_bytes(self.spec, limits, self.dtype, (in_mixers, in_mlps), self.reads_encoder_rows)
        return decoder + gathered_bytes(self.spec, limits, self.dtype)

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """See Model. A head that is stored is used even if config.json says that it is tied to the token embeddings."""
        if not headers:
            return
        names = (rename(name, self.prefixes) for name, _ in self.convert_weights(headers.items()))
        has_head = any(name.startswith(_HEAD) for name in names)
        if self.spec.tied and has_head:
            self.spec, self.head = replace(self.spec, tied=False), self._build_head(tied=False)
        elif not self.spec.tied and not has_head:
            self.head = None

    def add_mtp(self, headers: Mapping[str, Tensor]) -> None:
        """Add the layers for multi-token prediction. Call it before `check_weights` and after `choose_head`.

        Args:
            headers: of `weight_files.read_headers`, or empty.

        Raises:
            ConfigError: the config states none that are supported, or the checkpoint does not store them.
        """
        mtp = self.spec.mtp
        if mtp is None:
            raise _no_mtp("config.json states no layers for multi-token prediction, or the family's are not supported")
        self.prefixes = (*mtp_prefixes(self.spec, self.prefixes), *self.prefixes)
        names = (rename(name, self.prefixes) for name, _ in self.convert_weights(headers.items()))
        if headers and not any(name.startswith(f"{MTP}.") for name in names):
            raise _no_mtp("the checkpoint has no tensors for multi-token prediction", "give one that has them, or ")
        device = self.language_model.embed_tokens.weight.device
        layers = build_mtp(self.spec, self.dtype, device)
        self.mtp_layers, self.mtp_cache_specs = nn.ModuleList(layers), [layer.cache_spec for layer in layers]
        self.ignored = (*self.ignored, *(f"{MTP}.{i}.{copy}" for i in range(mtp.count) for copy in COPIES))

    def add_vector_head(self, steps: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Add the layers on the pooled vector (`VectorHead`). Call it after `keep_encoders` and before `check_weights`."""
        from .layers.vector_head import VECTOR_HEAD, VectorHead

        pooled = self.vector_size * (self.pooling.count("+") + 1)
        self.vector_head = VectorHead(steps, pooled, self.language_model.embed_tokens.weight.device)
        self.vector_size = self.vector_head.size
        self.prefixes = ((f"{VECTOR_HEAD}.", f"{VECTOR_HEAD}."), *self.prefixes)

    def check_weights(self, headers: Mapping[str, Tensor]) -> None:
        check(self, self.convert_weights(headers.items()), self.prefixes, self._unused, self.absent)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        fill(self, self.convert_weights(weights), self.prefixes, self._unused, self.absent)

    def is_unused(self, name: str) -> bool:
        canonical = rename(name, self.prefixes)
        return canonical.startswith(self._unused) or is_below(canonical, self.absent)

    @property
    def _unused(self) -> tuple[str, ...]:
        """Canonical prefixes of all stored tensors that are not used."""
        first, count = len(self.spec.layers), self.spec.mtp_layers
        layers = (stem for index in range(first, first + count) for stem in stored_stems(index, ()))
        return (*_MTP, *layers, *self.ignored)

    def keep_encoders(self, modalities: Collection[str]) -> None:
        """Remove the encoders of all other modalities; their weights are not loaded. Call it before `load_weights`.

        Here everything but the decoder is removed if no modality is left. A model with separate encoders overrides this.
        """
        self.reads_encoder_rows = bool(modalities)
        if not modalities:
            self._remove(*(name for name, _ in self.named_children() if name not in self.text_parts))

    def remove_decoder(self) -> None:
        """Remove decoder and head; their weights are not loaded. Call it before `load_weights`."""
        self._remove("language_model", "head")

    def _remove(self, *names: str) -> None:
        """Remove submodules and ignore their weights."""
        for name in names:
            module = getattr(self, name)
            if isinstance(module, WeightedLayer):  # its tensor may have the module's own name
                self.ignored = (*self.ignored, *(tensor for tensor, _ in module.tensors(name)))
            if module is not None:
                module.to("meta")  # frees its memory even if something else refers to it
            setattr(self, name, None)
        self.ignored = (*self.ignored, *(f"{name}." for name in names))

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Rename or reshape stored tensors before prefixes are replaced. A family overrides this for other layouts."""
        return weights


def _decoder_class(spec: DecoderSpec) -> type[Decoder]:
    if spec.altup is None:
        return Decoder
    from .text.altup import AltUpDecoder

    return AltUpDecoder


def _no_mtp(reason: str, how: str = "") -> ConfigError:
    return ConfigError(f"<<param=>>True, but {reason}; {how}leave <<param>> and the method mtp out", param="load_mtp")
