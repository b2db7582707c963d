"""What the parity suite (tests/models/test_families.py) has to know of a family: its row. Tests only.

How to write one: `tests/families/<family>.py` sets FAMILY (or FAMILIES, a list). A complete example:

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
        randomise(model, seed)  # every tensor has a say; `sharpen(model.model.vision_tower)` where attention is flat
        return model, tf.LlavaProcessor(image_processor=..., tokenizer=words, patch_size=14, image_token="<image>")

    FAMILY = Family(
        "llava",
        build,
        slots={"image": "<image>"},                      # what stands in a prompt's text for one item
        sizes={"image": [(90, 130), (60, 60), (200, 40)]},  # (h, w); of clips (frames, h, w); of sounds (samples,)
        variants={"tied": {"tie": True}},                # further checkpoints whose logits are compared
        layouts={"transformers 4": [("model.language_model.", "language_model.model.")]},  # (new, old) prefixes
    )

All else has a default that fits most families; override what differs (see `Family`). Whatever a test must leave out is
said in `silent`, `tolerance_note` or `own_positions`, with the reason; the suite prints it. Keep the checkpoint small
(hidden 64, 3 layers): a family's default tests take about 5 s on one core. Run one row with

    make test ARGS="tests/models/test_families.py -k llava"
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import load_oracle, save_checkpoint
from PIL import Image

Data = Mapping[str, list[Any]]
"""Media of one prompt by modality: PIL pictures, uint8 clips `[frames, h, w, 3]`, float32 sounds `[samples]`."""

LETTERS = {"i": "image", "v": "video", "a": "audio", "c": "vision_chunk"}
RATE = 16_000
FPS = 4.0  # of clips, where a family does not say
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
"""Names of an image encoder, a projector and a decoder, as releases before and after wrote them; see `Family.layouts`."""

# (height, width): round sizes, odd ones, slivers, and ratios up to 1:150
PICTURES = [
    (28, 28), (56, 56), (64, 64), (224, 224), (336, 336), (448, 448), (480, 640), (640, 480), (97, 103), (103, 97),
    (1, 1), (1, 100), (100, 1), (13, 300), (300, 13), (29, 27), (42, 70), (70, 42), (55, 57), (200, 40),
    (40, 200), (333, 111), (111, 333), (500, 501), (512, 384), (384, 512), (31, 900), (900, 31), (6, 900), (900, 6),
    (672, 336), (336, 672), (1000, 250), (250, 1000), (799, 601), (57, 301), (301, 57), (160, 90), (720, 404), (385, 383),
]  # fmt: skip
CLIPS = [(1, 56, 56), (2, 90, 60), (3, 60, 90), (4, 28, 200), (5, 200, 28), (6, 80, 100), (8, 31, 300), (13, 64, 64)]
SOUNDS = [
    (n,) for n in (400, 481, 640, 641, 799, 801, 1600, 1601, 3199, 5000, 8000, 15_999, 16_000, 16_001, 24_000, 31_337)
] + [(2000 * n + 7 * n * n,) for n in range(1, 25)]


def call_processor(processor: Any, text: str, data: Data) -> dict[str, Any]:
    """transformers' processor on one prompt."""
    names = {"image": "images", "video": "videos", "audio": "audio"}
    media = {names[modality]: values for modality, values in data.items() if values}
    rate = {"sampling_rate": RATE} if "audio" in media else {}
    return dict(processor(text=[text], **media, **rate, return_tensors="pt"))


def call_sampled(processor: Any, text: str, data: Data) -> dict[str, Any]:
    """As `call_processor` where clips were sampled before: every frame is used, at FPS. Some draw on them."""
    clips, options = data.get("video", ()), dict[str, Any]()
    if clips:
        told = [{"fps": FPS, "total_num_frames": len(clip), "frames_indices": list(range(len(clip)))} for clip in clips]
        options = {"videos": [clip.copy() for clip in clips], "video_metadata": told, "do_sample_frames": False}
    if "image" in data:
        options["images"] = data["image"]
    return dict(processor(text=[text], **options, return_tensors="pt"))


