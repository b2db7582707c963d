"""Input processing of MiniCPM-V: the whole image and slices of it, each between tags; images are numbered."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any, Self

import torch

from ....callers.errors import ConfigError, InputError, short_repr
from ....kernels.pixels.layout import PatchLayout
from ....mm.embeddings import ROWS
from ....mm.fields import BatchedField, FieldElem, FlatField, SharedField
from ....mm.geometry import MAX_ITEM_ROWS, FrameSampling
from ....mm.media.policy import DecodeSpec
from ....mm.rules import Rule
from ....mm.speech import SpeechRequest
from ....mm.tiling.plan import CropPlan
from ....mm.tiling.slices import MAX_PACKED_FRAMES, SliceTiles
from ....mm.types import EmbeddingItem, ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VideoItem
from ....processors.bases.audio import audio_samples
from ....processors.bases.base import BaseProcessingInfo
from ....processors.bases.speech import SpeechMixin
from ....processors.bases.tiles import TILE_KWARGS, TileSpec, positive_int_or
from ....processors.files import ProcessorFiles
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, patchify_crops, read_pixel_spec
from ....processors.interface import Span
from ....processors.mel import MelSpec, log_mel, read_mel_spec
from ....processors.options import MAX_TILES, TIME_KWARGS, check_value, is_low_detail
from ....processors.spans import Piece, build_span
from .letters import plan_by_letters
from .rules import on_canvas

_SLICES = (*TILE_KWARGS, "max_slice_nums", "slice_mode", "use_image_id")
_FRAMES = (*TIME_KWARGS, "fps", "max_frames", "num_frames")
_MERGE = {"16x": 4, "4x": 2}  # patches along each side of one row
_TILING = SliceTiles(448, 14, 9)
_MAX_WINDOWS = 60  # of one audio item
_PER_SECOND = 10  # times of frames are tenths of a second
_TRANSCRIBE = {
    "en": "Please listen to the audio snippet carefully and transcribe the content.",
    "zh": "请仔细听这段音频片段，并将其内容逐字记录。",
}
_ANSWERS = {False: "<|spk_bos|><|spk|><|spk_eos|><|tts_bos|>", True: "<think>\n\n</think>\n\n<|tts_bos|>"}
"""Beginnings of answers to speech: of version 2.6, and since 4.5."""


@dataclass(frozen=True)
class SliceSpec(TileSpec):
    """TileSpec with the tiling of MiniCPM-V. `packing`: frames of a video that are encoded together; None: by their number."""

    tiling: SliceTiles = _TILING
    packing: int | None = None


class SlicesInfo(BaseProcessingInfo):
    """Base of both layouts: builds the spans of a whole image and its slices, and numbers the items of a prompt."""

    rewrites_prompts = True
    modalities: tuple[str, ...] = ("image", "video")
    frame_separator = ""  # between the frames of a video
    numbers_videos = True  # videos are numbered like images

    def resolve_token_ids(self) -> None:
        self.tags = {name: self.special_token_id(name) for name in ("<image>", "</image>", "<slice>", "</slice>")}
        self.number_tags = self.special_token_id("<image_id>"), self.special_token_id("</image_id>")

    def merge_of(self, json: Mapping[str, Any]) -> int:
        """Return the patches along each side of one row; 1 if the number of rows does not depend on the patches."""
        return 1

    def resolve_spec(self, modality: str) -> SliceSpec:
        preprocessor, options = self.preprocessor_json(modality), self.merged_kwargs[modality]
        json: dict[str, Any] = {**preprocessor, **options}
        spec = SliceSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, patch=positive_int_or(json, "patch_size", 14))
        spec = replace(read_pixel_spec(preprocessor, spec, options), merge=self.merge_of(json))
        self.check_config("vision_config", patch_size=spec.patch)
        cut = json.get("slice_mode", True) and not is_low_detail(json)
        slices = positive_int_or(json, "max_slice_nums", 9, MAX_TILES) if cut else 1
        side = positive_int_or(json, "scale_resolution", 448)
        return replace(spec, tiling=SliceTiles(side, spec.patch * spec.merge, slices))

    def view_rows(self, spec: SliceSpec, plan: CropPlan) -> list[int]:
        """Return the encoder rows of each view of a plan: of the whole image, and of each slice."""
        sides = [[side // (spec.patch * spec.merge) for side in view.tile_size] for view in plan.views]
        return [tall * wide for tall, wide in sides]

    def plan(self, header: MediaHeader) -> CropPlan:
        """Return the crop plan of the image, or of each frame of the video."""
        plan: CropPlan = self.specs[header.modality].tiling.plan(*header.size)
        return plan

    def pack(self, frames: int) -> int:
        """Return how many of the `frames` frames of a video are encoded together, to as many rows as one frame."""
        return 1

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return frames x slices x rows of a slice, with the rows of the whole images as extra rows."""
        plan = self.plan(header)
        whole, *rest = self.view_rows(self.specs[header.modality], plan)
        used = 1 if header.frames is None else len(header.frames.indices)
        frames = -(-used // self.pack(used))
        grid = ItemGeometry(frames, 1, whole, linear=True)
        if rest:
            grid = ItemGeometry(frames, plan.num_tiles - 1, rest[0], extra=frames * whole, tiles=plan.tiles, linear=True)
        if grid.num_embeds > MAX_ITEM_ROWS:
            raise InputError(f"it makes {grid.num_embeds:,} rows, the limit is {MAX_ITEM_ROWS:,}; use fewer frames or slices")
        return grid

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        return ItemGeometry(1, 1, len(item.tensors[ROWS]), linear=True)

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Insert the number of each image and of each video before its placeholder, unless the item is expanded already."""
        out, previous, counts = list[int](), None, dict.fromkeys(self.placeholder_ids, 0)
        modality_of = {token: name for name, token in self.placeholder_ids.items() if self.numbered(name)}
        starts = {self.tags["<image>"], self.tags["<slice>"]}
        for token in ids:
            name = modality_of.get(token)
            if name is not None and previous not in starts:
                out += [self.number_tags[0], *self.encode(str(counts[name])), self.number_tags[1]]
                counts[name] += 1
            out.append(token)
            previous = previous if name is not None and previous in starts else token
        return out

    def numbered(self, modality: str) -> bool:
        """Return True if the items of a modality get numbers in the prompt."""
        uses = {**self.files.image, **self.merged_kwargs[modality]}.get("use_image_id", True)
        return bool(uses) and (modality == "image" or self.numbers_videos)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return, for each frame, the whole image and its slices, each between tags, with a newline between rows of slices."""
        start, end, slice_start, slice_end = ((token,) for token in self.tags.values())
        rows, columns = geometry.tiles
        pieces = list[Piece]()
        for frame in range(geometry.t):
            pieces += [self.encode(self.frame_separator)] if frame and self.frame_separator else []
            pieces += [start, geometry.extra // geometry.t if rows else geometry.w, end]
            for row in range(rows):
                pieces += [self.encode("\n")] if row else []
                pieces += [slice_start, geometry.w, slice_end] * columns
        return build_span(pieces, self.row_token(modality))

    def row_token(self, modality: str) -> int:
        """Return the token that is written for each encoder row."""
        return self.placeholder_ids[modality]

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options for fewer slices and frames."""
        frames, slices, each = grid
        views = rows // each
        if views < 1 or frames * slices == 1:
            return None
        if modality == "image":
            return {"max_slice_nums": max(1, views - 1)}
        return {"max_slice_nums": 1, "num_frames": min(frames, views)}


class MiniCPMV46ProcessingInfo(SlicesInfo):
    """ProcessingInfo of MiniCPM-V 4.6. The views of an item and their rows differ in size.

    The tensors are `pixel_values` `[patches, 3 * patch^2]` in squares of 2 x 2 patches, `grids` int64 `[views, 3]`: (1, h, w)
    of each view, `views`: their number, and `merge`: patches along each side of one row.
    """

    placeholders = {"image": ("image_token_id", "<|image_pad|>"), "video": ("video_token_id", "<|video_pad|>")}
    valid_kwargs = {"image": (*_SLICES, "downsample_mode"), "video": (*_SLICES, *_FRAMES, "downsample_mode")}

    downsample_mode = "16x"  # where the JSON and config.json do not name one

    def merge_of(self, json: Mapping[str, Any]) -> int:
        mode = json.get("downsample_mode") or self.files.config.get("downsample_mode") or self.downsample_mode
        check_value("downsample_mode", mode)
        return _MERGE[mode]

    def resolve_decode_spec(self) -> DecodeSpec:
        json = self.preprocessor_json("video")
        if json.get("stack_frames", 1) != 1:
            raise ConfigError(f"stack_frames is {json['stack_frames']} in the preprocessor JSON; only 1 is supported")
        sampling = FrameSampling(fps=1.0, max_frames=positive_int_or(json, "max_num_frames", 128), spread="before")
        return DecodeSpec(self.sampling_policy("video", sampling, {}))

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        assert isinstance(item, ImageItem | VideoItem)
        spec, plan = self.specs[item.header.modality], self.plan(item.header)
        frames = item.pixels[None] if isinstance(item, ImageItem) else item.frames
        plans, grids = [CropPlan((view,)) for view in plan.views], _grids(plan, spec) * len(frames)
        pieces = [
            patchify_crops(frame[None], crop_plan, spec, PatchLayout(spec.patch, 2), dtype)
            for frame in frames
            for crop_plan in plans
        ]
        kwargs = {
            "pixel_values": FieldElem(torch.cat(pieces), FlatField()),
            "grids": FieldElem(torch.tensor(grids), FlatField(keep_on_cpu=True)),
            "views": FieldElem(torch.tensor(len(grids)), BatchedField(keep_on_cpu=True)),
            "merge": FieldElem(torch.tensor(spec.merge), SharedField(keep_on_cpu=True)),
        }
        return kwargs, self.geometry(item.header)


class MiniCPMV47ProcessingInfo(MiniCPMV46ProcessingInfo):
    """ProcessingInfo of MiniCPM-V 4.7: the tokens of an image lie on a canvas, as do newlines after it."""

    numbers_videos = False
    embeds_layout = None  # rows alone do not tell their places

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        spec, plan = self.specs[header.modality], self.plan(header)
        sides = [tuple(side // (spec.patch * spec.merge) for side in view.tile_size) for view in plan.views]
        return replace(super().geometry(header), positions=Rule.of(on_canvas, sides[0], sides[-1]))

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        return replace(super().span(modality, geometry), trailing=frozenset(self.encode("\n")))


class MiniCPMOcrProcessingInfo(MiniCPMV46ProcessingInfo):
    """ProcessingInfo of MiniCPM-OCR: MiniCPM-V 4.6 with more rows, which may keep the size of small images.

    With `small_image_upsize="adaptive"`, sizes follow the letters of an image: its number of rows is an upper bound until it
    is decoded. The `times` of a decoded image that is cut are the numbers of rows of its views. `by_letters`: these views.
    """

    downsample_mode = "4x"
    by_letters: CropPlan | None = None

    def resolve_spec(self, modality: str) -> SliceSpec:
        spec = super().resolve_spec(modality)
        upsize = self.files.image.get("small_image_upsize", "always") if modality == "image" else "always"
        if upsize not in ("always", "never", "adaptive"):
            names = '"always", "never" or "adaptive"'
            raise ConfigError(f"small_image_upsize is {short_repr(upsize)} in the preprocessor JSON; give {names}")
        return replace(spec, tiling=replace(spec.tiling, enlarges=upsize != "never"))

    @property
    def adapts(self) -> bool:
        """True if sizes follow the letters of an image."""
        return bool(self.files.image.get("small_image_upsize") == "adaptive")

    def is_exact(self, header: MediaHeader) -> bool:
        return header.exact and (header.modality != "image" or not self.adapts or self.by_letters is not None)

    def for_item(self, item: MediaItem) -> Self:
        """Return a copy that knows the views of an image."""
        if not isinstance(item, ImageItem) or not self.adapts:
            return self
        settled = copy(self)
        settled.by_letters = plan_by_letters(item.pixels, self.specs["image"].tiling)
        return settled

    def plan(self, header: MediaHeader) -> CropPlan:
        if header.modality == "image" and self.by_letters is not None:
            return self.by_letters
        plan = super().plan(header)
        if header.modality != "image" or not self.adapts or plan.tiles != (0, 0):
            return plan
        kept: CropPlan = replace(self.specs["image"].tiling, enlarges=False).plan(*header.size)
        return max(plan, kept, key=lambda one: prod(one.views[0].tile_size))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid = super().geometry(header)
        if header.modality != "image" or self.by_letters is None or grid.tiles == (0, 0):
            return grid
        rows = self.view_rows(self.specs["image"], self.by_letters)
        return replace(grid, times=tuple(map(float, rows)), extra=sum(rows) - prod(grid.merged))

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        if modality != "image" or not geometry.times:
            return super().span(modality, geometry)
        start, end, slice_start, slice_end = ((token,) for token in self.tags.values())
        whole, *slices = (int(rows) for rows in geometry.times)
        pieces: list[Piece] = [start, whole, end]
        for number, rows in enumerate(slices):
            pieces += [self.encode("\n")] if number and number % geometry.tiles[1] == 0 else []
            pieces += [slice_start, rows, slice_end]
        return build_span(pieces, self.row_token(modality))


class MiniCPMVProcessingInfo(SlicesInfo):
    """ProcessingInfo of MiniCPM-V 2.6, 4 and 4.5 in their publisher's layout. Every view becomes the same number of rows.

    The placeholders are plain text. In prompts, rows of both modalities have the same token; the
    placeholder of videos is an id beyond the vocabulary, so that both can be told apart until they are expanded.
    The tensors are `pixel_values` `[patches, 3 * patch^2]`, row by row, `grids` int64 `[views, 3]`: (1, h, w) of each, `times`
    int64 `[views]`: tenths of a second, or -1, `packs` int64 `[n]`: how many of the views become rows together, `results`: n.
    """

    placeholders = {"image": ("image_token_id", "<unk>"), "video": ("video_token_id",)}
    valid_kwargs = {"image": _SLICES, "video": (*_SLICES, *_FRAMES, "force_packing")}
    default_kwargs = {"resample": "pillow", "videos_kwargs": {"max_slice_nums": 1}}
    frame_separator = "\n"
    numbers_videos = False

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Name the publisher's values like those of other processors."""
        config, image = files.config, {"use_image_id": False, **files.image}
        named = {new: image[old] for old, new in (("norm_mean", "image_mean"), ("norm_std", "image_std")) if old in image}
        size = config.get("vocab_size") or 1
        return replace(files, image={**image, **named}, config={**config, "vocab_size": size + 1, "video_token_id": size})

    @property
    def text_placeholders(self) -> Mapping[str, int]:
        return {f"(<{name}>./</{name}>)": token for name, token in self.placeholder_ids.items()}

    @property
    def packs_frames(self) -> bool:
        """True if several frames of a video may be encoded together."""
        return float(self.files.config.get("version", 0)) >= 4.5

    def resolve_decode_spec(self) -> DecodeSpec:
        sampling = FrameSampling(fps=1.0, max_frames=64)
        if self.packs_frames:
            sampling = FrameSampling(fps=3.0, max_frames=180 * MAX_PACKED_FRAMES, spread="middle", nearest=True)
        return DecodeSpec(self.sampling_policy("video", sampling, {}))

    def resolve_spec(self, modality: str) -> SliceSpec:
        spec, most = super().resolve_spec(modality), positive_int_or(self.files.config, "image_size", 448)
        if spec.tiling.side > most:
            raise self.files.mismatch_error(f"image_size is {most} in config.json", f"scale_resolution {spec.tiling.side}")
        packing = self.merged_kwargs[modality].get("force_packing")
        if packing is not None and not self.packs_frames:
            raise ConfigError("<<param>> is an option of MiniCPM-V 4.5 only", param="force_packing")
        return replace(spec, packing=packing)

    def view_rows(self, spec: SliceSpec, plan: CropPlan) -> list[int]:
        for view in plan.views:
            tall, wide = (side // spec.patch for side in view.tile_size)
            if tall * wide > spec.tiling.most_patches(spec.patch):
                raise InputError(f"its sides differ too much: a view has {tall} x {wide} patches; crop it first")
        return [positive_int_or(self.files.config, "query_num", 64)] * len(plan.views)

    def pack(self, frames: int) -> int:
        default = min(-(-frames // 180), MAX_PACKED_FRAMES) if self.packs_frames else 1
        return self.specs["video"].packing or default

    def row_token(self, modality: str) -> int:
        return self.placeholder_ids["image"]

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Replace the placeholders' text with tokens. Text on both sides of a special token is not joined."""
        decode, spelled = self.files.decode, {self.tags[name]: name for name in ("<image>", "</image>")}
        assert decode is not None, "files with an encoder have a decoder"
        plain = {*self.placeholder_ids.values(), *self.tags.values()}
        out = list[int]()
        for is_text, run in groupby(ids, lambda token: token in spelled or (token not in plain and decode([token]) != "")):
            tokens, text = list(run), ""
            for tag, part in groupby(tokens if is_text and items else (), spelled.get):
                several = list(part)
                text += decode(several) if tag is None else tag * len(several)
            pieces = re.split(r"(\(<(?:image|video|audio)>\./</(?:image|video|audio)>\))", text)
            out += self._encode_pieces(pieces) if len(pieces) > 1 else tokens
        return self.preprocess_chat(out, items)

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return super().preprocess_prompt(ids, items)

    def _encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Return the tokens of placeholders and of text, in which tags of images are tokens."""
        out = list[int]()
        for piece in pieces:
            for text in [piece] if piece in self.text_placeholders else re.split("(</?image>)", piece):
                token = self.text_placeholders.get(text, self.tags.get(text))
                out += self.encode(text) if token is None else [token]
        return out

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        assert isinstance(item, ImageItem | VideoItem)
        spec, plan = self.specs[item.header.modality], self.plan(item.header)
        frames = item.pixels[None] if isinstance(item, ImageItem) else item.frames
        seconds = item.header.frames.timestamps if item.header.frames is not None and self.packs_frames else ()
        times = [round(time * _PER_SECOND) for time in seconds] or [-1] * len(frames)
        pack, grids, plans = self.pack(len(frames)), _grids(plan, spec), [CropPlan((view,)) for view in plan.views]
        pieces, of_views, packs = list[torch.Tensor](), list[int](), list[int]()
        for first in range(0, len(frames), pack):
            group = frames[first : first + pack]
            for crop_plan in plans:
                patches = patchify_crops(group, crop_plan, spec, PatchLayout(spec.patch), dtype).view(
                    len(group), crop_plan.num_tiles, -1
                )
                pieces.append(patches.transpose(0, 1).reshape(-1, 3 * spec.patch**2))
            of_views += times[first : first + pack] * len(grids)
            packs += [len(group)] * len(grids)
        # the views of a pack follow one another: all frames of the whole image, then all frames of each slice
        order = [grid for first in range(0, len(frames), pack) for grid in grids for _ in frames[first : first + pack]]
        kwargs = {
            "pixel_values": FieldElem(torch.cat(pieces), FlatField()),
            "grids": FieldElem(torch.tensor(order), FlatField(keep_on_cpu=True)),
            "times": FieldElem(torch.tensor(of_views), FlatField(keep_on_cpu=True)),
            "packs": FieldElem(torch.tensor(packs), FlatField(keep_on_cpu=True)),
            "results": FieldElem(torch.tensor(len(packs)), BatchedField(keep_on_cpu=True)),
        }
        return kwargs, self.geometry(item.header)


class MiniCPMOProcessingInfo(MiniCPMVProcessingInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of MiniCPM-o: also audio in windows of 30 s, with rows in tags for each second.

    Tensors of audio: `input_features` `[frames, bins]`, `audio_frames` int64 `[windows]` and `audio_windows`: their number.
    """

    modalities = ("image", "video", "audio")
    placeholders = {**MiniCPMVProcessingInfo.placeholders, "audio": ("audio_token_id",)}
    valid_kwargs = {**MiniCPMVProcessingInfo.valid_kwargs, "audio": ()}
    language_codes = tuple(_TRANSCRIBE)

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        files = super().prepare_files(files)
        size = files.config["vocab_size"]
        return replace(files, config={**files.config, "vocab_size": size + 1, "audio_token_id": size})

    def resolve_token_ids(self) -> None:
        super().resolve_token_ids()
        self.audio_tags = self.special_token_id("<|audio_start|>"), self.special_token_id("<|audio_end|>")

    def resolve_spec(self, modality: str) -> Any:
        if modality != "audio":
            return super().resolve_spec(modality)
        spec = read_mel_spec(self.files.audio, MelSpec())
        self.check_config("audio_config", num_mel_bins=spec.num_mel_bins)
        return spec

    def resolve_decode_spec(self) -> DecodeSpec:
        spec = self.specs["audio"]
        return replace(
            super().resolve_decode_spec(), rate=spec.sampling_rate, max_audio_samples=_MAX_WINDOWS * spec.max_samples
        )

    def audio_rows(self, frames: int) -> int:
        """Return the rows of `frames` frames. Two frames make one row of Whisper's, and several of these are averaged."""
        return (frames + 1) // 2 // positive_int_or(self.files.config, "audio_pool_step", 2)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        if header.modality != "audio":
            return super().geometry(header)
        spec, samples = self.specs["audio"], header.samples
        limit = _MAX_WINDOWS * spec.max_samples
        if header.exact and samples > limit:
            lasts, most = samples / spec.sampling_rate, limit / spec.sampling_rate
            raise InputError(f"it lasts {lasts:.2f} s, the model takes at most {most:g} s; cut it into several items")
        windows, rest = divmod(min(samples, limit), spec.max_samples)
        rows = windows * self.audio_rows(spec.num_frames(spec.max_samples)) + self.audio_rows(spec.num_frames(rest))
        if not rows:
            raise InputError(f"its {samples} samples are too few for one token; give at least a tenth of a second")
        return ItemGeometry(rows, 1, 1, linear=True)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        if item.header.modality != "audio":
            return super().process(item, dtype)
        samples, spec = audio_samples(item), self.specs["audio"]
        windows = samples.split(spec.max_samples)
        frames = [spec.num_frames(len(window)) for window in windows]
        mels = [log_mel(window, spec, spec.max_samples, count) for window, count in zip(windows, frames, strict=True)]
        kwargs = {
            "input_features": FieldElem(torch.cat(mels).to(dtype), FlatField()),
            "audio_frames": FieldElem(torch.tensor(frames), FlatField(keep_on_cpu=True)),
            "audio_windows": FieldElem(torch.tensor(len(frames)), BatchedField(keep_on_cpu=True)),
        }
        return kwargs, self.geometry(item.header)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return, for audio, the rows of each second between tags."""
        if modality != "audio":
            return super().span(modality, geometry)
        each = self.audio_rows(int(100 * self.files.config.get("audio_chunk_length", 1.0)))
        pieces, (start, end) = list[Piece](), self.audio_tags
        for first in range(0, geometry.num_embeds, each):
            pieces += [(start,), min(each, geometry.num_embeds - first), (end,)]
        return build_span(pieces, self.row_token(modality))

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the publisher's prompt, for English unless a language is given, and the beginning of its answers to speech."""
        turn = f"<|im_start|>user\n{_TRANSCRIBE[language or 'en']}\n\n(<audio>./</audio>)<|im_end|>\n"
        return SpeechRequest(f"{turn}<|im_start|>assistant\n{_ANSWERS[self.packs_frames]}")

    def numbered(self, modality: str) -> bool:
        return modality != "audio" and super().numbered(modality)

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return None if modality == "audio" else super().shrink_kwargs(modality, grid, rows)


def _grids(plan: CropPlan, spec: TileSpec) -> list[list[int]]:
    """Return (1, h, w) in patches of the whole image and of each slice."""
    return [
        [1, *(side // spec.patch for side in view.tile_size)] for view in plan.views for _ in range(view.rows * view.columns)
    ]
