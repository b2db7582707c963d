"""What Granite Speech wants to be fed: sounds as pairs of log-mel frames, three tokens for 300 ms. Knows no model.

Source: the published feature extractor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..mm.errors import ConfigError
from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.speech import SpeechRequest
from ..mm.types import AudioItem, ItemGeometry, MediaItem, MultiModalKwargsItem
from .mel import MelSpec, log_mel, read_mel_spec
from .speech import SpeechInfo

_PAIR = 2  # frames of a row
_TASKS = {
    "transcribe": "can you transcribe the speech into a written format?",
    "translate": "translate the speech to English.",
}


@dataclass(frozen=True)
class PairSpec(MelSpec):
    """`seen` rows of the encoder make `made` embeddings; a group that is not full makes as many."""

    seen: int = 15
    made: int = 3


class GraniteSpeechProcessingInfo(SpeechInfo):
    """ProcessingInfo and SupportsTranscription of Granite Speech. One slot token becomes as many as the item has embeddings."""

    adapters = {"audio": "."}
    slots = {"audio": ("audio_token_index", "audio_token_id", 49155)}
    published = {"hidden_size": 2048, "vocab_size": 49160, "max_position_embeddings": 131072}
    mel = MelSpec(mels=80, window=512, heard=400, ends=True, plain=True)
    codes = ("en", "fr", "de", "es", "pt")
    tasks = tuple(_TASKS)

    def read(self, modality: str) -> PairSpec:
        """The longest sound fills the decoder's context."""
        given = self.files.audio
        spectrogram = given.get("melspec_kwargs") or {}
        spec = read_mel_spec({**given, **spectrogram}, replace(self.mel, heard=spectrogram.get("win_length", self.mel.heard)))
        self.agree("encoder_config", input_dim=_PAIR * spec.mels)
        config = {"window_size": 15, "downsample_rate": 5, **self.files.config}
        seen, made = config["window_size"], config["window_size"] // config["downsample_rate"]
        for key, have in (("projector_window_size", seen), ("projector_downsample_rate", config["downsample_rate"])):
            if given.get(key, have) != have:
                raise ConfigError(f"{key} of the feature extractor is {given[key]}, config.json says {have}")
        groups = max(1, int(self.text["max_position_embeddings"]) // made)
        longest = (groups * seen * _PAIR) * spec.hop - 1
        return PairSpec(**vars(replace(spec, longest=longest)), seen=seen, made=made)

    def num_rows(self, frames: int) -> int:
        spec: PairSpec = self.specs["audio"]
        return math.ceil(frames // _PAIR / spec.seen) * spec.made

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`input_features` `[rows, 2 * mels]`, and `audio_frames`, how many rows; a frame that is left over is dropped."""
        if not isinstance(item, AudioItem):
            raise TypeError(f"a {type(item).__name__} is no sound")
        features, grid = log_mel(item.samples, self.window), self.geometry(item.header)
        rows = features[: len(features) // _PAIR * _PAIR].reshape(-1, _PAIR * self.window.mels)
        frames = FieldElem(torch.tensor(len(rows)), BatchedField(keep_on_cpu=True))
        return {"input_features": FieldElem(rows.to(dtype), FlatField()), "audio_frames": frames}, grid

    def transcription(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """The questions of the model's card; it finds out the language."""
        asked = f"<|start_of_role|>user<|end_of_role|><|audio|>{_TASKS[task]}<|end_of_text|>\n"
        return SpeechRequest(f"{asked}<|start_of_role|>assistant<|end_of_role|>")
