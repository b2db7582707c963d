"""Input processing of Kimi-Audio: audio in windows of 30 s as log-mel frames, 12.5 tokens per second.

Source: the publisher's inference code. Its prompts are two streams, of audio and of text tokens, one of which always has the
blank; here they are one stream.
"""

from __future__ import annotations

from dataclasses import replace

from ....mm.speech import SpeechRequest
from ....processors.bases.speech import SpeechMixin
from ....processors.bases.windows import WindowedAudioInfo
from ....processors.files import ProcessorFiles, read_preprocessors
from ....processors.mel import MelSpec

_ENCODER = "whisper-large-v3"  # folder of the checkpoint
_AUDIO = "<|im_media_begin|><|im_kimia_text_blank|><|im_media_end|>"
_ANSWER_IN_TEXT = "<|im_kimia_speech_ct_id|>"  # follows audio that ends a turn
_TEXT_END = "<|im_kimia_text_eos|>"  # follows each text of an answer
_TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if m.role not in ('user', 'assistant') -%}{{ raise_exception('this model takes no message of role ' ~ m.role) }}"
    "{%- endif -%}"
    "{%- if loop.first or loop.previtem.role != m.role -%}{{- '<|im_kimia_' ~ m.role ~ '_msg_start|>' -}}{%- endif -%}"
    "{%- set ends = loop.last or loop.nextitem.role != m.role -%}"  # messages of one role in sequence are one turn
    "{%- set text_end = '" + _TEXT_END + "' if m.role == 'assistant' else '' -%}"
    "{%- if m.content is string -%}{{ m.content ~ text_end }}{%- else -%}{%- for part in m.content -%}"
    "{%- if part.type == 'text' -%}{{ part.text ~ text_end }}"
    "{%- elif part.type == 'audio' -%}{{ '" + _AUDIO + "' ~ ('" + _ANSWER_IN_TEXT + "' if loop.last and ends else '') }}"
    "{%- else -%}{{ raise_exception('this model takes text and audio') }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- if ends -%}{{- '<|im_msg_end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_kimia_assistant_msg_start|>' }}{%- endif -%}"
)


class KimiAudioProcessingInfo(WindowedAudioInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of Kimi-Audio."""

    placeholders = {"audio": ("kimia_text_blank_token_id", 151666)}
    text_config_defaults = {"hidden_size": 3584, "vocab_size": 168448, "max_position_embeddings": 8192}
    mel_defaults = MelSpec(num_mel_bins=128)
    language_codes = ("zh", "en")
    takes_language = False
    clip_per_window = True
    chat_template = _TEMPLATE
    end_tokens = (_TEXT_END, "<|im_msg_end|>")

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Return the files with the feature extractor's JSON, which is beside the encoder's weights."""
        if files.audio or files.folder is None:
            return files
        return replace(files, audio=read_preprocessors(files.folder / _ENCODER).audio)

    def num_rows(self, frames: int) -> int:
        return -(-frames // (2 * self.stack_factor))

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the publisher's prompt: an instruction in Chinese, then the audio."""
        turn = f"<|im_kimia_user_msg_start|>请将音频内容转换为文字。{_AUDIO}{_ANSWER_IN_TEXT}<|im_msg_end|>"
        return SpeechRequest(f"{turn}<|im_kimia_assistant_msg_start|>")
