"""Checks, builds and loads the model that drafts (`speculative_config={"model": ...}`), and plans its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...checkpoints.weight_files import read_checkpoint, rename
from ...mm.hashing import digest
from ...models.decoder_model import DecoderModel
from ...models.interface import CacheSpec, Model, StepLimits, SupportsEncoderRemoval
from ...models.parallel_drafting import mask_token
from ...models.weights import weight_bytes
from ...processors.text.tokenizer import Tokenizer
from ..config import EngineConfig, cache_budget
from ..model_files import ModelFiles, load_model_files
from ..speculative_config import config_error, read_speculative_config
from ..worker.draft_cache import DraftCache
from ..worker.encoder_store import EncoderStore
from .draft_cache_size import block_bytes, draft_cache_blocks
from .memory import MaxSizes, sampling_bytes
from .model_source import ModelSource
from .resolve import load_processing

if TYPE_CHECKING:
    from ..worker.draft_model_runner import DraftModelRunner

_KINDS = ("full", "window", "latent", "cross")  # of caches from whose end tokens can be cut
_DECODER = ("language_model.", "head.", "decoder.", "mtp_layers.")  # canonical names of tensors that are of no encoder


@dataclass(frozen=True)
class DraftSource:
    """A checkpoint whose decoder drafts for a model. `source`: builds it."""

    source: ModelSource

    @property
    def files(self) -> ModelFiles:
        return self.source.files

    def build(self, device: torch.device) -> Model:
        """Return the model without encoders and weights."""
        model = self.source.build_on_meta() if device.type == "meta" else self.source.build_on_device()
        if isinstance(model, SupportsEncoderRemoval):
            model.remove_encoder()
        elif isinstance(model, DecoderModel):
            model.reads_encoder_rows = True  # those of the other model
        return model

    def load(self) -> Model:
        """Return the model with its weights.

        Raises:
            CheckpointError: missing, surplus or misshapen tensors, or the checkpoint was changed since it was checked.
        """
        model = self.build(self.source.config.torch_device)
        self.source.check_unchanged()
        self.source.load_weights(model)
        return model


def find_draft(config: EngineConfig, model: Model) -> DraftSource | None:
    """Return the checkpoint that drafts for a model; None if `speculative_config` names none.

    Raises:
        ConfigError: it cannot draft for this model, or not at all.
        CheckpointError: its files cannot be read.
    """
    limits = read_speculative_config(config.speculative_config)
    if limits.method != "draft_model" or not limits.predicted:
        return None
    name = limits.model
    options: dict[str, Any] = {"model": name, "adapter": None, "hf_overrides": {}, "revision": None, "speculative_config": None}
    options |= {"load_mtp": False, "load_talker": False, "enable_prompt_embeds": False, "encoder_cache_dir": None}
    options |= {"kv_offloading_size": None, "kv_transfer_config": None, "ec_transfer_config": None}
    options |= {"enable_lora": False, "encoder": None}
    options |= {"parts": "all", "limit_mm_per_prompt": {}, "kv_cache_dtype": "auto"}
    draft = replace(config, **options, quantization=limits.quantization or config.quantization)
    files = load_model_files(name)
    info = load_processing(files, {})
    source = DraftSource(ModelSource(draft, files, info))
    if not _has_encoder_decoder(source.source):
        draft = replace(draft, limit_mm_per_prompt=dict.fromkeys(info.modalities, 0))
        source = DraftSource(ModelSource(draft, files, info))
    _check(name, source.build(torch.device("meta")), model)
    return source


def _has_encoder_decoder(source: ModelSource) -> bool:
    return any(spec.kind == "cross" and not spec.optional for spec in source.build_on_meta().cache_specs)


def _check(name: str, draft: Model, model: Model) -> None:
    """Raise ConfigError if one model cannot draft for the other."""
    if not isinstance(draft, DecoderModel | SupportsEncoderRemoval):
        raise config_error(
            name, "cannot draft: its architecture is neither a decoder nor one whose encoder can be shared", "model"
        )
    if not draft.can_generate:
        raise config_error(name, "cannot draft: it generates no text", "model")
    caches = [spec.kind for spec in draft.cache_specs if spec.kind not in _KINDS or spec.optional]
    if caches:
        reason = f"cannot draft: it has layers of the kind {caches[0]!r}; give a model with plain attention in all layers"
        raise config_error(name, reason, "model")
    crosses = [any(spec.kind == "cross" and not spec.optional for spec in reader.cache_specs) for reader in (draft, model)]
    if any(crosses) and type(draft) is not type(model):
        reason = (
            f"cannot draft for a {type(model).__name__}: a model that reads its input by cross-attention needs one of its kind"
        )
        raise config_error(name, reason, "model")
    if any(crosses) and draft.row_size != model.row_size:
        reason = f"cannot draft: its encoder rows have {draft.row_size} numbers, and the model's {model.row_size}"
        raise config_error(name, f"{reason}; give a model with the same encoder", "model")


def check_vocabulary(source: DraftSource, tokenizer: Tokenizer) -> None:
    """Raise ConfigError unless the tokens of both models are the same."""
    other, name = Tokenizer(source.files.tokenizer_folder), source.source.config.model
    if other.vocab_size != tokenizer.vocab_size:
        sizes = f"{other.vocab_size:,} tokens, and the model has {tokenizer.vocab_size:,}"
        raise config_error(name, f"has another vocabulary: {sizes}; give a model with the same tokenizer", "model")
    tokens = ((i, other.token_bytes(i), tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    different = next(((i, theirs, ours) for i, theirs, ours in tokens if theirs != ours), None)
    if different is not None or other.control != tokenizer.control:
        what = "{} is {!r} there, and {!r} in the model".format(*different) if different else "its control tokens are others"
        raise config_error(name, f"has another vocabulary: {what}; give a model with the same tokenizer", "model")


def same_encoders(source: DraftSource, draft: Model, target: ModelSource | None, model: Model) -> bool:
    """Return whether the encoders of two checkpoints make the same rows: those of one class, with equal weights."""
    if type(draft) is not type(model) or draft.row_size != model.row_size or target is None:
        return False
    if target.files.adapter is not None or target.files.external or source.files.external:
        return False
    ours, theirs = _encoder_digests(target, model), _encoder_digests(source.source, draft)
    return bool(ours) and ours == theirs


def _encoder_digests(source: ModelSource, model: Model) -> dict[str, str]:
    """Return canonical name -> digest of the tensors of a checkpoint's encoders."""
    prefixes: Sequence[tuple[str, str]] = getattr(model, "prefixes", ())
    digests, dtype = {}, source.dtype
    for name, tensor in read_checkpoint(source.files.path, lambda name: rename(name, prefixes).startswith(_DECODER)):
        canonical = rename(name, prefixes)
        if not canonical.startswith(_DECODER) and isinstance(tensor, torch.Tensor):
            plain = tensor.to(dtype) if tensor.is_floating_point() else tensor
            digests[canonical] = digest("encoder", list(plain.shape), plain.contiguous().view(torch.uint8).numpy().tobytes())
    return digests


