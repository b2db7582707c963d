"""How much memory an engine takes, in closed form from its options and the model's. Runs nothing, allocates nothing."""

from __future__ import annotations

from ..mm.errors import ConfigError
from ..processors.interface import ProcessingInfo
from .config import EngineConfig
from .largest import most_rows

_LEAST_ENCODER_CACHE = 128 << 20
_LARGEST_ITEMS = 4  # held at once by default


def largest_items(config: EngineConfig, info: ProcessingInfo, max_model_len: int) -> dict[str, int]:
    """Modality -> encoder rows of its largest item under the engine's own options, below `max_model_len`.

    Modalities of which a prompt may hold none are left out. What the options of a single request allow beyond that is
    admitted as far as the caches hold it.
    """
    allowed = [name for name in info.modalities if config.limit_mm_per_prompt.get(name) != 0]
    return {name: most_rows(info, name, config.media, max_model_len - 1) for name in allowed}


def encoder_cache_budget(config: EngineConfig, info: ProcessingInfo, row_bytes: int, max_model_len: int) -> int:
    """Bytes that encoder rows may take.

    Args:
        row_bytes: of one encoder row.

    Raises:
        ConfigError: `encoder_cache_bytes` does not hold the largest item that may come.
    """
    rows, modality = max(((rows, name) for name, rows in largest_items(config, info, max_model_len).items()), default=(0, ""))
    if config.encoder_cache_bytes is None:
        return max(_LEAST_ENCODER_CACHE, _LARGEST_ITEMS * rows * row_bytes)
    if config.encoder_cache_bytes < rows * row_bytes:
        item = f"the largest {modality} has {rows} encoder rows, {rows * row_bytes} bytes"
        raise ConfigError(
            f"encoder_cache_bytes={config.encoder_cache_bytes} is too small: {item}; raise it, or lower max_model_len or "
            "the sizes in mm_processor_kwargs"
        )
    return config.encoder_cache_bytes
