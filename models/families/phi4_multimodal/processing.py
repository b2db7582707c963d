"""Input processing of Phi-4-multimodal: images in padded tiles and as a whole, audio as log-mel frames, a token per 80 ms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....callers.errors import CheckpointError, ConfigError
from ....kernels.pixels.layout import PatchLayout
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.speech import SpeechRequest
from ....mm.tiling.aspect import PaddedAspectTiles
from ....mm.tiling.plan import CropPad, CropPlan, TiledView
from ....mm.types import ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.audio import AudioInfo, audio_kwargs, audio_samples
from ....processors.bases.base import replace_matches
from ....processors.bases.speech import SpeechMixin
from ....processors.bases.tiles import TILE_KWARGS, TileSpec, height_width, positive_int_or
from ....processors.bases.with_audio import WithAudioInfo
from ....processors.files import ProcessorFiles
from ....processors.images import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    crops,
    patchify_crops,
    patchify_overview,
    read_pixel_spec,
)
from ....processors.kaldi_mel import KaldiMelSpec, kaldi_log_mel, read_kaldi_mel_spec
from ....processors.options import is_low_detail
from .config import hub_config, stored_adapters

_FRAMES_PER_ROW = 8
_TASKS = {"transcribe": "Transcribe the audio clip into text.", "translate": "Translate the audio to English."}
_NUMBERED = re.compile(r"<\|(image|audio)_\d+\|>")


class _Phi4AudioInfo(AudioInfo):
    """Audio as long as the decoder's context."""

    placeholders = {"audio": ("audio_token_id", 200011)}
    text_config_defaults = {"hidden_size": 3072, "max_position_embeddings": 131072}

    def resolve_spec(self, modality: str) -> KaldiMelSpec:
        json = self.files.audio
        spec = read_kaldi_mel_spec(json, KaldiMelSpec())
        self.check_config("audio_config", input_size=spec.num_mel_bins)
        for key, expected in (("audio_compression_rate", self.frames_per_row), ("audio_downsample_rate", 1)):
            if json.get(key, expected) != expected:
                raise ConfigError(f"{key} of the feature extractor is {json[key]}, config.json says {expected}")
        frames = positive_int_or(self.text_config, "max_position_embeddings", 131072) * self.frames_per_row
        return replace(spec, max_samples=spec.least_samples(frames))

    @property
    def frames_per_row(self) -> int:
        return positive_int_or(self.files.config.get("audio_config") or {}, "time_reduction", _FRAMES_PER_ROW)

    def num_rows(self, frames: int) -> int:
        return -(-frames // self.frames_per_row)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        spec = self.specs["audio"]
        features = kaldi_log_mel(audio_samples(item), spec)
        return audio_kwargs(features, len(features), dtype), self.geometry(item.header)


class Phi4MultimodalProcessingInfo(WithAudioInfo, SpeechMixin):
    """ProcessingInfo of Phi-4-multimodal.

    The tensors of an image are `pixel_values` `[patches, 3 * patch^2]`: those of the whole image, then of each tile those
    without its padding, followed by patches of the padding that complete squares of two by two: those right of its lines, then
    those below; and `layout` int64 `[4]`: rows and columns of tiles, rows and columns of patches.
    Audio has those of an AudioInfo and `beside_image`: whether the prompt has an image.

    `audio_text`: the text of the placeholder of audio in prompts.

    Raises:
        CheckpointError: the checkpoint lacks the folder of an adapter.
    """

    modalities = ("image", "audio")
    placeholders = {"image": ("image_token_id", 200010), **_Phi4AudioInfo.placeholders}
    valid_kwargs = {"image": (*TILE_KWARGS, "dynamic_hd"), "audio": ("beside_image",)}
    text_config_defaults = {**_Phi4AudioInfo.text_config_defaults, "vocab_size": 200064}
    adapter_folders: Mapping[str, str] = {"image": "vision-lora", "audio": "speech-lora"}
    language_codes = ("en", "zh", "de", "fr", "it", "ja", "es", "pt")
    takes_language = False
    tasks = tuple(_TASKS)
    audio_info = _Phi4AudioInfo
    audio_text = "<|audio|>"

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        super().__init__(files, *kwargs)
        lacking = [folder for name, folder in self.adapter_folders.items() if name not in self.adapters]
        if files.folder is not None and lacking:
            how = f"hf download ORG/NAME --include '{lacking[0]}/*' --local-dir {files.folder}"
            raise CheckpointError(
                f"{files.folder} lacks {' and '.join(lacking)}, without which the model does not understand images and audio; "
                f"copy the {'folders' if lacking[1:] else 'folder'} from the published checkpoint, as with `{how}`"
            )

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        config = hub_config(files.config)
        tokens = {f"{name}_token_id": (config.get(f"{part}_config") or {}).get(f"{name}_token_id")
                  for name, part in (("image", "vision"), ("audio", "audio"))}  # fmt: skip
        return replace(files, config={**tokens, **config})

    def resolve_spec(self, modality: str) -> Any:
        options = self.merged_kwargs[modality]
        if modality == "audio":
            return super().resolve_spec(modality)
        # The JSON's `resample` is that of the whole image, which this processor always resizes with bicubic.
        json = {key: value for key, value in self.files.image.items() if value is not None and key != "resample"}
        side, width = height_width(json.get("size") or {"height": 448, "width": 448})
        patch = positive_int_or(json, "patch_size", 14)
        self.check_config("vision_config", patch_size=patch, image_size=side, crop_size=side)
        if side != width or side % (2 * patch):
            raise ConfigError(f"size of the image processor is {side} x {width}; it must be a square of 2 * patch_size pixels")
        most = positive_int_or({**json, **options}, "dynamic_hd", 36)
        tiling = PaddedAspectTiles((side, side), 1, 1 if is_low_detail(options) else most)
        spec = TileSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, filter="bilinear", patch=patch, tiling=tiling)
        return read_pixel_spec(json, spec, options)

    def prompt_kwargs(self, items: Mapping[str, int]) -> Mapping[str, Any]:
        return {"beside_image": True} if items.get("image") and items.get("audio") else {}

    def options_key(self, modality: str) -> str:
        beside = self.merged_kwargs["audio"].get("beside_image") and modality == "audio"
        return super().options_key(modality) + (" beside_image" if beside else "")

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        if header.modality == "audio":
            return super().geometry(header)
        side, layout = self.side, self.layout(header)
        tall, wide = (-(-patches // 2) for patches in layout[2:])
        return ItemGeometry(tall * (wide + 1) + 1 + side * (side + 1), 1, 1, tiles=layout[:2], linear=True)

    @property
    def side(self) -> int:
        """Rows along a side of a tile."""
        spec: TileSpec = self.specs["image"]
        return spec.tiling.plan(1, 1).views[0].tile_size[0] // (2 * spec.patch)

    def layout(self, header: MediaHeader) -> tuple[int, int, int, int]:
        """Return rows and columns of tiles, and of patches that are not padding alone."""
        spec: TileSpec = self.specs["image"]
        plan = spec.tiling.plan(*header.size)
        resized, canvas = plan.views[0].steps
        padding = canvas.height - resized.height, canvas.width - resized.width
        tall, wide = (2 * self.side * tiles - pad // spec.patch for tiles, pad in zip(plan.tiles, padding, strict=True))
        return *plan.tiles, tall, wide

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        if not isinstance(item, ImageItem):
            kwargs, grid = super().process(item, dtype)
            beside = torch.tensor(bool(self.merged_kwargs["audio"].get("beside_image")))
            return {**kwargs, "beside_image": FieldElem(beside, BatchedField(keep_on_cpu=True))}, grid
        spec: TileSpec = self.specs["image"]
        full, layout = 2 * self.side, self.layout(item.header)
        view = spec.tiling.plan(*item.header.size).views[0]
        padded = next(crops(item.pixels[None], CropPlan((TiledView(view.steps),)), spec))
        whole = patchify_overview(padded, full * spec.patch, spec, spec.patch, dtype)
        cut = TiledView((CropPad(0, 0, padded.shape[2], padded.shape[3]),), view.rows, view.columns)
        patches = patchify_crops(padded.permute(0, 2, 3, 1), CropPlan((cut,)), spec, PatchLayout(spec.patch), dtype)
        kept = [whole]
        for number, tile in enumerate(patches.view(-1, full, full, patches.shape[1])):
            row, column = divmod(number, view.columns)
            tall, wide = min(full, layout[2] - full * row), min(full, layout[3] - full * column)
            right, below = tile[:tall, wide : wide + wide % 2], tile[tall : tall + tall % 2, : wide + wide % 2]
            kept += [part.flatten(0, 1) for part in (tile[:tall, :wide], right, below)]
        kwargs = {
            "pixel_values": FieldElem(torch.cat(kept), FlatField()),
            "layout": FieldElem(torch.tensor(layout), BatchedField(keep_on_cpu=True)),
        }
        return kwargs, self.geometry(item.header)

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return an option for so few tiles that they fit, if they are in one column, which has the most ends of lines."""
        per_tile = self.side * (self.side + 1)
        tiles = (rows - 1 - per_tile) // per_tile
        return {"dynamic_hd": tiles} if modality == "image" and tiles >= 1 else None

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return a request with the question of the model card; the model detects the language."""
        return SpeechRequest(f"<|user|>{self.audio_text}{_TASKS[task]}<|end|><|assistant|>")


class Phi4MMProcessingInfo(Phi4MultimodalProcessingInfo):
    """ProcessingInfo of the publisher's layout, in which prompts spell placeholders as plain text with numbers.

    The adapters' weights are stored with the model's own. Images are resized by Pillow.
    """

    default_kwargs = {"resample": "pillow"}
    adapter_folders: Mapping[str, str] = {}
    audio_text = "<|audio_1|>"

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        super().__init__(files, *kwargs)
        stored = stored_adapters(self.files.config)
        self.adapters = {name: of for name, of in (("image", "vision"), ("audio", "speech")) if of in stored}

    @property
    def text_placeholders(self) -> Mapping[str, int]:
        return {f"<|{name}_1|>": token for name, token in self.placeholder_ids.items()}

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Replace the placeholders' texts with tokens, in their order in the prompt; as published, numbers have no effect."""
        if not items:
            return ids
        tokens = self.placeholder_ids
        return replace_matches(ids, _NUMBERED, lambda match: tokens[match[1]], tokens.values(), self.files)