def make_draft_runner(
    config: EngineConfig,
    source: DraftSource,
    model: Model,
    sizes: MaxSizes,
    store: EncoderStore,
    target: ModelSource | None,
) -> DraftModelRunner:
    """Return the runner of a draft model with its caches; `load` reads its weights.

    Raises:
        ConfigError: the models read their input by cross-attention, and their encoders differ.
    """
    from ..worker.draft_model_runner import DraftModelOptions, DraftModelRunner

    limits, device = read_speculative_config(config.speculative_config), config.torch_device
    draft = source.build(torch.device("meta"))
    shares = same_encoders(source, draft, target, model)
    cross = _cross_specs(draft)
    if cross and not shares:
        reason = "has another encoder than the model; give a model with the same encoder weights"
        raise config_error(source.source.config.model, reason, "model")
    specs = _token_specs(draft)
    cache = DraftCache(specs, draft_cache_blocks(config, specs, sizes.max_model_len), config.block_size, device)
    mask = mask_token(source.files.config, draft.vocab_size) if limits.parallel else None
    options = DraftModelOptions(limits.predicted, shares, sizes.step_rows, _cross_blocks(config, draft, sizes), mask)
    return DraftModelRunner(partial(source.load), draft.cache_specs, cache, store, options, device)


def draft_model_bytes(config: EngineConfig, model: Model, sizes: MaxSizes) -> tuple[int, int]:
    """Return the bytes of the draft model's weights and largest step, and those of its caches; zeros without one.

    Raises:
        ConfigError: as `find_draft`.
    """
    source = find_draft(config, model)
    if source is None:
        return 0, 0
    draft, device, dtype = source.build(torch.device("meta")), config.torch_device, source.source.dtype
    rows, keys = sizes.step_rows, config.max_num_seqs * sizes.keys
    step = StepLimits(rows, keys, sizes.keys, device, cross_keys=sizes.step_cross_rows)
    hidden = rows * draft.hidden_size * dtype.itemsize
    limits = read_speculative_config(config.speculative_config)
    sampled = config.max_num_seqs * (limits.predicted if limits.parallel else 1)
    logits = sampling_bytes(draft.vocab_size, min(rows, sampled), 0, dtype, device)
    caches = draft_cache_blocks(config, _token_specs(draft), sizes.max_model_len) * block_bytes(
        _token_specs(draft), config.block_size
    )
    caches += _cross_blocks(config, draft, sizes) * block_bytes(_cross_specs(draft), config.block_size)
    return weight_bytes(draft, device) + hidden + max(draft.forward_bytes(step), logits), caches


def _token_specs(draft: Model) -> list[CacheSpec]:
    return [spec for spec in draft.cache_specs if spec.kind != "cross"]


def _cross_specs(draft: Model) -> list[CacheSpec]:
    return [spec for spec in draft.cache_specs if spec.kind == "cross"]


def _cross_blocks(config: EngineConfig, draft: Model, sizes: MaxSizes) -> int:
    """Return the blocks for the encoder rows of `max_num_seqs` sequences, or of as many as the budget holds, but one."""
    specs = _cross_specs(draft)
    if not specs:
        return 0
    per_sequence = -(-sizes.cross_rows // config.block_size)
    fit = cache_budget(config, config.torch_device) // block_bytes(specs, config.block_size)
    return max(per_sequence, min(config.max_num_seqs * per_sequence, fit))
