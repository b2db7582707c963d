"""Input processing of VibeVoice-ASR: samples at 24 kHz of one loudness, 3,200 of which make a row.

Sources: the feature extractor and the processor of transformers; the chat template of the Hub's checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.speech import SpeechRequest
from ....mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.audio import AudioInfo, audio_samples
from ....processors.bases.speech import SpeechMixin
from ....processors.bases.tiles import positive_int_or
from ....processors.files import ProcessorFiles
from ....processors.interface import Span
from ....processors.mel import MelSpec
from .config import hub_config, section_of

_MAX_SECONDS = 61 * 60
_RATIOS = (2, 2, 4, 5, 5, 8)
_DURATION = -1  # stands for the seconds of the audio before it
_DURATION_TEXT = "<|AUDIO_DURATION|>"
_SYSTEM = "You are a helpful assistant that transcribes audio input into text output in JSON format."
_KEYS = "these keys: Start time, End time, Speaker ID, Content"
_LANGUAGES = ("en", "zh", "ja", "ko", "de", "fr", "es", "pt", "it", "nl", "ru", "ar", "hi", "pl", "tr", "uk", "vi", "th")


@dataclass(frozen=True)
class LoudnessSpec(MelSpec):
    """Samples as they are. `hop_length`: samples of a row. `decibels_fs`: loudness; None: it is not changed. `eps`: of it."""

    decibels_fs: float | None = -25.0
    eps: float = 1e-6


class VibeVoiceAsrProcessingInfo(AudioInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of VibeVoice-ASR. `context` are words to expect; it detects the language."""

    placeholders = {"audio": ("audio_token_id", 151648)}
    text_config_defaults = {"hidden_size": 3584, "vocab_size": 152064, "max_position_embeddings": 131072}
    language_codes = _LANGUAGES
    takes_language = False
    takes_context = True
    adds_special_tokens = False

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Return the files in the Hub's layout. The publisher's JSON calls the rate `target_sample_rate`."""
        audio = {key.replace("target_sample_rate", "sampling_rate"): value for key, value in files.audio.items()}
        return replace(files, config=hub_config(files.config), audio=audio)

    def resolve_spec(self, modality: str) -> LoudnessSpec:
        """Read the JSON of the feature extractor. A row has as many samples as config.json says."""
        audio, encoder = self.files.audio, section_of(self.files.config, "acoustic_tokenizer_encoder_config")
        rate, ratios = positive_int_or(audio, "sampling_rate", 24_000), encoder.get("downsampling_ratios") or _RATIOS
        if not isinstance(ratios, list | tuple) or not all(isinstance(ratio, int) and ratio > 0 for ratio in ratios):
            raise ConfigError(f"downsampling_ratios in config.json is {ratios!r}; it must be a list of positive integers")
        loudness, eps = audio.get("target_dB_FS", -25), audio.get("eps", 1e-6)
        if not all(isinstance(value, int | float) for value in (loudness, eps)) or eps < 0:
            reason = "target_dB_FS must be a number, and eps a number of at least 0"
            raise ConfigError(f"the feature extractor: {reason}; they are {loudness!r} and {eps!r}")
        return LoudnessSpec(
            sampling_rate=rate,
            hop_length=prod(ratios),
            max_samples=_MAX_SECONDS * rate,
            decibels_fs=float(loudness) if audio.get("normalize_audio", True) else None,
            eps=eps,
        )

    @property
    def mel_spec(self) -> LoudnessSpec:
        spec: LoudnessSpec = self.specs["audio"]
        return spec

    def num_rows(self, frames: int) -> int:
        return frames

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return the rows and, as the time of the item, its seconds."""
        return replace(super().geometry(header), times=(header.samples / self.mel_spec.sampling_rate,))

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `input_values` `[rows * hop]`, with silence at the end, and `audio_rows`."""
        samples, geometry, spec = audio_samples(item), self.geometry(item.header), self.mel_spec
        values = F.pad(_leveled(samples, spec), (0, -len(samples) % spec.hop_length)).to(dtype)
        rows = FieldElem(torch.tensor(geometry.num_embeds), BatchedField(keep_on_cpu=True))
        return {"input_values": FieldElem(values, FlatField()), "audio_rows": rows}, geometry

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the rows. Without the source of the rows, their number tells the seconds."""
        spec = self.mel_spec
        (seconds,) = geometry.times or (geometry.num_embeds * spec.hop_length / spec.sampling_rate,)
        span = super().span(modality, geometry)
        return replace(span, fills={_DURATION: tuple(self.encode(f"{seconds:.2f}"))}) if self.files.encode else span

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Put a number for the seconds of each audio in place of the text that stands for them after its placeholder."""
        audio = self.placeholder_ids["audio"]
        if not items.get("audio") or audio not in ids or self.files.encode is None or self.files.decode is None:
            return ids
        start = list(ids).index(audio) + 1
        token = self.files.token_to_id(_DURATION_TEXT) if self.files.token_to_id else None
        tail = [_DURATION if one == token else one for one in ids[start:]]
        return [*ids[:start], *_without_text(tail, self.files.encode, self.files.decode)]

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return self.preprocess_prompt(ids, items)

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the published prompt, with words to expect."""
        asked = f"with extra info: {context}\n\nPlease transcribe" if context else "please transcribe"
        audio = "<|object_ref_start|><|box_start|><|object_ref_end|>"
        user = f"{audio}\nThis is a <|AUDIO_DURATION|> seconds audio, {asked} it with {_KEYS}<|im_end|>\n"
        return SpeechRequest(f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{user}<|im_start|>assistant\n")

    def parse_transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        """Return the text of all segments, or the whole answer if it is no list of segments. An unfinished one is left out."""
        text, language = super().parse_transcript(answer, language)
        return _segments_text(text.removeprefix("assistant").strip()) or text, language


def _without_text(
    ids: Sequence[int], encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Return ids with a number in place of each text that stands for seconds. Only the tokens that spell it change."""
    out = list[int]()
    for token in ids:
        out.append(token)
        if _DURATION_TEXT[-1] not in _text([token], decode):
            continue
        last = out[-len(_DURATION_TEXT) :]
        if _DURATION in last:
            last = last[len(last) - last[::-1].index(_DURATION) :]
        if _DURATION_TEXT in _text(last, decode):
            first = next(n for n in range(1, len(last) + 1) if _DURATION_TEXT in _text(last[-n:], decode))
            before, _, after = _text(out[-first:], decode).partition(_DURATION_TEXT)
            out[-first:] = [*encode(before), _DURATION, *encode(after)]
    return out


def _text(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    return "" if _DURATION in ids else decode(ids)


def _leveled(samples: Tensor, spec: LoudnessSpec) -> Tensor:
    """Return the samples at the loudness of the spec, or quieter if they would exceed 1."""
    if spec.decibels_fs is None:
        return samples
    samples = samples * (10 ** (spec.decibels_fs / 20) / (samples.square().mean().sqrt() + spec.eps))
    peak = samples.abs().max()
    return samples / (peak + spec.eps) if peak > 1.0 else samples


def _segments_text(answer: str) -> str:
    """Return the text of a JSON list of segments, whose end may be missing; "" for anything else."""
    decoder, texts, place = json.JSONDecoder(), list[str](), 1
    while answer.startswith("[") and (match := re.compile(r"[\s,]*").match(answer, place)):
        try:
            segment, place = decoder.raw_decode(answer, match.end())
        except (ValueError, RecursionError):
            break
        if isinstance(segment, dict) and isinstance(segment.get("Content"), str):
            texts.append(segment["Content"].strip())
    return " ".join(texts)
