"""Logits of Qwen2-VL and Qwen2.5-VL against transformers on small random checkpoints, every tensor having its say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import build_checkpoint, load_oracle, token_ids
from PIL import Image
from safetensors.torch import load_file, save_file
from sensorium.engine.config import load_model_files
from sensorium.engine.loader import resolve
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.mm.errors import CheckpointError
from sensorium.mm.positions import mrope_positions
from sensorium.mm.registry import find
from sensorium.mm.types import ItemGeometry, PlaceholderRange
from sensorium.models import weights
from sensorium.models.interface import ForwardBatch

VARIANTS = {
    "plain": {},
    "tied": {"tie": True},
    "one kv head": {"kv_heads": 1, "heads": 2, "hidden": 64, "vision_heads": 2},
    "all kv heads": {"kv_heads": 4, "window": 84},
    "wide heads": {"hidden": 128, "heads": 2, "kv_heads": 2, "full_attention": (0, 1, 2, 3), "patch": 8, "window": 32},
}
CASES = {"text": "", "image": "i", "images": "iii", "video": "v", "mixed": "ivi"}


def load_ours(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    files = load_model_files(path)
    model = resolve(find(files.architecture).model)(files.config, dtype, torch.device("cpu"))
    weights.load(path, model)
    return model


def make_inputs(
    processor: Any, items: str, seed: int = 0
) -> tuple[dict[str, Any], list[tuple[PlaceholderRange, ItemGeometry]]]:
    """transformers' own tensors for a prompt with pictures (i) and clips (v) between words, and where they sit."""
    rng = np.random.default_rng(seed)

    def noise(*shape: int) -> np.ndarray:
        return rng.integers(0, 256, (*shape, 3), dtype=np.uint8)

    sizes = [(90, 130), (60, 60), (140, 70)]
    images = [Image.fromarray(noise(*sizes[i % 3])) for i, kind in enumerate(items) if kind == "i"]
    videos = [noise(6, 80, 100) for kind in items if kind == "v"]
    pads = {"i": "<|vision_start|><|image_pad|><|vision_end|>", "v": "<|vision_start|><|video_pad|><|vision_end|>"}
    text = "def f(x):" + " and ".join(pads[kind] for kind in items) + " return it"
    made = dict(processor(text=[text], images=images or None, videos=videos or None, return_tensors="pt"))
    grids = {"i": iter(made.get("image_grid_thw", ())), "v": iter(made.get("video_grid_thw", ()))}
    step = float(made.get("second_per_grid_ts", [0.0])[0])
    ids, placed, at = made["input_ids"][0], [], 0
    names = {"i": token_ids()["<|image_pad|>"], "v": token_ids()["<|video_pad|>"]}
    for kind in items:
        t, h, w = (int(n) for n in next(grids[kind]))
        geometry = ItemGeometry(t, h, w, 2, 2 * step if kind == "v" and step else 1.0)
        at = int((ids[at:] == names[kind]).nonzero()[0]) + at
        placed.append((PlaceholderRange(at, geometry.num_embeds), geometry))
        at += geometry.num_embeds
    return made, placed


