"""Input processing of Fun-ASR-Nano: Kaldi's log-mel frames, seven of which are stacked every 60 ms.

Sources: the feature extractor, the processor and the chat template of transformers; the publisher's inference code, whose front
end has the same features of louder samples and whose decoder reads a token per 480 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....mm.speech import SpeechRequest
from ....mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem
from ....processors.bases.audio import AudioInfo, audio_kwargs, audio_samples
from ....processors.bases.speech import SpeechMixin
from ....processors.bases.tiles import positive_int_or
from ....processors.files import ProcessorFiles
from ....processors.kaldi_mel import KaldiMelSpec, kaldi_log_mel
from .config import hub_config, hub_extractor

_POSITIONS = 2049
_TOKENS = {False: "<|object_ref_start|>", True: "<|AUDIO|>"}  # of transformers' layout, of the publisher's
_NAMES = (
    "zh=中文 en=英文 ja=日文 yue=粤语 ko=韩文 vi=越南语 id=印尼语 th=泰语 ms=马来语 fil=菲律宾语 ar=阿拉伯语 hi=印地语 "
    "bg=保加利亚语 hr=克罗地亚语 cs=捷克语 da=丹麦语 nl=荷兰语 et=爱沙尼亚语 fi=芬兰语 el=希腊语 hu=匈牙利语 ga=爱尔兰语 "
    "lv=拉脱维亚语 lt=立陶宛语 mt=马耳他语 pl=波兰语 pt=葡萄牙语 ro=罗马尼亚语 sk=斯洛伐克语 sl=斯洛文尼亚语 sv=瑞典语"
)
_LANGUAGES = dict(entry.split("=") for entry in _NAMES.split())
_CONTEXT = "请结合上下文信息，更加准确地完成语音转写任务。如果没有相关信息，我们会留空。\n\n\n**上下文信息：**\n\n\n"


@dataclass(frozen=True)
class StackedMelSpec(KaldiMelSpec):
    """`stack`: frames of a row of the encoder. `stride`: frames between two rows. `rows_per_token`: as in `hub_config`."""

    high: float = 8000.0
    low: float = 20.0
    sample_scale: float = 1.0
    centered: bool = True
    floor: float = torch.finfo(torch.float32).eps
    stack: int = 7
    stride: int = 6
    rows_per_token: int = 1

    def num_stacks(self, frames: int) -> int:
        return -(-frames // self.stride)


class FunAsrNanoProcessingInfo(AudioInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of Fun-ASR-Nano and of its multilingual checkpoint.

    Languages other than Chinese, English and Japanese are those of the latter. `context` are words to expect.
    """

    text_config_defaults = {"hidden_size": 1024, "vocab_size": 151936}
    language_codes = tuple(_LANGUAGES)
    takes_context = True

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        return replace(files, config=hub_config(files.config), audio=hub_extractor(files.audio))

    @property
    def rows_per_token(self) -> int:
        return positive_int_or(self.files.config, "rows_per_token", 1)

    @property
    def audio_text(self) -> str:
        return _TOKENS[self.rows_per_token > 1]

    def placeholder_keys(self) -> Mapping[str, tuple[str | int, ...]]:
        return {"audio": ("audio_token_id", self.audio_text if self.rows_per_token > 1 else 151646)}

    def resolve_spec(self, modality: str) -> StackedMelSpec:
        """Read the JSON of the feature extractor. The longest audio fills the encoder's positions."""
        audio = self.files.audio
        rate, stack, stride = (
            positive_int_or(audio, key, value)
            for key, value in (("sampling_rate", 16_000), ("num_frames_lfr", 7), ("stride_lfr", 6))
        )
        if audio.get("window", "hamming") != "hamming":
            raise ConfigError(f"window of the feature extractor is {audio['window']!r}; only 'hamming' is supported")
        window, hop = (
            rate * positive_int_or(audio, key, value) // 1000 for key, value in (("frame_length", 25), ("frame_shift", 10))
        )
        spec = StackedMelSpec(
            num_mel_bins=positive_int_or(audio, "feature_size", 80),
            sampling_rate=rate,
            n_fft=1 << (window - 1).bit_length(),
            win_length=window,
            hop_length=hop,
            high=rate / 2,
            sample_scale=audio.get("sample_scale", 1.0),
            stack=stack,
            stride=stride,
            rows_per_token=self.rows_per_token,
        )
        self.check_config("audio_config", num_mel_bins=spec.num_mel_bins, num_stacked_frames=stack)
        rows = positive_int_or(self.files.config.get("audio_config") or {}, "max_position_embeddings", _POSITIONS) - 1
        return replace(spec, max_samples=spec.least_samples(rows * stride))

    @property
    def mel_spec(self) -> StackedMelSpec:
        spec: StackedMelSpec = self.specs["audio"]
        return spec

    def num_rows(self, frames: int) -> int:
        return -(-self.mel_spec.num_stacks(frames) // self.mel_spec.rows_per_token)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `input_features` `[stacks, stack * num_mel_bins]` and `audio_frames`, the number of stacks."""
        features = stacked_frames(kaldi_log_mel(audio_samples(item), self.mel_spec), self.mel_spec)
        return audio_kwargs(features, len(features), dtype), self.geometry(item.header)

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the publisher's prompt, which names words to expect and the language in Chinese."""
        words = f"{_CONTEXT}热词列表：[{context}]\n" if context else ""
        name = "" if language is None else f"成{_LANGUAGES[language]}"
        user = f"{words}语音转写{name}：{self.audio_text}"
        turns = f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
        return SpeechRequest(f"{turns}<|im_start|>assistant\n")


def stacked_frames(frames: Tensor, spec: StackedMelSpec) -> Tensor:
    """Stack the frames around every `stride`-th one, `[n, bins]` -> `[stacks, stack * bins]`; end frames are repeated."""
    before, count = (spec.stack - 1) // 2, spec.num_stacks(len(frames))
    after = max(0, (count - 1) * spec.stride + spec.stack - before - len(frames))
    padded = torch.cat((frames[:1].expand(before, -1), frames, frames[-1:].expand(after, -1)))
    return padded.unfold(0, spec.stack, spec.stride)[:count].transpose(1, 2).flatten(1)
