"""Input processing of Ultravox: audio in windows of 30 s as log-mel frames, one token per 160 ms.

Source: the published processor. It pads the last of several windows with zeros; here the model does this. A single window is
as long as its audio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from ....processors.bases.base import replace_text
from ....processors.bases.windows import WindowedAudioInfo
from ....processors.files import ProcessorFiles
from ....processors.mel import MelSpec, log_mel

PLACEHOLDER = "<|audio|>"
_MIN_FRAMES = 2


class UltravoxProcessingInfo(WindowedAudioInfo):
    """ProcessingInfo of Ultravox. Its placeholder is plain text, not a token; texts on both sides are tokenized separately."""

    placeholders = {"audio": ("audio_token_index", 32000)}
    text_config_defaults = {"hidden_size": 4096, "max_position_embeddings": 2048}
    mel_defaults = MelSpec(num_mel_bins=80)
    adds_special_tokens = False

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Return config.json with a placeholder that follows the decoder's vocabulary (v0.6) as part of the vocabulary."""
        text, token = files.config.get("text_config") or files.config, files.config.get("audio_token_index")
        if not isinstance(token, int) or token != text.get("vocab_size"):
            return files
        return replace(files, config={**files.config, "text_config": {**text, "vocab_size": token + 1}})

    @property
    def text_placeholders(self) -> Mapping[str, int]:
        return {PLACEHOLDER: self.placeholder_ids["audio"]}

    @property
    def stack_factor(self) -> int:
        return int(self.files.config.get("stack_factor", 8))

    def num_rows(self, frames: int) -> int:
        """Return the rows; in each window an incomplete stack is padded."""
        window, stack = self.mel_spec.window_frames, 2 * self.stack_factor
        windows, rest = divmod(frames, window)
        return windows * -(-window // stack) + -(-rest // stack)

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Replace the placeholder's text with the placeholder token."""
        return replace_text(ids, PLACEHOLDER, self.placeholder_ids["audio"], self.files) if items.get("audio") else ids

    def window_features(self, samples: Tensor) -> list[Tensor]:
        spec = self.mel_spec
        frames = max(_MIN_FRAMES, spec.num_frames(len(samples)))
        padded = F.pad(samples, (0, frames * spec.hop_length - len(samples)))
        return list(log_mel(padded, spec).split(spec.window_frames))
