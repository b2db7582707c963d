"""Oracles of layers for multi-token prediction: the forward of their publishers, composed of transformers' decoder layers.

Facts: the order of the projection's inputs, the zeros at position 0 and the names of tensors are those of vLLM's
`deepseek_mtp.py`, `glm4_moe_mtp.py`, `glm_ocr_mtp.py`, `qwen3_next_mtp.py` and `qwen3_5_mtp.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from oracle import randomise
from quantized import split_experts
from safetensors.torch import load_file, save_file
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.models.decoder_model import DecoderModel
from sensorium.models.interface import ForwardBatch
from torch import Tensor, nn

STEMS = {
    "text-deepseek_v3": "model.layers.3.",
    "text-qwen3_moe/glm4_moe": "model.layers.3.",
    "glm4v_moe": "model.language_model.layers.3.",
    "glm_ocr": "model.language_model.layers.3.",
    "text-qwen3_next": "mtp.",
    "qwen3_5": "mtp.",
    "qwen3_5_moe": "mtp.",
}
"""Row of the parity suite, and its variant -> the beginning of the published names."""
OWN_NAMES = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
    "": "layers.0.",
}
"""Names after DeepSeek's stem -> names after Qwen's."""
BLOCK = 4


class Drafter(nn.Module):
    """The published forward around transformers' layer, norms, rotary positions, embeddings and head."""

    def __init__(self, model: Any, stem: str, seed: int = 7) -> None:
        super().__init__()
        decoder = model.get_decoder()
        self.model, self.decoder, self.own_names = [model], [decoder], stem == "mtp."  # in lists: not part of the state
        config, number = decoder.config, max(i for i, one in enumerate(decoder.layers) if hasattr(one, "self_attn"))
        self.enorm, self.hnorm, self.norm = (type(decoder.norm)(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = type(decoder.layers[number])(config, number).eval()
        randomise(self, seed)
        for name, tensor in self.state_dict().items():
            if "correction" in name:
                tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) * 0.4)
            if self.own_names and "norm" in name:
                tensor.sub_(1)  # the weight is stored minus 1

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, hidden: Tensor, rows: dict[int, Tensor] | None = None) -> Tensor:
        """Return logits `[n, vocab]`. `positions`: `[axes, n]`. `rows`: embeddings in place of those of tokens."""
        (model,), (decoder,) = self.model, self.decoder
        embedded = decoder.embed_tokens(ids)
        for place, row in (rows or {}).items():
            embedded[place] = row
        if not self.own_names:
            embedded[positions[0] == 0] = 0
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))[None]
        places = positions if len(positions) == 1 else positions[:, None]
        rotations = decoder.rotary_emb(x, position_ids=places)
        mask = torch.full((1, 1, len(ids), len(ids)), torch.finfo(x.dtype).min).triu(1)
        x = self.block(x, position_embeddings=rotations, attention_mask=mask, position_ids=positions[:1])
        return model.lm_head(self.norm(x[0])).float()

    def stored(self, stem: str, joined: bool = False) -> dict[str, Tensor]:
        """Return the tensors by their published names, experts as single matrices or all of them `joined` in one tensor."""
        found, state = {}, self.state_dict()
        for name, tensor in (state if joined else split_experts(state)).items():
            own = name.replace("block.", "", 1) if name.startswith("block.") else name
            own = own.replace("norm.", "shared_head.norm.", 1) if own.startswith("norm.") else own
            if self.own_names:
                start = next(start for start in OWN_NAMES if own.startswith(start))
                own = OWN_NAMES[start] + own.removeprefix(start)
            found[stem + own] = tensor.contiguous().clone()
        return found


def add_mtp(source: Path, target: Path, drafter: Drafter, stem: str, joined: bool = False, **changes: Any) -> Path:
    """Copy a checkpoint and add a drafter's tensors; DeepSeek's layout also repeats embeddings and head.

    `joined`: as for `Drafter.stored`. `changes`: of the decoder's part of config.json.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(source / "model.safetensors") | drafter.stored(stem, joined)
    if not drafter.own_names:
        for copy in ("embed_tokens", "shared_head.head"):  # not equal to those of the model, so that their use would show
            tensors[f"{stem}{copy}.weight"] = torch.randn(4, 4)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    text = config.get("text_config", config)
    text |= ({} if drafter.own_names else {"num_nextn_predict_layers": 1}) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


@torch.inference_mode()
def draft(model: DecoderModel, *inputs: Any, **more: Any) -> Tensor:
    """Return our logits `[n, vocab]`; the arguments are those of `draft_states`."""
    return model.compute_logits(draft_states(model, *inputs, **more))


@torch.inference_mode()
def draft_states(
    model: DecoderModel,
    ids: Tensor,
    positions: Tensor,
    hidden: Tensor,
    cuts: tuple[int, ...] = (),
    rows: dict[int, Tensor] | None = None,
    layer: int = 0,
) -> Tensor:
    """Return our hidden states `[n, hidden]` over a paged cache, in steps that end at the cuts."""
    spec, count, kept = model.mtp_cache_specs[layer], len(ids), hidden.clone()
    blocks = -(-count // BLOCK)
    cache = torch.zeros(spec.planes, blocks + 1, BLOCK, spec.kv_heads, spec.width, dtype=spec.storage_dtype)
    table = (1 + torch.randperm(blocks)).to(torch.int32)[None]
    token, states = torch.arange(count), []
    for first, last in zip((0, *cuts), (*cuts, count), strict=True):
        places = token[first:last]
        slots = table[0].long()[places // BLOCK] * BLOCK + places % BLOCK
        meta = AttentionMetadata((0, last - first), (last,), table, slots, BLOCK)
        inside = {place - first: row for place, row in (rows or {}).items() if first <= place < last}
        batch = ForwardBatch(
            ids[first:last],
            positions[:, first:last],
            [meta],
            [cache],
            torch.tensor(list(inside)) if inside else None,
            torch.stack(list(inside.values())) if inside else None,
        )
        states.append(model.draft(batch, hidden[first:last], layer))
    assert torch.equal(hidden, kept)
    return torch.cat(states)
