"""Small vision towers of transformers with our spec of each, for tests of the packed tower."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from oracle import ensure_torchvision
from sensorium.models.families.internvl.model import _NAMES as INTERNVL
from sensorium.models.families.pixtral.model import _NAMES as PIXTRAL
from sensorium.models.vision.positions import Grid, in_squares
from sensorium.models.vision.spec import BLOCKS, ENCODER, GATED_BLOCKS, RotarySpec, TableSpec, TowerNames, TowerSpec
from sensorium.models.vision.vit import VisionTower
from sensorium.models.weights import fill
from torch import Tensor
from torch.nn import functional as F

PATCH = 4
SIZE = {"width": 48, "heads": 4, "inner": 80, "depth": 3}
NAMES = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80, "num_hidden_layers": 3, "patch_size": PATCH}
BLOCK_NAMES = {"hidden_size": 48, "num_heads": 4, "intermediate_size": 80, "depth": 3, "patch_size": PATCH}
PIXELS = 3 * PATCH * PATCH
SQUARE = ((1, 4, 4), (3, 4, 4), (1, 4, 4))
SIZES = ((1, 4, 6), (3, 2, 4), (1, 8, 2), (1, 4, 4))
IMAGE_GRIDS = tuple((1, h, w) for _, h, w in SIZES)


@dataclass(frozen=True)
class Case:
    """`build` returns the oracle, `run` its states, from each item's frames `[t, 3, h, w]` or all patches in squares."""

    spec: TowerSpec
    build: Callable[[], Any]
    run: Callable[[Any, list[Tensor], Tensor, Sequence[Grid]], list[Tensor]]
    grids: Sequence[Grid] = IMAGE_GRIDS
    ignored: tuple[str, ...] = ()


def patches(frames: Tensor, merge: int, per_step: int) -> Tensor:
    """Cut `[t, 3, h, w]` into `[patches, 3 * per_step * PATCH * PATCH]`; each frame is repeated to fill a temporal patch."""
    cut = frames.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5)  # [t, h, w, 3, p, p]
    cut = cut[:, :, :, :, None].expand(-1, -1, -1, -1, per_step, -1, -1)
    return torch.cat([in_squares(frame, merge).flatten(0, 1) for frame in cut]).flatten(1)


