"""The parity suite (tests/models/families/test_parity.py) takes one `Family` object per model family.

To add one, set FAMILY (or FAMILIES, a list) in `tests/families/<family>.py`. A complete example:

    import transformers as tf
    from family import Family
    from oracle import fast_tokenizer, randomise, text_config

    def build(seed, tie=False, layers=3):
        words = fast_tokenizer(["<image>", "<eos>"], eos_token="<eos>", pad_token="<eos>")  # ids 640, 641
        config = tf.LlavaConfig(
            text_config=tf.LlamaConfig(**text_config(words, tie=tie, num_hidden_layers=layers)),
            vision_config=tf.CLIPVisionConfig(hidden_size=64, image_size=56, patch_size=14, ...),
            image_token_id=words.convert_tokens_to_ids("<image>"),
        )
        model = tf.LlavaForConditionalGeneration(config).eval()
        randomise(model, seed)  # makes every tensor matter; add `sharpen(model.model.vision_tower)` if test_every_tensor_* asks
        return model, tf.LlavaProcessor(image_processor=..., tokenizer=words, patch_size=14, image_token="<image>")

    FAMILY = Family(
        "llava",
        build,
        placeholders={"image": "<image>"},               # the placeholder of one item in a prompt's text
        sizes={"image": [(90, 130), (60, 60), (200, 40)]},  # images (h, w), videos (frames, h, w), audio (samples,)
        variants={"tied": {"tie": True}},                # more checkpoints whose logits are compared
        layouts={"transformers 4": [("model.language_model.", "language_model.model.")]},  # (new, old) prefixes
    )

Other fields have defaults that fit most families; override what differs (see `Family`). If a test must leave something
out, give the reason in `silent`, `tolerance_note` or `own_positions`; the suite prints it. Keep the checkpoint small
(hidden size 64, 3 layers): the default tests of a family take about 5 s on one core. Run one family with

    make test ARGS="tests/models/families/test_parity.py -k llava"
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import load_oracle, save_checkpoint
from PIL import Image

Data = Mapping[str, list[Any]]
"""Media of one prompt by modality: PIL images, uint8 videos `[frames, h, w, 3]`, float32 audio `[samples]`."""

LETTERS = {"i": "image", "v": "video", "a": "audio", "c": "vision_chunk"}
RATE = 16_000
FPS = 4.0  # frames per second of videos, unless a family sets it
LAYOUTS: Mapping[str, Sequence[tuple[str, str]]] = {
    "transformers 4": [
        ("vision_tower.", "vision_tower.vision_model."),
    ],
    "transformers 5": [
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
    ],
}
"""Prefixes of vision tower, projector and decoder in older and newer transformers releases; see `Family.layouts`."""

# (height, width): even sizes, odd sizes, slivers, and ratios up to 1:150
IMAGE_SIZES = [
    (28, 28), (56, 56), (64, 64), (224, 224), (336, 336), (448, 448), (480, 640), (640, 480), (97, 103), (103, 97),
    (1, 1), (1, 100), (100, 1), (13, 300), (300, 13), (29, 27), (42, 70), (70, 42), (55, 57), (200, 40),
    (40, 200), (333, 111), (111, 333), (500, 501), (512, 384), (384, 512), (31, 900), (900, 31), (6, 900), (900, 6),
    (672, 336), (336, 672), (1000, 250), (250, 1000), (799, 601), (57, 301), (301, 57), (160, 90), (720, 404), (385, 383),
]  # fmt: skip
VIDEO_SIZES = [(1, 56, 56), (2, 90, 60), (3, 60, 90), (4, 28, 200), (5, 200, 28), (6, 80, 100), (8, 31, 300), (13, 64, 64)]
AUDIO_SIZES = [
    (n,) for n in (400, 481, 640, 641, 799, 801, 1600, 1601, 3199, 5000, 8000, 15_999, 16_000, 16_001, 24_000, 31_337)
] + [(2000 * n + 7 * n * n,) for n in range(1, 25)]


def call_processor(processor: Any, text: str, data: Data) -> dict[str, Any]:
    """Run transformers' processor on one prompt."""
    names = {"image": "images", "video": "videos", "audio": "audio"}
    media = {names[modality]: values for modality, values in data.items() if values}
    rate = {"sampling_rate": RATE} if "audio" in media else {}
    return dict(processor(text=[text], **media, **rate, return_tensors="pt"))


