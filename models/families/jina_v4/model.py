"""jina-embeddings-v4: Qwen2.5-VL with an adapter per task, as an embedder of prompts and of tokens (arXiv 2506.18902)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError, hint, short_repr
from ....checkpoints.config import positive_int
from ...layers.linear import Linear
from ..qwen2_vl.model import Qwen25VL

TASKS = ("retrieval", "text-matching", "code")


class JinaEmbeddingsV4(Qwen25VL):
    """A text's vector is the mean of all tokens, an image's that of its own tokens. `task`: the adapter that is merged."""

    text_parts = ("language_model", "head", "multi_vector_projector")
    pooling = "mean"
    pools_items = True

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.head, self.ignored = None, (*self.ignored, "head.")
        tasks = config.get("task_names") or TASKS
        self.task = config.get("task", tasks[0])
        if self.task not in tasks:
            raise ConfigError(f"no task {short_repr(self.task)}; {hint(str(self.task), tasks)}", param="hf_overrides")
        self.token_size = positive_int({"multi_vector_projector_dim": 128, **config}, "multi_vector_projector_dim")
        shards = {"multi_vector_projector": self.token_size}
        self.multi_vector_projector = Linear(self.hidden_size, shards, True, dtype, device, exact=True)

    def project_hidden(self, hidden: Tensor, tokens: bool) -> Tensor:
        return self.multi_vector_projector(hidden) if tokens else hidden

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: a stored language model head is not used."""