def as_sampled(modality: str, media: Any) -> Any:
    """Media as `multi_modal_data` holds it, clips as `call_sampled` has them."""
    return (media, {"fps": FPS, "do_sample_frames": False}) if modality == "video" else media


def run_oracle(model: Any, inputs: Mapping[str, Any], answer: Sequence[int], positions: torch.Tensor | None) -> torch.Tensor:
    """Logits of transformers `[prompt + answer - 1, vocab]`: the prompt, then the answer teacher-forced behind its cache.

    Two calls, as an answer may hold placeholder tokens as such. `positions`: int64 `[axes, prompt + answer]`, or None.
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
        rest = model(input_ids=tail, past_key_values=first.past_key_values, **mask, **place[1])
    return torch.cat([first.logits[0], rest.logits[0]]).float()


def same_names(inputs: Mapping[str, Any], features: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Processed tensors of all items laid end to end, ours and the oracle's of the same name."""
    ours: dict[str, list[torch.Tensor]] = {}
    for feature in features:
        for name, element in feature.kwargs.items():
            ours.setdefault(name, []).append(torch.as_tensor(element.data).flatten())
    for name, parts in ours.items():
        yield name, torch.cat(parts), torch.as_tensor(inputs[name]).flatten()


def patches_in_squares(
    merge: int, patch: int
) -> Callable[[Mapping[str, Any], Sequence[Any]], Iterator[tuple[str, torch.Tensor, torch.Tensor]]]:
    """`Family.tensors` of families that are fed patches in squares of merge x merge, where transformers has whole planes."""

    def pairs(inputs: Mapping[str, Any], features: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        ordered = sorted(features, key=lambda feature: feature.range.offset)
        patches = torch.cat([feature.kwargs["pixel_values"].data for feature in ordered])
        theirs = inputs["pixel_values"]
        side = theirs.shape[-1] // (merge * patch)
        planes = patches.view(-1, side, side, merge, merge, 3, patch, patch).permute(0, 5, 1, 3, 6, 2, 4, 7)
        yield "pixel_values", planes.reshape(theirs.shape), theirs

    return pairs


def rope_index(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Positions `[axes, prompt]` that transformers gives a prompt with media, None for a family without a rule of its own."""
    rule = getattr(getattr(model, "model", None), "get_rope_index", None)
    if rule is None:
        return None
    known = inspect.signature(rule).parameters
    return rule(**{name: value for name, value in inputs.items() if name in known})[0][:, 0]


def takes_all(modality: str, size: Sequence[int]) -> bool:
    """No size is refused."""
    return False


def write_prompt(slots: Sequence[str], seed: int) -> str:
    return f"def f{seed}(x):" + " and ".join(slots) + " return it" + " + x" * (seed % 5)


def give(modality: str, media: Any) -> Any:
    """Media as `multi_modal_data` holds it: a sound with its rate."""
    return (media, RATE) if modality == "audio" else media


def ask_llm(text: str, data: Data) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": data}


def no_more_files(folder: Path) -> None:
    """`save_pretrained` wrote all."""


@dataclass(frozen=True, repr=False)
class Family:
    """One row of the parity suite.

    Args:
        name: unique; names the test.
        build: `build(seed, **variant)` -> a small random model and processor of transformers.
        slots: modality -> what stands in a prompt's text for one item; "" where it is read across, by a decoder of its own.
        sizes: modality -> sizes of items, used in turn; three at least, all different.
        grid: modality -> sizes whose tokens are counted; those for which `refuses` is true must be refused.
        cases: prompts by the letters of their items (i v a c); None: none, one of each, two, and a mixture.
        prompt: slots' texts and a seed -> the prompt's text.
        ours: modality, media -> what `multi_modal_data` holds for it.
        request: text, data -> the prompt for `LLM.generate`.
        call: processor, text, data -> the oracle's inputs (batch of one).
        run: see `run_oracle`.
        tensors: see `same_names`; yields pairs that are to be equal.
        tensor_tolerance: of the pairs; pictures equal bit for bit before they are scaled differ by float rounding after.
        oracle_positions: see `rope_index`.
        own_positions: why the oracle's positions are not the rule (conformance 37), or None.
        prefill: as in the family's ProcessingInfo; the suite checks that it is so, and that no step cuts an atom.
        variants: further checkpoints, name -> arguments of `build`, whose logits are compared.
        layouts: further layouts of the weights, name -> (new, old) prefixes of names; those of transformers in memory and on
            disk are always tried.
        silent: start of an oracle tensor's name -> why nothing depends on it.
        tolerance: of float32 logits, as a factor of max(1, std); `tolerance_note` says why it is not 2e-4.
        half: standard deviation of bfloat16's and float16's errors over that of the logits, at most.
        fullest: modality -> sizes of items that take the most memory for each row they make, where sizes differ in that.
        options: of `LLM`.
        finish: called with the folder once a checkpoint is saved, for files that `save_pretrained` does not write.
        load: the oracle's model and processor of a saved checkpoint, where transformers has no class for them.
    """

    name: str
    build: Callable[..., tuple[Any, Any]]
    slots: Mapping[str, str]
    sizes: Mapping[str, Sequence[tuple[int, ...]]]
    grid: Mapping[str, Sequence[tuple[int, ...]]] = field(
        default_factory=lambda: {"image": PICTURES, "video": CLIPS, "audio": SOUNDS}
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
    prefill: str = "causal"
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    layouts: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 2e-4
    tolerance_note: str = ""
    half: tuple[float, float] = (0.1, 0.02)
    fullest: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Path], None] = no_more_files
    load: Callable[[Path], tuple[Any, Any]] = load_oracle

    def default_cases(self) -> list[str]:
        """Letters of the items of each prompt."""
        if self.cases is not None:
            return list(self.cases)
        letters = "".join(letter for letter, modality in LETTERS.items() if modality in self.slots)
        mixed = letters + letters[0] if len(letters) > 1 else letters * 3
        return ["", *letters, letters[0] * 2, mixed]


@dataclass(frozen=True, repr=False)
class Question:
    """One prompt: its text and media as both sides take them."""

    family: Family
    text: str
    data: Data

    @property
    def ours(self) -> dict[str, Any]:
        given = {name: [self.family.ours(name, media) for media in several] for name, several in self.data.items()}
        return self.family.request(self.text, given)

    def theirs(self, processor: Any) -> dict[str, Any]:
        return self.family.call(processor, self.text, self.data)


def make_media(modality: str, size: Sequence[int], seed: int) -> Any:
    """Noise in patches, so that resizing tells, and a tone for sounds."""
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
    """A question with an item per letter; `sizes` one per letter instead of the family's own in turn."""
    data: dict[str, list[Any]] = {}
    slots = []
    for number, letter in enumerate(case):
        modality = LETTERS[letter]
        known = family.sizes[modality]
        size = sizes[number] if sizes else known[(seed + number) % len(known)]
        data.setdefault(modality, []).append(make_media(modality, size, 1000 * seed + number))
        slots.append(family.slots[modality])
    return Question(family, family.prompt(slots, seed), data)


@functools.cache
def load_rows() -> dict[str, Family]:
    """Every family of tests/families, by name."""
    found: dict[str, Family] = {}
    for path in sorted((Path(__file__).parent / "families").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"families_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for row in [module.FAMILY] if hasattr(module, "FAMILY") else module.FAMILIES:
            assert row.name not in found, f"two rows are called {row.name}"
            found[row.name] = row
    return found


def save(family: Family, folder: Path, seed: int = 0, **variant: Any) -> Path:
    """A checkpoint of the family as the Hub ships it, and the folder."""
    model, processor = family.build(seed, **variant)
    save_checkpoint(folder, model, processor)
    family.finish(folder)
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    """The oracle's model and processor of a saved checkpoint."""
    return load_oracle(folder)


def _split(positions: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    return positions[:, :start], positions[:, start:]