def call_sampled(processor: Any, text: str, data: Data) -> dict[str, Any]:
    """Run transformers' processor on videos that are already sampled: every frame is used, at FPS."""
    videos, options = data.get("video", ()), dict[str, Any]()
    if videos:
        metadata = [{"fps": FPS, "total_num_frames": len(one), "frames_indices": list(range(len(one)))} for one in videos]
        options = {"videos": [one.copy() for one in videos], "video_metadata": metadata, "do_sample_frames": False}
    if "image" in data:
        options["images"] = data["image"]
    return dict(processor(text=[text], **options, return_tensors="pt"))


def as_sampled(modality: str, media: Any) -> Any:
    """Return media for `multi_modal_data`, with videos as `call_sampled` passes them."""
    return (media, {"fps": FPS, "do_sample_frames": False}) if modality == "video" else media


def run_oracle(model: Any, inputs: Mapping[str, Any], answer: Sequence[int], positions: torch.Tensor | None) -> torch.Tensor:
    """Return the oracle's logits `[prompt + answer - 1, vocab]`: first the prompt, then the answer teacher-forced on its cache.

    Two calls, because an answer may hold placeholder tokens as text. `positions`: int64 `[axes, prompt + answer]`, or None.
    """
    known = inspect.signature(model.forward).parameters
    kept = {name: value for name, value in inputs.items() if name in known}
    start, tail = inputs["input_ids"].shape[1], torch.tensor([answer[:-1]], dtype=torch.long)
    place = [{}, {}] if positions is None else [{"position_ids": part[:, None]} for part in _split(positions, start)]
    if positions is not None:
        place[1]["position_ids"] = place[1]["position_ids"][..., : tail.shape[1]]
    mask = {"attention_mask": torch.ones(1, start + tail.shape[1], dtype=torch.long)} if "attention_mask" in known else {}
    with torch.inference_mode():
        first = model(**kept, **place[0], use_cache=True)
        if not tail.numel():
            return first.logits[0].float()
        cache = "cache_params" if "cache_params" in known else "past_key_values"  # the first is Mamba's
        rest = model(input_ids=tail, **{cache: first[cache]}, **mask, **place[1])
    return torch.cat([first.logits[0], rest.logits[0]]).float()


