"""Input processing of Nemotron 3 Omni: that of Nemotron-Nano-VL, with resized pixels unrounded, and NeMo's log-mel frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....checkpoints.config import positive_int
from ....mm.types import ItemGeometry
from ....processors.bases.fastconformer import FastConformerInfo
from ....processors.bases.with_audio import WithAudioInfo
from ....processors.files import ProcessorFiles
from ....processors.interface import Span
from ....processors.options import TIME_KWARGS
from ....processors.spans import build_span
from ..nemotron_vl.processing import LlamaNemotronVLProcessingInfo, NemotronVideoInfo
from .config import publisher_config

_VIDEO_KEYS = ("video_target_num_patches", "video_maintain_aspect_ratio")
_MAX_SECONDS = 3600


class _SoundInfo(FastConformerInfo):
    placeholders = {"audio": ("sound_context_token_id", "<so_embedding>")}

    def num_rows(self, frames: int) -> int:
        """Return the rows of the frames and of one of padding. A single frame has no variance."""
        return super().num_rows(frames + 1) if frames > 1 else 0


class NemotronOmniProcessingInfo(WithAudioInfo, NemotronVideoInfo, LlamaNemotronVLProcessingInfo):
    """ProcessingInfo of Nemotron 3 Omni. Numbers of patches are those of the preprocessors' JSON, or else of config.json."""

    modalities: tuple[str, ...] = ("image", "video", "audio")
    adds_special_tokens = True
    placeholders = {**LlamaNemotronVLProcessingInfo.placeholders, **_SoundInfo.placeholders}
    valid_kwargs = {
        "image": ("detail", "max_num_patches"),
        "video": (*TIME_KWARGS, "fps", "num_frames"),
        "audio": (),
    }
    audio_info = _SoundInfo
    unrounded = True

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        config = publisher_config(files.config)
        config.setdefault("video_context_token_id", _unused_id(config))
        vision, image = config["vision_config"], files.image
        most = image.get("max_model_len")
        limits = {key: image[key] for key in ("min_num_patches", "max_num_patches") if image.get(key)}
        if image.get("max_num_patches") == 0:  # no maximum but that of the context
            vision["args"].pop("max_num_patches", None)
        vision |= {key: files.video[key] for key in _VIDEO_KEYS if key in files.video}
        vision["args"] |= limits
        config |= {"max_sequence_length": most} if most else {}
        if "sound_config" not in config:
            self.modalities = ("image", "video")
            return super().prepare_files(replace(files, config=config))
        sound = config["sound_config"]
        audio = {"feature_size": sound["num_mel_bins"], "max_audio_clip_s": _longest(sound), **files.audio}
        return super().prepare_files(replace(files, config={**config, "encoder_config": sound}, audio=audio))

    def placeholder_keys(self) -> Mapping[str, tuple[str | int, ...]]:
        return {name: key for name, key in self.placeholders.items() if name in self.modalities}

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the rows between their start and end; for a video, for each group of frames after their numbers and times."""
        if modality != "audio":
            return super().span(modality, geometry)
        start, end = (self.special_token_id(token) for token in ("<so_start>", "<so_end>"))
        return build_span([(start,), geometry.num_embeds, (end,)], self.placeholder_ids["audio"])

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return None if modality == "audio" else super().shrink_kwargs(modality, grid, rows)


def _unused_id(config: Mapping[str, Any]) -> int:
    """Return an id outside the vocabulary, which stands for `<video>`."""
    text = config.get("text_config") or config.get("llm_config") or {}
    return int(text.get("vocab_size", 131072))


def _longest(sound: Mapping[str, Any]) -> float:
    """Return the seconds of the longest item: 100 frames per second, and one of padding."""
    frames = positive_int(sound, "max_position_embeddings") * positive_int(sound, "subsampling_factor") - 1
    return min(_MAX_SECONDS, frames / 100)
