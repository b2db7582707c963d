"""Fun-Audio-Chat (arXiv 2512.20156): Qwen2.5-Omni's audio encoder, averages of five rows, Qwen3; text output only.

The decoder of speech tokens is not used. The embedding of speech tokens is: its row for padding is added to every row of audio.

Source: the publisher's modelling file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int
from ...audio.chunked_encoder import ChunkedEncoder
from ...audio.mel_encoder import mel_encoder_spec
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.basic import TensorModule
from ...layers.builder import Builder
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...thinker import check_output_dim
from ...window_model import config_sections

_DEFAULTS: Mapping[str, Any] = {"n_window": 100, "output_dim": 3584, "group_size": 5, "continuous_features_mode": "replace"}
_MODES = ("add", "replace")


def _speech_codebook(audio: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the size of the codebook and its padding token; 0 and None if audio replaces the embeddings of speech tokens.

    Raises:
        ConfigError: another way to join the two, or padding that is not a token of the codebook.
    """
    mode = audio["continuous_features_mode"]
    if mode not in _MODES:
        raise ConfigError(f"continuous_features_mode {mode!r} of audio_config is not supported; known are {', '.join(_MODES)}")
    if mode == "replace":
        return 0, None
    size, pad = positive_int(audio, "codebook_size"), audio.get("pad_token_id")
    if isinstance(pad, bool) or not isinstance(pad, int) or not 0 <= pad < size:
        raise ConfigError(f"pad_token_id of audio_config is {pad!r}; it must be a token of the codebook of {size}")
    return size, pad


class SpeechGroups(TensorModule):
    """Averages groups of encoder rows and projects them. With a codebook, the projected row of padding is added.

    `[rows * group, width]` -> `[rows, width]`. `pad`: number of the padding token in a codebook of `size` tokens, or None.
    """

    def __init__(self, width: int, group: int, size: int, pad: int | None, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        build, self.group, self.pad = Builder(self, dtype, device), group, pad
        names = ["continual_output_matching"] + ["output_matching"] * (pad is not None)
        self.layers = [build.linear([name], width, [width], False) for name in names]
        self.tables = [] if pad is None else [build.stored("embed_tokens.weight", size, width)]

    def forward(self, x: Tensor) -> Tensor:
        project, *match = self.layers
        out = project(x.view(-1, self.group, x.shape[1]).mean(1))
        for layer, table in zip(match, self.tables, strict=True):
            out += layer(table.weight[self.pad].unsqueeze(0))
        return out


class FunAudioChat(DecoderModel):
    """A model of audio."""

    prefixes = (("continuous_audio_tower.", "audio_encoder."), ("audio_tower.", "speech_groups."), *TEXT_PREFIXES)
    ignored: Sequence[str] = ("audio_encoder.audio_bos_eos_token.", "audio_invert_tower.")

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, audio = config_sections(config, {})
        config, audio = {**config, "text_config": text}, {**_DEFAULTS, **audio}
        super().__init__(decoder_spec(config, stack_of(config, "qwen2")), dtype, device)
        check_output_dim(positive_int(audio, "output_dim"), self.hidden_size)
        size, pad = _speech_codebook(audio)
        if pad is None:
            self.ignored = (*self.ignored, "speech_groups.embed_tokens.", "speech_groups.output_matching.")
        encoder = replace(mel_encoder_spec(audio), positions=positive_int(audio, "n_window"))
        self.audio_encoder = ChunkedEncoder(encoder, self.hidden_size, dtype, device)
        self.speech_groups = SpeechGroups(self.hidden_size, positive_int(audio, "group_size"), size, pad, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        counts, group = tensors["audio_rows"].tolist(), self.speech_groups.group
        items = self.audio_encoder(tensors["input_features"], tensors["audio_frames"].tolist())
        padded = [
            F.pad(rows[: n * group], (0, 0, 0, max(0, n * group - len(rows)))) for rows, n in zip(items, counts, strict=True)
        ]
        del items
        return list(self.speech_groups(torch.cat(padded)).split(counts))

    def _max_encoded(self, rows: int) -> int:
        """Return the most encoder rows of an item with `rows` rows: one more than fill them."""
        return rows * self.speech_groups.group + 1

    def input_bytes(self, modality: str, rows: int) -> int:
        return self.audio_encoder.input_bytes(self._max_encoded(rows))

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        encoded, row = self._max_encoded(rows), self.hidden_size * self.dtype.itemsize
        joined = self.input_bytes(modality, rows) + (2 * encoded + 3 * rows) * row
        return max(self.audio_encoder.encoder_bytes(encoded, limits), joined)