def same_names(inputs: Mapping[str, Any], features: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name and the processed tensors of all items, concatenated, with the oracle's tensor of that name."""
    ours: dict[str, list[torch.Tensor]] = {}
    for feature in features:
        for name, element in feature.kwargs.items():
            ours.setdefault(name, []).append(torch.as_tensor(element.data).flatten())
    for name, parts in ours.items():
        assert name in inputs, f"{name} is not in the oracle's {sorted(inputs)}; pair tensors in the row's `tensors`"
        yield name, torch.cat(parts), torch.as_tensor(inputs[name]).flatten()


def rows_in_squares(inputs: Mapping[str, Any], features: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Do the same as `same_names` for families that take patches in squares of 2 x 2 where transformers has rows of them."""
    start, squares = 0, []
    for t, h, w in inputs["image_grid_thw"].tolist():
        grid = inputs["pixel_values"][start : start + t * h * w].view(h // 2, 2, w // 2, 2, -1)
        squares.append(grid.transpose(1, 2).reshape(t * h * w, -1))
        start += t * h * w
    return same_names({**inputs, "pixel_values": torch.cat(squares)} if squares else inputs, features)


def patches_in_squares(
    merge: int, patch: int
) -> Callable[[Mapping[str, Any], Sequence[Any]], Iterator[tuple[str, torch.Tensor, torch.Tensor]]]:
    """Return `Family.tensors` for families that take patches in squares of merge x merge where transformers has images."""

    def pairs(inputs: Mapping[str, Any], features: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        ordered = sorted(features, key=lambda feature: feature.range.offset)
        patches = torch.cat([feature.kwargs["pixel_values"].data for feature in ordered])
        theirs = inputs["pixel_values"]
        side = theirs.shape[-1] // (merge * patch)
        planes = patches.view(-1, side, side, merge, merge, 3, patch, patch).permute(0, 5, 1, 3, 6, 2, 4, 7)
        yield "pixel_values", planes.reshape(theirs.shape), theirs

    return pairs


def rope_index(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return transformers' positions `[axes, prompt]` of a prompt with media, or None if the family has no position rule."""
    rule = getattr(getattr(model, "model", None), "get_rope_index", None)
    if rule is None:
        return None
    known = inspect.signature(rule).parameters
    return rule(**{name: value for name, value in inputs.items() if name in known})[0][:, 0]


def takes_all(modality: str, size: Sequence[int]) -> bool:
    """Refuse no size: return False."""
    return False


def is_sliver(modality: str, size: Sequence[int]) -> bool:
    """Refuse images and frames whose sides differ by more than 200:1, as Qwen2-VL's rule does."""
    return max(size[-2:]) > 200 * min(size[-2:])


def write_prompt(placeholders: Sequence[str], seed: int) -> str:
    return f"def f{seed}(x):" + " and ".join(placeholders) + " return it" + " + x" * (seed % 5)


def give(modality: str, media: Any) -> Any:
    """Return media for `multi_modal_data`: audio with its rate."""
    return (media, RATE) if modality == "audio" else media


def ask_llm(text: str, data: Data) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": data}


def no_more_files(folder: Path) -> None:
    """Do nothing: `save_pretrained` wrote every file."""


@dataclass(frozen=True, repr=False)
class Family:
    """One row of the parity suite.

    Args:
        name: unique name, used in test ids.
        build: `build(seed, **variant)` -> a small random model and processor of transformers.
        placeholders: modality -> the text of its placeholder in a prompt; "" where the decoder reads it by cross-attention.
        sizes: modality -> sizes of items, used in turn; at least three, all different.
        grid: modality -> sizes whose tokens are counted; sizes for which `refuses` is true must be refused.
        cases: prompts by the letters of their items (i v a c); default: no item, one of each, two, and a mixture.
        prompt: (placeholders, seed) -> the prompt's text.
        ours: (modality, media) -> value for `multi_modal_data`.
        request: (text, data) -> the prompt for `LLM.generate`.
        call: (processor, text, data) -> the oracle's inputs (batch of one).
        run: see `run_oracle`.
        tensors: see `same_names`; yields pairs that must be equal.
        tensor_tolerance: tolerance of the pairs; images are bit-equal before normalisation and differ by rounding afterwards.
        oracle_positions: see `rope_index`.
        own_positions: why the oracle's positions differ from the published rule, or None.
        prompt_attention: as in the family's ProcessingInfo; the suite checks it, and that no step
            cuts a bidirectional span.
        variants: more checkpoints whose logits are compared, name -> arguments of `build`.
        layouts: more weight layouts, name -> (new, old) prefixes of names; transformers' names in memory and on
            disk are always tried.
        silent: prefix of an oracle tensor's name -> why the logits do not depend on it.
        tolerance: tolerance of float32 logits, as a factor of max(1, std); `tolerance_note` says why it is not 2e-4.
        half: largest standard deviation of the errors in bfloat16 and in float16, relative to that of the logits.
        fullest: modality -> sizes of items with the most memory per row, if that depends on the size.
        fullest_items: number of such items in a prompt, if a family treats several items differently.
        unfilled: modality -> why no item of the row needs as much memory as is planned.
        options: options of `LLM`.
        finish: called with the folder after a checkpoint is saved, to write files that are missing in it. processor_config.json
            is always removed; a processor with keys of its own (`image_seq_len`) needs it back.
        load: loads the oracle's model and processor of a saved checkpoint, if transformers has no class for them.
    """

    name: str
    build: Callable[..., tuple[Any, Any]]
    placeholders: Mapping[str, str]
    sizes: Mapping[str, Sequence[tuple[int, ...]]]
    grid: Mapping[str, Sequence[tuple[int, ...]]] = field(
        default_factory=lambda: {"image": IMAGE_SIZES, "video": VIDEO_SIZES, "audio": AUDIO_SIZES}
    )
    refuses: Callable[[str, Sequence[int]], bool] = takes_all
    cases: Sequence[str] | None = None
    prompt: Callable[[Sequence[str], int], str] = write_prompt
    ours: Callable[[str, Any], Any] = give
    request: Callable[[str, Data], dict[str, Any]] = ask_llm
    call: Callable[[Any, str, Data], dict[str, Any]] = call_processor
    run: Callable[[Any, Mapping[str, Any], Sequence[int], torch.Tensor | None], torch.Tensor] = run_oracle
    tensors: Callable[[Mapping[str, Any], Sequence[Any]], Iterator[tuple[str, torch.Tensor, torch.Tensor]]] = same_names
    tensor_tolerance: float = 1e-5
    oracle_positions: Callable[[Any, Mapping[str, Any]], torch.Tensor | None] = rope_index
    own_positions: str | None = None
    prompt_attention: str = "causal"
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    layouts: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 2e-4
    tolerance_note: str = ""
    half: tuple[float, float] = (0.1, 0.02)
    fullest: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    fullest_items: int = 8
    unfilled: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Path], None] = no_more_files
    load: Callable[[Path], tuple[Any, Any]] = load_oracle

    def default_cases(self) -> list[str]:
        """Return the letters of the items of each prompt."""
        if self.cases is not None:
            return list(self.cases)
        letters = "".join(letter for letter, modality in LETTERS.items() if modality in self.placeholders)
        mixed = letters + letters[0] if len(letters) > 1 else letters * 3
        return ["", *letters, letters[0] * 2, mixed]


