"""Checks, builds and loads an EAGLE-3 head (`speculative_config={"method": "eagle3"}`), and plans its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ...callers.errors import CheckpointError
from ...checkpoints.files import read_json
from ...checkpoints.weight_files import read_checkpoint, read_headers
from ...models.decoder_model import DecoderModel
from ...models.interface import Model, StepLimits
from ...models.layers.basic import EmbeddingTable
from ...models.weights import weight_bytes
from ..config import EngineConfig
from ..speculative_config import EAGLE3, config_error, read_speculative_config
from ..worker.draft_cache import DraftCache
from .draft_cache_size import block_bytes, draft_cache_blocks
from .memory import MaxSizes

if TYPE_CHECKING:
    from ...models.text.eagle3 import Eagle3Head
    from ..worker.eagle3_runner import Eagle3Runner


def with_draft_folder(options: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return a `speculative_config` with the folder of its model and, if it names no method, the method of this model.

    Raises:
        ConfigError: the method is for another kind of model.
    """
    from ...models.text.eagle3 import is_eagle3

    architectures = read_json(Path(folder) / "config.json").get("architectures") if Path(folder).is_dir() else None
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    is_head, method = is_eagle3(first), options.get("method")
    if method is not None and is_head != (method == EAGLE3):
        names = (
            f"'eagle3' for it, since its architecture is {first}" if is_head else "a model whose architecture is named Eagle3"
        )
        raise config_error(folder, f"does not fit the method {method!r}; give {names}", "model")
    return {**options, "model": folder} | ({"method": EAGLE3} if is_head else {})


@dataclass(frozen=True)
class Eagle3Source:
    """The checkpoint of a head.

    Args:
        num_layers, vocab_size, hidden_size, dtype: of the model that it drafts for, which it does not keep in memory.
        parallel: see DraftLimits.
    """

    path: Path
    config: Mapping[str, Any]
    num_layers: int
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    parallel: bool = False

    def build(self, device: torch.device, table: EmbeddingTable | None = None) -> Eagle3Head:
        """Return the head without weights.

        Args:
            table: the model's embeddings, for a head that stores none; None takes a table without memory.

        Raises:
            ConfigError: it is none for this model.
            CheckpointError: its tensors do not fit its config.json.
        """
        from ...models.text.eagle3 import Eagle3Head, eagle3_spec

        spec, headers = eagle3_spec(self.config, self.num_layers, self.parallel), read_headers(self.path)
        stores_table = any(name.removeprefix("model.") == "embed_tokens.weight" for name in headers)
        if spec.stack.vocab_size != self.vocab_size:
            reason = f"has a vocabulary of {spec.stack.vocab_size:,} tokens, and the model {self.vocab_size:,}"
            raise config_error(str(self.path), f"{reason}; give a head that was made for this model", "model")
        if not stores_table and spec.stack.hidden_size != self.hidden_size:
            reason = f"is {spec.stack.hidden_size} wide without embeddings of its own, and the model is {self.hidden_size}"
            raise config_error(str(self.path), f"{reason}; give a head that was made for this model", "model")
        if stores_table:
            table = None
        elif table is None:
            table = EmbeddingTable(self.vocab_size, self.hidden_size, self.dtype, torch.device("meta"))
        head = Eagle3Head(spec, self.hidden_size, table, self.dtype, device)
        if headers:
            head.check(headers)
        return head

    def load(self, model: DecoderModel) -> Eagle3Head:
        """Return the head with its weights, and with the embeddings of `model` if it stores none."""
        table = model.language_model.embed_tokens
        head = self.build(table.weight.device, table)
        head.load(read_checkpoint(self.path))
        return head


def find_eagle3(config: EngineConfig, model: Model) -> Eagle3Source | None:
    """Return the head that `speculative_config` names for a model; None if it names none.

    Raises:
        ConfigError: the model keeps no hidden states of layers, or the folder holds no head.
    """
    limits = read_speculative_config(config.speculative_config)
    if limits.method != EAGLE3 or not limits.predicted:
        return None
    if not isinstance(model, DecoderModel) or not model.captured_layers:
        reason = f"cannot draft for a {type(model).__name__}, which keeps no hidden states of its layers; leave it out"
        raise config_error(limits.model, reason, "model")
    path = Path(limits.model)
    settings = read_json(path / "config.json")
    if not settings:
        raise CheckpointError(f"{path} has no config.json of an EAGLE-3 head")
    return Eagle3Source(
        path, settings, len(model.spec.layers), model.vocab_size, model.hidden_size, model.dtype, limits.parallel
    )


def make_eagle3_runner(config: EngineConfig, source: Eagle3Source, sizes: MaxSizes) -> Eagle3Runner:
    """Return the runner of a head with its cache; `load` reads its weights. Raise as `Eagle3Source.build` does."""
    from ..worker.eagle3_runner import Eagle3Runner

    count, device = read_speculative_config(config.speculative_config).predicted, config.torch_device
    head = source.build(torch.device("meta"))
    blocks = draft_cache_blocks(config, head.cache_specs, sizes.max_model_len)
    cache = DraftCache(head.cache_specs, blocks, config.block_size, device)
    return Eagle3Runner(count, cache, device, head, source.hidden_size, source.load)


def eagle3_bytes(config: EngineConfig, model: Model, sizes: MaxSizes) -> tuple[int, int]:
    """Return the bytes of the head's weights, largest step and kept hidden states, and those of its cache; zeros without one.

    Raises:
        ConfigError, CheckpointError: as `find_eagle3` and `Eagle3Source.build`.
    """
    source = find_eagle3(config, model)
    if source is None:
        return 0, 0
    head, device = source.build(torch.device("meta")), config.torch_device
    masks = read_speculative_config(config.speculative_config).predicted  # sequences are drafted for one after the other
    step = StepLimits(sizes.step_rows + masks, config.max_num_seqs * sizes.keys, sizes.keys, device)
    kept = sizes.step_rows * head.fc.weight.shape[1] * head.fc.dtype.itemsize
    blocks = draft_cache_blocks(config, head.cache_specs, sizes.max_model_len)
    weights = weight_bytes(cast(Any, head), device)
    return weights + kept + head.forward_bytes(step), blocks * block_bytes(head.cache_specs, config.block_size)
