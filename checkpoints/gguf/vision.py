"""Encoders of GGUF models (mmproj files): their part of the config, and their tensors under the names of the Hub's layout.

Source: the conversion scripts and the image code (clip.cpp) of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...callers.errors import CheckpointError, ConfigError, short_repr
from ...kernels.linear.blocks import BLOCKS, BlockWeight
from ..config import positive_int
from .architectures import PROJECTORS, ImageProjector
from .reader import Gguf, GgufTensor

Load = Callable[[GgufTensor], Tensor]
Named = tuple[str, str, Tensor]
"""Name, type and tensor."""
_DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)")
_DEEPSTACK_PARTS = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_BLOCK = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
_SHAPE = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "image_size": "image_size",
    "patch_size": "patch_size",
}


def check_encoder(model: Gguf, encoder: Gguf) -> None:
    """Raise ConfigError if the encoder is not supported, or is that of another text model."""
    kind = str(encoder.metadata.get("clip.projector_type"))
    alone = f"move {encoder.path.name} to another folder to run the text model alone"
    if kind not in PROJECTORS:
        names = ", ".join(PROJECTORS)
        raise ConfigError(f"{encoder.path.name} has the projector {short_repr(kind)}; supported are {names}; {alone}")
    models, width = PROJECTORS[kind].models, _width(encoder)
    text_width = model.metadata.get(f"{model.architecture}.embedding_length")
    if model.architecture not in models or not isinstance(width, int) or not isinstance(text_width, int) or width != text_width:
        raise ConfigError(
            f"{encoder.path.name} makes rows of width {short_repr(width)} for {' or '.join(models)}, and {model.path.name} is "
            f"{model.architecture} of width {short_repr(text_width)}; {alone}"
        )


def _width(encoder: Gguf) -> object:
    """Return the width of encoder rows."""
    last = PROJECTORS[encoder.metadata["clip.projector_type"]].last
    tensor = encoder.tensors.get(last)
    return encoder.metadata.get("clip.vision.projection_dim") if not last else None if tensor is None else tensor.shape[0]


def encoder_config(model: Gguf, encoder: Gguf) -> dict[str, Any]:
    """Return architecture, vision_config and the ids of placeholders."""
    projector = PROJECTORS[encoder.metadata["clip.projector_type"]]
    shape = {
        new: encoder.metadata[f"clip.vision.{old}"] for old, new in _SHAPE.items() if f"clip.vision.{old}" in encoder.metadata
    }
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size"):
        positive_int(shape, key, encoder.path.name)
    tokens = {text: number for number, text in enumerate(model.metadata.get("tokenizer.ggml.tokens", []))}
    return {"architectures": [projector.models[model.architecture]], **projector.config(encoder, shape, tokens)}


def vocabulary_rows(model: Gguf) -> int:
    """Return the number of token embeddings, with one for the placeholder of images if the vocabulary lacks it."""
    rows, tokens = model.tensors["token_embd.weight"].shape[0], model.metadata.get("tokenizer.ggml.tokens", [])
    token = "" if model.encoder is None else PROJECTORS[model.encoder.metadata["clip.projector_type"]].image_token
    return max(rows, len(tokens) + 1) if token and token not in tokens else rows


def encoder_tensors(encoder: Gguf, load: Load) -> Iterator[Named]:
    """Yield the tensors under the Hub's names, with their types."""
    projector = PROJECTORS[encoder.metadata["clip.projector_type"]]
    width, tensors = encoder.metadata.get("clip.vision.embedding_length"), encoder.tensors
    down = tensors.get("v.blk.0.ffn_down.weight")
    swapped = down is not None and down.shape[-1] == width != down.shape[0]
    for name, info in tensors.items():
        name_match = _BLOCK.fullmatch(name)
        if name_match is not None:
            layer, part, end = name_match.groups()
            if swapped and "ffn_gate" not in name:  # older files have the two names swapped
                part = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(part, part)
            ending = f".{end}" * (part not in projector.bare)
            target = f"{projector.layers}.{layer}.{projector.parts.get(part, part)}{ending}"
            if projector.paired and part in ("attn_q", "attn_k"):
                yield target, info.kind, in_halves(name, load(info), encoder.metadata["clip.vision.attention.head_count"])
            elif not projector.fused or part not in ("attn_q", "attn_k", "attn_v"):
                yield target, info.kind, load(info)
            elif part == "attn_q":
                yield target, *_joined(encoder, [name.replace("attn_q", f"attn_{p}") for p in "qkv"], load)
        elif name == "v.patch_embd.weight" and f"{name}.1" in tensors:  # the two frames of a patch
            halves = [load(info), load(tensors[f"{name}.1"])]
            if halves[0].shape != halves[1].shape or halves[0].ndim != 4:
                raise CheckpointError(f"{name} and {name}.1 in {encoder.path.name} differ in shape; download it again")
            yield f"{projector.whole['v.patch_embd']}.weight", "F32", torch.stack([half.float() for half in halves], 2)
        elif name_match := _DEEPSTACK.fullmatch(name):
            layers = sorted({int(match[1]) for match in map(_DEEPSTACK.fullmatch, tensors) if match})
            index, part = layers.index(int(name_match[1])), _DEEPSTACK_PARTS[name_match[2]]
            yield f"model.visual.deepstack_merger_list.{index}.{part}.{name_match[3]}", info.kind, load(info)
        elif name not in ("v.patch_embd.weight.1", "v.token_embd.img_break"):
            yield _whole(projector, name, info, load(info))


def _whole(projector: ImageProjector, name: str, info: GgufTensor, tensor: Tensor) -> Named:
    if name in projector.whole:
        return projector.whole[name], info.kind, tensor
    stem, _, end = name.rpartition(".")
    hub_name = projector.whole.get(stem, stem) + f".{end}" * (not stem.endswith(projector.bare or "?"))
    if hub_name.endswith("mm_input_projection.weight"):
        hub_name = hub_name.replace(".weight", "_weight")
    return hub_name, info.kind, tensor - 1.0 if hub_name.endswith(projector.norms) and projector.norms else tensor


def _joined(encoder: Gguf, names: list[str], load: Load) -> tuple[str, Tensor]:
    """Concatenate the rows of tensors. Return the type and the result, dequantised if the types differ."""
    if missing := [name for name in names if name not in encoder.tensors]:
        raise CheckpointError(f"{encoder.path.name} lacks {missing[0]}; download it again")
    infos = [encoder.tensors[name] for name in names]
    if len({(info.kind, info.shape[1:]) for info in infos}) == 1:
        return infos[0].kind, torch.cat([load(info) for info in infos])
    if len({info.shape[1:] for info in infos}) > 1:
        raise CheckpointError(f"{names[0]} and its keys and values in {encoder.path.name} differ in width")
    return "F32", torch.cat([dequantized(info, load) for info in infos])


def dequantized(info: GgufTensor, load: Load) -> Tensor:
    """Return a tensor in float32."""
    if info.kind not in BLOCKS:
        return load(info).float()
    return BlockWeight(load(info).flatten(0, -2), info.kind).dequantize().view(info.shape)


def in_halves(name: str, tensor: Tensor, heads: object) -> Tensor:
    """Reorder the rows of each head from adjacent pairs to halves."""
    if type(heads) is not int or heads < 1 or len(tensor) % (2 * heads):
        raise CheckpointError(f"{name} has {len(tensor)} rows, which do not make {short_repr(heads)} heads")
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2)
