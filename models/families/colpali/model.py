"""Models that embed each token for late interaction (arXiv 2407.01449).

These are ColPali, ColQwen2, 2.5 and 3, Nemotron-ColEmbed-VL v2 and ColModernVBERT.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....checkpoints.config import positive_int, require, unnest
from ...layers.basic import AddResidual
from ...layers.connectors import ProjectorSpec
from ...layers.linear import Linear
from ...tower_model import TowerModel
from ...vision.encoders import encoder_spec
from ..modernbert.model import MODERNBERT_NAMES, ModernBertEncoder, modernbert_spec
from ..paligemma.model import PaliGemma
from ..qwen2_vl.model import Qwen2VL, Qwen25VL
from ..qwen3_vl.model import Qwen3VL

_OWN = "embedding_proj_layer."
_SIZES = ("embed_dim", "dims", "dim", "projection_dim", "colbert_dim")  # names of the vectors' size in configs of ColQwen3
_PARTS = r"model|vision_tower|language_model|multi_modal_projector|text_model|vision_model|connector"
_OUTER = re.compile(rf"^(vlm\.|model\.(?=({_PARTS})\.))")
_TABLE = "text_model.embeddings.tok_embeddings.weight"
_ADDED = "text_model.embeddings.tok_embeddings.additional_embedding.weight"


def _with_added_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return text_config with a vocabulary that includes the added tokens, which the publisher's layout counts apart."""
    text, added = require(config, "text_config"), config.get("additional_vocab_size") or 0
    return {**text, "vocab_size": positive_int({"vocab_size": 50368, **text}, "vocab_size") + added}


class LateInteraction:
    """The embedder's side of a model with a linear layer over the hidden states of all tokens, and no head.

    transformers stores the model under `vlm.` and `embedding_proj_layer`, the publisher stores the layer as `custom_text_proj`.
    """

    pooling = "tokens"
    text_parts: ClassVar[Sequence[str]] = ("language_model", "head", "embedding_proj_layer")
    head: Any
    ignored: Any
    hidden_size: int
    vector_size: int
    token_size: int

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = unnest(config)
        super().__init__(config, dtype, device)  # type: ignore[call-arg]
        self.head, self.ignored = None, (*self.ignored, "head.")
        self.token_size = self.vector_size = positive_int(
            {"embedding_dim": config.get("embed_dim", 128), **config}, "embedding_dim"
        )
        shards = {"embedding_proj_layer": self.token_size}
        self.embedding_proj_layer = Linear(self.hidden_size, shards, True, dtype, device, exact=True)

    def project_hidden(self, hidden: Tensor, tokens: bool) -> Tensor:
        return self.embedding_proj_layer(hidden)

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: a stored language model head is not used."""

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        renamed = ((_OUTER.sub("", name).replace("custom_text_proj.", _OWN), tensor) for name, tensor in weights)
        return super().convert_weights(renamed)  # type: ignore[misc,no-any-return]


class ColPali(LateInteraction, PaliGemma):
    """PaliGemma as an embedder."""


class ColQwen2(LateInteraction, Qwen2VL):
    """Qwen2-VL as an embedder."""


class ColQwen25(LateInteraction, Qwen25VL):
    """Qwen2.5-VL as an embedder."""


class ColQwen3(LateInteraction, Qwen3VL):
    """Qwen3-VL as an embedder, whose last layer may have no bias. Source: vLLM's colqwen3.py."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        size = next((config[name] for name in _SIZES if config.get(name)), 128)
        super().__init__({"embedding_dim": size, **config}, dtype, device)

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        if not headers or any(name.startswith(_OWN + "bias") for name, _ in self.convert_weights(headers.items())):
            return
        device, shards = self.language_model.embed_tokens.weight.device, {"embedding_proj_layer": self.token_size}
        self.embedding_proj_layer = Linear(self.hidden_size, shards, False, self.dtype, device, exact=True)


class NemotronColEmbed(Qwen3VL):
    """Qwen3-VL whose tokens all see each other. The vectors are the states of the last layer, without norm and projection.

    Source: the publisher's class.
    """

    pooling = "tokens"
    ignored = ("language_model.norm.", "head.")

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text = {**require(config, "text_config"), "is_causal": True}  # the processor makes the prompt one span
        super().__init__({**config, "text_config": text}, dtype, device)
        self.head, self.language_model.norm = None, AddResidual()

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: a stored language model head is not used."""


class ModernVBert(TowerModel):
    """SigLIP, pixel shuffle, one linear projection and ModernBERT (arXiv 2510.01149), without its masked language model."""

    prefixes = (
        ("vision_model.", "tower."),
        ("connector.modality_projection.proj.", "projector.modality_projection."),
        ("connector.modality_projection.", "projector.modality_projection."),
        ("text_model.", "language_model."),
    )
    ignored = ("tower.head.",)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, merge = modernbert_spec(_with_added_tokens(config)), config.get("pixel_shuffle_factor", 4)
        tower = encoder_spec(require(config, "vision_config"), "siglip_vision_model", post_norm=True, merge=merge)
        projector = ProjectorSpec(tower.width, text.hidden_size, ("modality_projection",), group=merge**2, bias=False)
        super().__init__(text, tower, projector, dtype, device, decoder=ModernBertEncoder(text, dtype, device))

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Rename the decoder's tensors, and join the two tables of tokens of the publisher's layout."""
        tables = dict[str, Tensor]()
        for name, tensor in weights:
            if name == _ADDED or (name == _TABLE and len(tensor) < self.spec.vocab_size):
                tables[name] = tensor
                if len(tables) == 2:
                    yield "language_model.embed_tokens.weight", torch.cat([tables[_TABLE], tables[_ADDED]])
                continue
            for old, new in MODERNBERT_NAMES if name.startswith("text_model.") else ():
                name = name.replace(old, new)
            yield name, tensor


class ColModernVBert(LateInteraction, ModernVBert):
    """ModernVBERT as an embedder."""
