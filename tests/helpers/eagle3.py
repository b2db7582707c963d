"""Random EAGLE-3 heads in the published layout: `fc`, `midlayer`, `norm`, `lm_head`, `d2t`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

DRAFT_VOCAB, HEADS, KEYS, DIM, INNER, EPS, THETA = 60, 4, 2, 16, 96, 1e-5, 10_000.0


def settings(vocab: int, hidden: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": vocab,
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KEYS,
        "head_dim": DIM, "intermediate_size": INNER, "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 2048,
        "hidden_act": "silu", "tie_word_embeddings": False, **more,
    }  # fmt: skip


def tensors(vocab: int, hidden: int, target: int, seed: int = 3, layers: int = 1) -> dict[str, Tensor]:
    """Return random tensors by the names of the layout."""
    rng = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng) * shape[-1] ** -0.5

    shapes = {"q_proj": (HEADS * DIM, 2 * hidden), "k_proj": (KEYS * DIM, 2 * hidden), "v_proj": (KEYS * DIM, 2 * hidden)}
    shapes |= {"o_proj": (hidden, HEADS * DIM)}
    chosen = torch.randperm(vocab, generator=rng)[:DRAFT_VOCAB].sort().values
    later = {}
    for number in range(1, layers):
        prefix = f"layers.{number}."
        for name, (rows, columns) in shapes.items():
            width = columns if name == "o_proj" else hidden
            later[f"{prefix}self_attn.{name}.weight"] = drawn(rows, width)
        later |= {f"{prefix}mlp.{name}_proj.weight": drawn(INNER, hidden) for name in ("gate", "up")}
        later[f"{prefix}mlp.down_proj.weight"] = drawn(hidden, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            later[f"{prefix}{name}.weight"] = 1 + 0.3 * torch.randn(hidden, generator=rng)
    norms = {f"midlayer.{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    return {
        **later,
        "fc.weight": drawn(hidden, 3 * target),
        **{f"midlayer.self_attn.{name}.weight": drawn(*shape) for name, shape in shapes.items()},
        "midlayer.mlp.gate_proj.weight": drawn(INNER, hidden),
        "midlayer.mlp.up_proj.weight": drawn(INNER, hidden),
        "midlayer.mlp.down_proj.weight": drawn(hidden, INNER),
        **{name: 1 + 0.3 * torch.randn(hidden, generator=rng) for name in sorted(norms | {"norm.weight"})},
        "lm_head.weight": 3 * drawn(DRAFT_VOCAB, hidden),
        "d2t": chosen - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True),
    }


def write(folder: Path, vocab: int, hidden: int, target: int, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings(vocab, hidden, **more)))
    stored = tensors(vocab, hidden, target, layers=more.get("num_hidden_layers", 1))
    if "ptd_token_id" in more:
        stored["mask_hidden"] = torch.randn(1, 1, 3 * target, generator=torch.Generator().manual_seed(9))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder
