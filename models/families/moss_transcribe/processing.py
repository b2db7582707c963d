"""Input processing of MOSS-Transcribe-Diarize: audio in windows of 30 s as log-mel frames, 12.5 tokens per second.

The number of seconds is written between the rows of audio, every two seconds. Sources: transformers' processor; vLLM's
moss_transcribe_diarize.py (the prompt, the longest audio).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ....callers.errors import ConfigError
from ....mm.languages import LANGUAGES
from ....mm.speech import SpeechRequest
from ....mm.types import ItemGeometry
from ....processors.bases.speech import SpeechMixin
from ....processors.bases.tiles import positive_int_or
from ....processors.bases.windows import WindowedAudioInfo
from ....processors.interface import Span
from ....processors.spans import Piece, build_span

_MAX_SECONDS = 90 * 60
_PROMPT = (
    "请将音频转写为文本，每一段需以起始时间戳和说话人编号（[S01]、[S02]、[S03]…）开头，正文为对应的语音内容，"
    "并在段末标注结束时间戳，以清晰标明该段语音范围。"
)
_SEGMENT = re.compile(r"\[[^\[\]]+\]\s*\[S\d+\](.*?)\[[^\[\]]+\]", re.DOTALL)  # [0.00][S01]text[7.56]


class MossTranscribeProcessingInfo(WindowedAudioInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of MOSS-Transcribe-Diarize."""

    placeholders = {"audio": ("audio_token_id", 151671)}
    text_config_defaults = {"hidden_size": 1024, "vocab_size": 151936, "max_position_embeddings": 131072}
    language_codes = tuple(LANGUAGES)
    takes_language = False
    clip_per_window = True

    @property
    def stack_factor(self) -> int:
        return positive_int_or(self.files.config, "audio_merge_size", 4)

    def max_windows(self, seconds: int, rows: int) -> int:
        return max(1, _MAX_SECONDS // seconds)

    def num_rows(self, frames: int) -> int:
        """Return the rows; an incomplete stack of encoder outputs is completed with silence."""
        return -(-((frames + 1) // 2) // self.stack_factor)

    def resolve_token_ids(self) -> None:
        """Read the rows per second and the seconds between two numbers, which stand in processor_config.json only."""
        json = self.files.read_json("processor_config.json")
        rate, every = json.get("audio_tokens_per_second", 12.5), json.get("time_marker_every_seconds", 2)
        if not isinstance(every, int) or every < 0 or not isinstance(rate, int | float) or rate <= 0:
            reason = "audio_tokens_per_second must be positive, and time_marker_every_seconds a number of seconds or 0"
            raise ConfigError(f"processor_config.json: {reason}; they are {rate!r} and {every!r}")
        self.row_rate, self.marked_seconds = float(rate), every

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        return build_span(self._pieces(geometry.num_embeds), self.placeholder_ids[modality])

    def _pieces(self, rows: int) -> Sequence[Piece]:
        """Return the rows between two numbers, and the numbers."""
        step = int(self.row_rate * self.marked_seconds)
        if not step:
            return [rows]
        pieces, used = list[Piece](), 0
        for number in range(1, int(rows / self.row_rate) // self.marked_seconds + 1):
            pieces += [step, self.encode(str(number * self.marked_seconds))]
            used = number * step
        return [*pieces, rows - used] if rows > used else pieces

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the published prompt; the model detects the language."""
        user = f"<|audio_start|><|audio_pad|><|audio_end|>\n{_PROMPT}<|im_end|>\n"
        system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        return SpeechRequest(f"{system}<|im_start|>user\n{user}<|im_start|>assistant\n")

    def parse_transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        """Return the text of all segments, or the whole answer if it has none."""
        text, language = super().parse_transcript(answer, language)
        segments = [part.strip() for part in _SEGMENT.findall(text)]
        return " ".join(segments) or text, language