def hidden(model: Any, frames: list[Tensor], _: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    return list(model(torch.cat(frames), output_hidden_states=True).hidden_states)


def clip_states(model: Any, *given: Any) -> list[Tensor]:
    states = hidden(model, *given)
    return [states[0][:, 1:].flatten(0, 1), states[2][:, 1:].flatten(0, 1)]


def siglip_last(model: Any, frames: list[Tensor], *_: Any) -> list[Tensor]:
    return [model(torch.cat(frames)).last_hidden_state.flatten(0, 1)]


def _padded(frames: list[Tensor]) -> tuple[Tensor, int, int]:
    tall, wide = (max(f.shape[i] for f in frames) for i in (2, 3))
    return torch.cat([F.pad(f, (0, wide - f.shape[3], 0, tall - f.shape[2])) for f in frames]), tall, wide


def pixtral(model: Any, frames: list[Tensor], _: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    pixels, _, _ = _padded(frames)
    sizes = torch.tensor([(h * PATCH, w * PATCH) for _, h, w in grids])
    return [model(pixels, image_sizes=sizes).last_hidden_state[0]]


def idefics(model: Any, frames: list[Tensor], _: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    pixels, tall, wide = _padded(frames)
    mask = torch.zeros(len(frames), tall // PATCH, wide // PATCH, dtype=torch.bool)
    for i, (_, h, w) in enumerate(grids):
        mask[i, :h, :w] = True
    return [model(pixels, patch_attention_mask=mask).last_hidden_state[mask.flatten(1)]]


def siglip2(model: Any, frames: list[Tensor], made: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    counts = [h * w for _, h, w in grids]
    rows = torch.nn.utils.rnn.pad_sequence(list(made.split(counts)), batch_first=True)
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    out = model(rows, pixel_attention_mask=mask, spatial_shapes=torch.tensor([g[1:] for g in grids])).last_hidden_state
    return [out[mask]]


def internvl(model: Any, frames: list[Tensor], _: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    rows = model(torch.cat(frames)).last_hidden_state[:, 1:]
    return [torch.cat([in_squares(one.unflatten(0, (4, -1)), 2).flatten(0, 1) for one in rows])]


def packed(model: Any, _: Any, made: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    return [model(made, grid_thw=torch.tensor(grids)).last_hidden_state]


def glm(model: Any, _: Any, made: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    seen: list[Tensor] = []
    model.post_layernorm.register_forward_hook(lambda module, given, out: seen.append(out))
    model(made, grid_thw=torch.tensor(grids))
    return seen


def qwen3(model: Any, _: Any, made: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    seen: list[Tensor] = []
    for merger in (*model.deepstack_merger_list, model.merger):
        merger.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    model(made, grid_thw=torch.tensor(grids))
    return seen


def paddle(model: Any, _: Any, made: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    pixels = made.view(1, -1, 3, PATCH, PATCH)
    return [model(pixels, grid_thw=torch.tensor(grids)).last_hidden_state]


def kimi(model: Any, _: Any, made: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """Run one item at a time, because the oracle's pooling needs equal numbers of frames."""
    items = made.view(-1, 3, PATCH, PATCH).split([t * h * w for t, h, w in grids])
    made_of = (model(item, grid_thw=torch.tensor([grid])) for item, grid in zip(items, grids, strict=True))
    return [torch.cat([out.last_hidden_state for out in made_of])]


MOON = TowerNames(
    table="patch_embed.pos_emb.position_embeddings",
    post_norm="final_layernorm",
    layers="layers",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
)
ROTARY = {"rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}}
IMAGE = {"image_size": 4 * PATCH}
HEAD = ("merger.", "downsample.", "deepstack_merger_list.")


def case(run: Any, family: str, config: dict[str, Any], spec: dict[str, Any], **more: Any) -> Case:
    def build() -> Any:
        ensure_torchvision()
        home = f"transformers.models.{family}"
        made = getattr(importlib.import_module(f"{home}.configuration_{family}"), config["config"])
        cls = getattr(importlib.import_module(f"{home}.modeling_{family}"), config["model"])
        options = {k: v for k, v in config.items() if k not in ("config", "model")}
        return cls._from_config(made(**options), attn_implementation="eager").eval()

    shape = SIZE | {"patch_dim": PIXELS} | spec
    return Case(TowerSpec(**shape), build, run, **more)


SIGLIP = {"config": "SiglipVisionConfig", "model": "SiglipVisionModel", "vision_use_head": False, **NAMES, **IMAGE}
ENC = {"names": ENCODER, "table": TableSpec(4), "act": "gelu_pytorch_tanh"}
CASES = {
    "clip": case(
        clip_states,
        "clip",
        {"config": "CLIPVisionConfig", "model": "CLIPVisionModel", **NAMES, **IMAGE},
        ENC
        | {"act": "quick_gelu", "eps": 1e-5, "patch_bias": False, "class_token": True, "pre_norm": True, "features": (0, 2)},
        grids=SQUARE,
    ),
    "siglip": case(siglip_last, "siglip", SIGLIP, ENC | {"post_norm": True}, grids=SQUARE),
    "siglip2": case(
        siglip2,
        "siglip2",
        {"config": "Siglip2VisionConfig", "model": "Siglip2VisionModel", **NAMES, "num_patches": 16, "vision_use_head": False},
        ENC | {"table": TableSpec(4, "bilinear", antialias=True), "post_norm": True},
    ),
    "idefics3": case(
        idefics,
        "idefics3",
        {"config": "Idefics3VisionConfig", "model": "Idefics3VisionTransformer", **NAMES, **IMAGE},
        ENC | {"table": TableSpec(4, "buckets"), "post_norm": True},
    ),
    "pixtral": case(
        pixtral,
        "pixtral",
        {"config": "PixtralVisionConfig", "model": "PixtralVisionModel", **NAMES, "image_size": 64, **ROTARY},
        {
            "rms": True, "eps": 1e-5, "patch_bias": False, "qkv_bias": False, "out_bias": False, "mlp_bias": False,
            "pre_norm": True, "rotary": RotarySpec(order="even_odd"), "names": PIXTRAL,
        },
    ),
    "internvl": case(
        internvl,
        "internvl",
        {
            "config": "InternVLVisionConfig", "model": "InternVLVisionModel", **NAMES, "image_size": [16, 16],
            "patch_size": [4, 4], "attention_bias": True,
        },
        {"table": TableSpec(4), "class_token": True, "layer_scale": True, "merge": 2, "names": INTERNVL},
        grids=SQUARE,
    ),
    "internvl, normed queries": case(
        internvl,
        "internvl",
        {
            "config": "InternVLVisionConfig", "model": "InternVLVisionModel", **NAMES, "image_size": [20, 20],
            "patch_size": [4, 4], "use_qk_norm": True, "norm_type": "rms_norm",
        },
        {
            "table": TableSpec(5, "bicubic"), "class_token": True, "layer_scale": True, "merge": 2, "names": INTERNVL,
            "rms": True, "qk_norm": "all", "qkv_bias": False,
        },
        grids=SQUARE,
    ),
    "qwen3_vl": case(
        qwen3,
        "qwen3_vl",
        {
            "config": "Qwen3VLVisionConfig", "model": "Qwen3VLVisionModel", **BLOCK_NAMES, "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1], "out_hidden_size": 32,
        },
        {
            "patch_dim": 2 * PIXELS, "act": "gelu_pytorch_tanh", "merge": 2, "rotary": RotarySpec(),
            "table": TableSpec(6, "bilinear", align_corners=True), "features": (1, 2, 3),
            "names": replace(BLOCKS, mlp=("mlp.linear_fc1", "mlp.linear_fc2")),
        },
        grids=SIZES,
        ignored=HEAD,
    ),
    "glm4v": case(
        glm,
        "glm4v",
        {
            "config": "Glm4vVisionConfig", "model": "Glm4vVisionModel", **BLOCK_NAMES, "out_hidden_size": 80, "image_size": 20,
        },
        {
            "patch_dim": 2 * PIXELS, "act": "silu", "merge": 2, "rotary": RotarySpec(), "rms": True, "eps": 1e-5,
            "table": TableSpec(5, "bicubic"), "patch_norm": True, "post_norm": True, "qkv_bias": False, "out_bias": False,
            "mlp_bias": False, "names": replace(GATED_BLOCKS, table="embeddings.position_embedding.weight"),
        },
        ignored=HEAD,
    ),
    "glm_ocr": case(
        glm,
        "glm_ocr",
        {"config": "GlmOcrVisionConfig", "model": "GlmOcrVisionModel", **BLOCK_NAMES, "out_hidden_size": 32},
        {
            "patch_dim": 2 * PIXELS, "act": "silu", "merge": 2, "rotary": RotarySpec(), "rms": True, "eps": 1e-5,
            "post_norm": True, "qk_norm": "head", "names": GATED_BLOCKS,
        },
        grids=SIZES,
        ignored=HEAD,
    ),
    "paddleocr_vl": case(
        paddle,
        "paddleocr_vl",
        {"config": "PaddleOCRVisionConfig", "model": "PaddleOCRVisionModel", **NAMES, "image_size": 20},
        ENC | {"table": TableSpec(5, "bilinear"), "rotary": RotarySpec(), "post_norm": True},
    ),
    "kimi_k25": case(
        kimi,
        "kimi_k25",
        {
            "config": "Kimi_K25VisionConfig", "model": "Kimi_K25VisionModel", **NAMES, "pos_emb_height": 5, "pos_emb_width": 5,
        },
        {
            "act": "gelu_pytorch_tanh", "eps": 1e-5, "table": TableSpec(5, "bicubic", frames=4), "temporal_attention": True,
            "rotary": RotarySpec(order="alternating"), "post_norm": True, "names": MOON,
        },
        grids=SIZES,
    ),
    "ernie4_5_vl_moe": case(
        packed,
        "ernie4_5_vl_moe",
        {
            "config": "Ernie4_5_VLMoeVisionConfig", "model": "Ernie4_5_VLMoeVisionTransformerPretrainedModel", **BLOCK_NAMES,
        },
        {
            "act": "quick_gelu", "merge": 2, "patch_bias": False, "rotary": RotarySpec(), "post_norm": True,
            "names": replace(BLOCKS, post_norm="ln"),
        },
        grids=SIZES,
    ),
}  # fmt: skip


def make_items(grids: Sequence[Grid]) -> list[Tensor]:
    gen = torch.Generator().manual_seed(1)
    return [torch.randn(t, 3, h * PATCH, w * PATCH, generator=gen) for t, h, w in grids]


def load(case: Case, oracle: Any, dtype: torch.dtype = torch.float32) -> VisionTower:
    tower = VisionTower(case.spec, dtype, torch.device("cpu"))
    skipped = (*case.ignored, *case.spec.unbuilt)
    stored = {name.removeprefix("vision_model."): tensor for name, tensor in oracle.state_dict().items()}
    fill(tower, ((name, tensor) for name, tensor in stored.items() if not name.startswith(skipped)), ())
    return tower


def make_patches(case: Case, items: list[Tensor]) -> Tensor:
    per_step = case.spec.patch_dim // PIXELS
    return torch.cat([patches(frames, case.spec.merge, per_step) for frames in items])
