"""Make batches of one grid each, and the curriculum that makes them harder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .data import FACES, PRINTED, UNIT, Sample, clip, draw_lines, random_string, receipt_lines, text_size
from .model import merge_order
from .tokens import encode, prompt_ids, token

MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])
PATCH, IGNORE = 8, -100


@dataclass(frozen=True)
class Stage:
    """Difficulty of the images: characters, fonts, pixel sizes, noise, and the shares of receipts and videos."""

    chars: tuple[int, int]
    faces: int
    sizes: tuple[int, int]
    soil: float = 0.0
    receipts: float = 0.0
    lines: int = 2
    clips: float = 0.0


STAGES = (
    Stage((1, 1), 1, (28, 32)),
    Stage((1, 3), 2, (26, 34)),
    Stage((2, 5), 4, (24, 36), 0.5, clips=0.1),
    Stage((3, 8), 7, (20, 40), 0.7, clips=0.1),
    Stage((4, 12), len(FACES), (18, 40), 1.0, 0.1, 3, 0.1),
    Stage((4, 12), len(FACES), (18, 40), 1.0, 0.33, 6, 0.18),
)


@dataclass(frozen=True)
class Batch:
    """`ids, labels [b, tokens]`; item at `start`; `patches [b, t, h*w, 384]`; auxiliary targets `aux [5, b, cells]`."""

    kind: str
    ids: Tensor
    labels: Tensor
    start: int
    patches: Tensor
    grid: tuple[int, int, int]
    aux: Tensor | None


def patchify(frames: Tensor) -> Tensor:
    """Convert frames `[b, f, h, w, 3]` to patches `[b, f/2, n, 3*2*8*8]` in merge order; a single frame is doubled."""
    b, f, h, w, _ = frames.shape
    x = ((frames / 255 - MEAN) / STD).to(torch.float32)
    x = x.repeat(1, 2, 1, 1, 1) if f == 1 else x
    x = x.view(b, -1, 2, h // PATCH, PATCH, w // PATCH, PATCH, 3).permute(3, 5, 0, 1, 7, 2, 4, 6)
    return merge_order(x).flatten(3).permute(1, 2, 0, 3).contiguous()


def _targets(sample: Sample, width: float, height: float, gw: int, gh: int) -> np.ndarray:
    """Return per merged token the characters under its left and right half, their columns, and the line (0: none)."""
    out = np.zeros((5, gh, gw), np.int64)
    sx, sy = gw * UNIT / width, gh * UNIT / height
    for x0, x1, y0, y1, char, column, line in sample.boxes:
        top, bottom = y0 * sy, y1 * sy
        rows = [r for r in range(gh) if min(bottom, (r + 1) * UNIT) - max(top, r * UNIT) >= 5]
        for half in range(2):
            first = int(np.ceil((x0 * sx - UNIT / 4 - half * UNIT / 2) / UNIT))
            last = int(np.ceil((x1 * sx - UNIT / 4 - half * UNIT / 2) / UNIT))
            for r in rows:
                out[half, r, max(0, first) : max(0, last)] = PRINTED.index(char) + 1
                out[2 + half, r, max(0, first) : max(0, last)] = column + 1
                out[4, r, max(0, first) : max(0, last)] = line + 1
    return out.reshape(5, -1)


def _printed(rng: np.random.Generator, stage: Stage, kind: str, count: int) -> tuple[list[Sample], tuple[int, int]]:
    """Draw `count` images with texts of about one size, and return them with their common grid."""
    length, size = int(rng.integers(stage.chars[0], stage.chars[1] + 1)), int(rng.integers(stage.sizes[0], stage.sizes[1] + 1))
    lines = int(rng.integers(2, stage.lines + 1))
    if kind == "receipt":
        size = int(rng.integers(16, 25))
    drafts = []
    for _ in range(count):
        face = FACES[int(rng.integers(stage.faces))]
        n = int(np.clip(length + rng.integers(-1, 2), stage.chars[0], stage.chars[1]))
        content = [random_string(rng, n)] if kind == "text" else receipt_lines(rng, lines)
        drafts.append((content, face, size + int(rng.integers(-1, 2))))
    extents = [text_size(*d) for d in drafts]
    width = max(e[0] for e in extents) + 4 + int(rng.integers(2, 20))
    height = max(e[1] for e in extents) + 4 + int(rng.integers(2, 16))
    gw, gh = max(2, round(width / UNIT)), max(2, round(height / UNIT))
    samples = []
    for content, face, points in drafts:
        tw, th = text_size(content, face, points)
        wide = max(tw + 6, int(width * rng.uniform(0.92, 1.05)))
        samples.append(
            draw_lines(content, face, points, (wide, max(th + 6, int(height * rng.uniform(0.92, 1.05)))), rng, kind, stage.soil)
        )
    return samples, (gh, gw)


def make(rng: np.random.Generator, stage: Stage, size: int) -> Batch:
    """Return the next batch of about `size` images (fewer if they are large)."""
    kind = str(rng.choice(["text", "receipt", "clip"], p=[1 - stage.receipts - stage.clips, stage.receipts, stage.clips]))
    aux = None
    if kind == "clip":
        samples, grid = [clip(rng) for _ in range(max(4, size // 2))], (4, 8, 8)
        frames = torch.from_numpy(np.stack([s.pixels for s in samples]))
    else:
        samples, (gh, gw) = _printed(rng, stage, kind, size if kind == "text" else size // 2)
        grid = (1, gh * 2, gw * 2)
        resized = [
            F.interpolate(
                torch.from_numpy(s.pixels).permute(2, 0, 1)[None], (gh * UNIT, gw * UNIT), mode="bicubic", antialias=True
            )
            for s in samples
        ]
        frames = torch.cat(resized).permute(0, 2, 3, 1)[:, None]
        aux = torch.from_numpy(np.stack([_targets(s, s.pixels.shape[1], s.pixels.shape[0], gw, gh) for s in samples], 1))
    prompt, start = prompt_ids(kind, grid[0] * grid[1] * grid[2] // 4)
    end = token("<|im_end|>")
    answers = [[*encode(s.answer), end] for s in samples]
    longest = max(map(len, answers))
    ids = torch.full((len(samples), len(prompt) + longest), end)
    labels = torch.full_like(ids, IGNORE)
    for i, answer in enumerate(answers):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return Batch(kind, ids, labels, start, patchify(frames), grid, aux)