def run_oracle(model: Any, made: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
    inputs = {k: v for k, v in made.items() if k not in ("attention_mask", "second_per_grid_ts")}
    with torch.inference_mode():
        return model(**inputs, position_ids=positions[:, None]).logits[0].float()


def run_ours(model: Any, made: dict[str, Any], placed: list[Any], positions: torch.Tensor, block: int = 4) -> torch.Tensor:
    """One request, all rows at once, on scattered blocks."""
    ids = made["input_ids"][0]
    count = len(ids)
    rows = {"image": [], "video": []}
    for modality, (pixels, grid) in {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }.items():
        if pixels in made:
            rows[modality] = model.embed_multimodal(modality, {pixels: made[pixels], grid: made[grid]})
    queue = {k: iter(v) for k, v in rows.items()}
    kinds = ["video" if ids[r.offset] == token_ids()["<|video_pad|>"] else "image" for r, _ in placed]
    index = [torch.arange(r.offset, r.end) for r, _ in placed]
    blocks = -(-count // block)
    table = torch.arange(blocks, 0, -1, dtype=torch.int32)[None]
    token = torch.arange(count)
    attn = AttentionMetadata((0, count), (count,), table, table[0].long()[token // block] * block + token % block, block)
    caches = [torch.zeros(2, blocks + 1, block, s.kv_heads, s.head_dim, dtype=s.dtype) for s in model.cache_specs]
    batch = ForwardBatch(
        ids,
        positions,
        [attn] * len(caches),
        caches,
        torch.cat(index) if index else None,
        torch.cat([next(queue[kind]) for kind in kinds]) if index else None,
    )
    with torch.inference_mode():
        return model.compute_logits(model.forward(batch))


def compare(path: Path, items: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    oracle, processor = load_oracle(path)
    made, placed = make_inputs(processor, items, seed)
    positions, _ = mrope_positions(made["input_ids"].shape[1], placed, 3)
    return run_ours(load_ours(path), made, placed, positions), run_oracle(oracle, made, positions)


def tolerance(theirs: torch.Tensor) -> float:
    return 2e-4 * max(1.0, float(theirs.std()))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal(family: str, case: str, checkpoint: Path, checkpoint2: Path) -> None:
    ours, theirs = compare(checkpoint if family == "qwen2_5_vl" else checkpoint2, CASES[case])
    assert float(theirs.std()) >= 1.0
    assert (ours - theirs).abs().max() < tolerance(theirs)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("name", list(VARIANTS)[1:])
def test_variants(family: str, name: str, tmp_path: Path) -> None:
    ours, theirs = compare(build_checkpoint(tmp_path, family, 1, **VARIANTS[name]), "iv", 1)
    assert (ours - theirs).abs().max() < tolerance(theirs)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family: str, dtype: torch.dtype, checkpoint: Path, checkpoint2: Path) -> None:
    """Near the float32 answer, as far as the format allows; unrelated logits would be 1.4 standard deviations off."""
    checkpoint = checkpoint if family == "qwen2_5_vl" else checkpoint2
    oracle, processor = load_oracle(checkpoint)
    made, placed = make_inputs(processor, "iv")
    positions, _ = mrope_positions(made["input_ids"].shape[1], placed, 3)
    theirs = run_oracle(oracle, made, positions)
    ours = run_ours(load_ours(checkpoint, dtype), made, placed, positions)
    assert ours.dtype == torch.float32
    assert (ours - theirs).std() / theirs.std() < (0.1 if dtype == torch.bfloat16 else 0.02)


def test_sharded_and_old_names(checkpoint: Path, tmp_path: Path) -> None:
    sharded = build_checkpoint(tmp_path / "s", shard_size="200KB")
    assert (sharded / "model.safetensors.index.json").exists()
    stored = dict(weights.read_checkpoint(checkpoint))
    assert stored.keys() == dict(weights.read_checkpoint(sharded)).keys()
    swap = [("model.visual.", "visual."), ("model.language_model.", "model.")]
    names = stored if any(n.startswith("model.language_model.") for n in stored) else {}
    swap = swap if names else [("visual.", "model.visual."), ("model.", "model.language_model.")]
    other = tmp_path / "o"
    other.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (other / file.name).write_bytes(file.read_bytes())
    save_file({weights.rename(n, swap): t for n, t in stored.items()}, other / "model.safetensors")
    _, processor = load_oracle(checkpoint)
    made, placed = make_inputs(processor, "i")
    positions, _ = mrope_positions(made["input_ids"].shape[1], placed, 3)
    expected = run_ours(load_ours(checkpoint), made, placed, positions)
    for folder in (sharded, other):
        assert torch.equal(run_ours(load_ours(folder), made, placed, positions), expected)


def test_tied_head_stored_or_not(tmp_path: Path) -> None:
    """A tied head may be stored beside the table; the table is what counts, as in transformers."""
    path = build_checkpoint(tmp_path, tie=True)
    stored = dict(weights.read_checkpoint(path))
    assert not any("lm_head" in name for name in stored)
    _, processor = load_oracle(path)
    made, placed = make_inputs(processor, "i")
    positions, _ = mrope_positions(made["input_ids"].shape[1], placed, 3)
    expected = run_ours(load_ours(path), made, placed, positions)
    table = next(tensor for name, tensor in stored.items() if name.endswith("embed_tokens.weight"))
    save_file(stored | {"lm_head.weight": torch.zeros_like(table)}, path / "model.safetensors")
    assert torch.equal(run_ours(load_ours(path), made, placed, positions), expected)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, shard_size="200KB")
    shard = sorted(path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load_ours(path)


def _unseen_tensors(path: Path) -> list[str]:
    """Tensors that may be zeroed without the comparison with ours noticing."""
    oracle, processor = load_oracle(path)
    made, placed = make_inputs(processor, "iv")
    positions, _ = mrope_positions(made["input_ids"].shape[1], placed, 3)
    ours = run_ours(load_ours(path), made, placed, positions)
    parameters, unseen = dict(oracle.named_parameters()), []
    for name in parameters:
        kept = parameters[name].data.clone()
        parameters[name].data.zero_()
        theirs = run_oracle(oracle, made, positions)
        parameters[name].data.copy_(kept)
        difference = (ours - theirs).abs().max()
        if not (difference > 100 * tolerance(ours)):
            unseen.append(name)
    return unseen


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_comparison_sees_every_tensor(family: str, checkpoint: Path, checkpoint2: Path) -> None:
    assert _unseen_tensors(checkpoint if family == "qwen2_5_vl" else checkpoint2) == []


def test_bad_weights_are_named(checkpoint: Path, tmp_path: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    name = next(n for n in stored if n.endswith("norm1.weight"))
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())

    def attempt(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        load_ours(tmp_path)

    with pytest.raises(CheckpointError, match=r"lacks visual\.\S+norm1\.weight; it does not fit"):
        attempt({k: v for k, v in stored.items() if k != name})
    with pytest.raises(CheckpointError, match=r"lacks .* and \d+ more"):
        attempt({k: v for k, v in stored.items() if ".mlp." not in k})
    with pytest.raises(CheckpointError, match="holds unknown surplus"):
        attempt(stored | {"surplus.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="has shape"):
        attempt(stored | {name: torch.zeros(3)})
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(CheckpointError, match="not readable"):
        load_ours(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        load_ours(tmp_path)