@dataclass(frozen=True, repr=False)
class Question:
    """One prompt: its text and media for both sides."""

    family: Family
    text: str
    data: Data

    @property
    def ours(self) -> dict[str, Any]:
        given = {name: [self.family.ours(name, media) for media in several] for name, several in self.data.items()}
        return self.family.request(self.text, given)

    def theirs(self, processor: Any) -> dict[str, Any]:
        with one_thread():
            return self.family.call(processor, self.text, self.data)


@contextmanager
def one_thread() -> Iterator[None]:
    """Process with one thread, as the engine's media workers do: torch's bilinear filter rounds otherwise with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_media(modality: str, size: Sequence[int], seed: int) -> Any:
    """Return noise in blocks for images (so that resizing errors show) and a tone for audio."""
    rng = np.random.default_rng(seed)
    if modality == "audio":
        time = np.arange(size[0])
        tone = 0.3 * np.sin(time * (0.02 + 0.1 * rng.random())) + rng.normal(0, 0.05, size[0])
        return tone.astype(np.float32)
    *frames, height, width = size
    coarse = rng.integers(0, 256, (*frames, -(-height // 5), -(-width // 5), 3), dtype=np.uint8)
    axis = len(frames)
    pixels = np.ascontiguousarray(coarse.repeat(5, axis).repeat(5, axis + 1)[..., :height, :width, :])
    return pixels if frames else Image.fromarray(pixels)


def ask(family: Family, case: str, seed: int = 0, sizes: Sequence[tuple[int, ...]] | None = None) -> Question:
    """Make a question with one item per letter; `sizes`: one size per letter, instead of those of the family."""
    data: dict[str, list[Any]] = {}
    placeholders = []
    for number, letter in enumerate(case):
        modality = LETTERS[letter]
        known = family.sizes[modality]
        size = sizes[number] if sizes else known[(seed + number) % len(known)]
        data.setdefault(modality, []).append(make_media(modality, size, 1000 * seed + number))
        placeholders.append(family.placeholders[modality])
    return Question(family, family.prompt(placeholders, seed), data)


@functools.cache
def load_rows() -> dict[str, Family]:
    """Return every family of tests/families by name."""
    found: dict[str, Family] = {}
    for path in sorted((Path(__file__).parents[1] / "families").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"families_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for row in [module.FAMILY] if hasattr(module, "FAMILY") else getattr(module, "FAMILIES", ()):
            assert row.name not in found, f"two rows are called {row.name}"
            found[row.name] = row
    return found


def save(family: Family, folder: Path, seed: int = 0, **variant: Any) -> Path:
    """Save a checkpoint of the family in the Hub's layout and return the folder."""
    model, processor = family.build(seed, **variant)
    save_checkpoint(folder, model, processor)
    family.finish(folder)
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    """Load the oracle's model and processor of a saved checkpoint."""
    return load_oracle(folder)


def _split(positions: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    return positions[:, :start], positions[:, start:]
