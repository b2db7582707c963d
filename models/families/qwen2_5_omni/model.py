"""Qwen2.5-Omni (arXiv 2503.20215): a thinker, which is Qwen2.5-VL with an audio tower, a talker, and a code-to-wave model.

The audio tower is Whisper-like and attends within two seconds. The talker's input for a token is the sum of the thinker's
hidden state and token embedding. For a generated code it is the sum of the code's embedding and the next of these rows of the
answer; behind the answer follow the embeddings of an end and of padding. A diffusion transformer and BigVGAN turn codes into
samples. These depend on many codes after them, through every step of the diffusion; the publisher's server therefore computes
windows of codes, each with the blocks around it that one evaluation of the transformer sees.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....callers.errors import CheckpointError, ConfigError
from ....checkpoints.config import positive_int, require
from ....checkpoints.torch_file import read_saved
from ...audio.bigvgan import BigVgan, bigvgan_spec
from ...audio.chunked_encoder import ChunkedEncoder
from ...audio.flow_matching import FlowDecoder, flow_spec
from ...audio.mel_encoder import LARGE, mel_encoder_spec
from ...interface import CacheSpec, ForwardBatch, StepLimits
from ...layers.basic import EmbeddingTable
from ...layers.linear import Linear
from ...native_model import NativeModel
from ...talker import Division, InputDecoder, SpokenAnswer, TalkerPrompt, noise, section, with_last
from ...text.attention import gathered_bytes
from ...text.decoder import decoder_bytes
from ...text.decoder_config import decoder_spec
from ...thinker import TALKER_PREFIXES, check_output_dim, thinker_config, with_thinker_prefix
from ...vision.spec import GATED_BLOCKS
from ...weights import fill
from ..qwen2_vl.model import PREFIXES, STACK, qwen25_tower

# defaults that the published config.json leaves out
AUDIO = {**LARGE, "n_window": 100, "output_dim": 3584}
TEXT = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
_NAMES = replace(GATED_BLOCKS, qkv=("attn.q", "attn.k", "attn.v"))
RATE = 24_000
PART = 4  # blocks of frames that are computed at once when samples are streamed
WINDOW = 3  # blocks of a window, without those around it
VOICES = "spk_dict.pt"
_TALKER: dict[str, Any] = {
    "vocab_size": 8448, "embedding_size": 3584, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6,
    "tts_text_end_token_id": 151861, "tts_text_pad_token_id": 151859, "tts_codec_start_token_id": 8293,
    "tts_codec_end_token_id": 8294, "tts_codec_pad_token_id": 8292, "tts_codec_mask_token_id": 8296,
}  # fmt: skip
_FLOW: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 22, "num_attention_heads": 16, "ff_mult": 2, "emb_dim": 512, "head_dim": 64,
    "max_position_embeddings": 32768, "block_size": 24, "look_ahead_layers": (10,), "look_backward_layers": (0, 20),
    "repeats": 2, "num_embeds": 8193, "mel_dim": 80, "enc_emb_dim": 192, "enc_dim": 128,
    "enc_channels": (256, 256, 256, 256, 768), "enc_kernel_sizes": (5, 3, 3, 3, 1), "enc_dilations": (1, 2, 3, 4, 1),
    "enc_attention_channels": 64, "enc_res2net_scale": 2, "enc_se_channels": 64,
}  # fmt: skip
_VOCODER: dict[str, Any] = {
    "mel_dim": 80, "upsample_initial_channel": 1536, "resblock_kernel_sizes": (3, 7, 11),
    "resblock_dilation_sizes": ((1, 3, 5),) * 3, "upsample_rates": (5, 3, 2, 2, 2, 2),
    "upsample_kernel_sizes": (11, 7, 4, 4, 4, 4),
}  # fmt: skip
_PREFIXES = (
    ("talker.model.embed_tokens.", "embed_tokens."),
    ("talker.model.", "decoder."),
    ("talker.", ""),
    ("token2wav.code2wav_dit_model.", "flow."),
    ("token2wav.code2wav_bigvgan_model.", "vocoder."),
)
_BUFFERS = ("inv_freq", ".filter")  # ends of the names of tensors that are computed here


class Qwen25Talker(nn.Module):
    """Implements `models.talker.Talker`. The code-to-wave model computes in float32."""

    __call__: Callable[..., Tensor]

    layer: int | None = None
    predictor = None
    sampling: Mapping[str, float] = {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05}

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        talker, wave = section(config, "talker_config", _TALKER), section(config, "token2wav_config", {})
        spec, width = decoder_spec({"text_config": talker}, STACK), positive_int(talker, "embedding_size")
        self.spec, self.width, self.dtype, self.device = spec, width, dtype, device
        self.vocab_size, self.max_positions = spec.vocab_size, spec.max_positions
        self.decoder = InputDecoder(spec, dtype, device)
        self.cache_specs: Sequence[CacheSpec] = self.decoder.cache_specs
        self.embed_tokens = EmbeddingTable(spec.vocab_size, width, dtype, device)
        self.inputs = Linear(width, {"thinker_to_talker_proj": spec.hidden_size}, True, dtype, device)
        self.head = Linear(spec.hidden_size, {"codec_head": spec.vocab_size}, False, dtype, device, exact=True)
        flow, vocoder = flow_spec(section(wave, "dit_config", _FLOW)), bigvgan_spec(section(wave, "bigvgan_config", _VOCODER))
        if flow.mels != vocoder.mels:
            raise ConfigError(f"mel_dim in config.json is {flow.mels} in dit_config and {vocoder.mels} in bigvgan_config")
        self.flow, self.vocoder = FlowDecoder(flow, device), BigVgan(vocoder, device)
        self.rate, self.max_codes = RATE, flow.max_frames // flow.repeats
        names = ("start", "end", "pad", "mask")
        self._start, end, self._pad, self._mask = (int(talker[f"tts_codec_{name}_token_id"]) for name in names)
        self._text_end, self._text_pad = int(talker["tts_text_end_token_id"]), int(talker["tts_text_pad_token_id"])
        self.end_ids: Sequence[int] = (self._pad, end)
        without_sound = set(range(flow.codes + 1, spec.vocab_size)) - set(self.end_ids)
        self.forbidden: Collection[int] = sorted(without_sound | {self._start})
        self._embed: Callable[[Sequence[int]], Tensor]
        self._voices: dict[str, tuple[int, Tensor, Tensor]] = {}

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(self._voices)

    def is_unused(self, name: str) -> bool:
        return not name.startswith(("talker.", "token2wav.")) or name.endswith(_BUFFERS)

    def load(self, folder: Path, weights: Iterable[tuple[str, Tensor]], embed: Callable[[Sequence[int]], Tensor]) -> None:
        fill(self, weights, _PREFIXES)
        self._embed = embed
        try:
            for name, voice in read_saved(folder / VOICES).items():
                speaker, reference = (voice[key].to(self.device, torch.float32) for key in ("cond", "ref_mel"))
                shapes = (1, self.flow.spec.speaker_width), (1, -1, self.flow.spec.mels)
                self._voices[str(name)] = int(voice["bos_token"]), speaker.view(shapes[0]), reference.view(shapes[1])
        except (TypeError, KeyError, AttributeError, ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{folder / VOICES} does not hold voices as published ({error!r})") from None

    def prompt(self, answer: SpokenAnswer, voice: str) -> TalkerPrompt:
        prompt, spoken = list(answer.prompt_ids), list(answer.answer_ids)
        count = len(prompt)
        embedded = self._embedded([*prompt, *spoken[:-1], self._voices[voice][0], self._text_end, self._text_pad])
        states, others = embedded[:-3], embedded[-3:]
        states[:count].masked_fill_(answer.is_embed.to(self.device)[:, None], 0)
        states += answer.hidden.to(self.device, self.dtype)
        codes = self.embed_tokens(torch.tensor([self._pad, self._start], device=self.device))
        last = torch.cat((others[:1], states[count : count + 1])) + codes
        rows = self.inputs(torch.cat((states[:count], last)))
        ids, following = [*[self._mask] * count, self._pad, self._start], torch.cat((states[count + 1 :], others[1:]))
        return TalkerPrompt(ids, rows, following, [(feature.range, feature.geometry) for feature in answer.features])

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        return self._embed(ids).to(self.device, self.dtype)

    def next_row(self, frame: Sequence[int], following: Tensor) -> Tensor:
        return self.inputs(self.embed_tokens(torch.tensor(frame, device=self.device)) + following)

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.decoder(batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).float()

    def samples(self, frames: Iterable[Sequence[int]], voice: str, seed: int, division: Division = "exact") -> Iterator[Tensor]:
        _, speaker, reference = self._voices[voice]
        spec, codes = self.flow.spec, with_last(code for (code,) in frames)
        start = noise((spec.max_frames, spec.mels), seed)
        if division == "windows":
            return self.vocoder.parts(self._windows(codes, speaker, reference, start))
        count = None if division == "whole" else PART * spec.block // spec.repeats
        return self.vocoder.parts(self.flow.parts(_joined(codes, count), speaker, reference, start))

    def _windows(
        self, codes: Iterable[tuple[int, bool]], speaker: Tensor, reference: Tensor, start: Tensor
    ) -> Iterator[tuple[Tensor, bool]]:
        """Yield spectrograms of WINDOW blocks each, which are computed with the blocks around these only.

        Source: process_chunk in Qwen's and vLLM-Omni's servers. The last window is up to a block longer.
        """
        spec, guide = self.flow.spec, self.flow.guide(speaker, reference)
        before, after, size = (spec.block // spec.repeats * n for n in (len(spec.before), len(spec.after), WINDOW))
        gathered, heard = list[int](), 0
        for code, last in codes:
            gathered.append(code)
            if not last and len(gathered) < heard + size + after:
                continue
            first, end = max(0, heard - before), len(gathered) if last else heard + size
            noisy = start[first * spec.repeats :]
            for mel, _ in self.flow.guided_parts([(gathered[first:], True)], guide, noisy):
                yield mel[(heard - first) * spec.repeats : (end - first) * spec.repeats], last
            heard = end

    def kept_bytes(self, longest: int) -> int:
        rows = 4 * self.width + (self.width + self.spec.hidden_size) * self.dtype.itemsize  # of the thinker, and inputs
        return longest * rows + self.flow.spec.kept_bytes + self.vocoder.spec.kept_bytes

    def peak_bytes(self, limits: StepLimits, codes: int) -> int:
        flow = self.flow.spec
        wave = flow.kept_bytes + max(flow.peak_bytes(codes * flow.repeats), self.vocoder.spec.peak_bytes())
        states = 4 * limits.longest * self.width * self.dtype.itemsize
        step = decoder_bytes(self.spec, limits, self.dtype) + gathered_bytes(self.spec, limits, self.dtype)
        return max(wave, step + states)


def _joined(codes: Iterable[tuple[int, bool]], count: int | None) -> Iterator[tuple[list[int], bool]]:
    """Yield so many codes at a time, or all, and whether they are the last ones."""
    gathered = list[int]()
    for code, last in codes:
        gathered.append(code)
        if last or len(gathered) == count:
            yield gathered, last
            gathered = []


class Qwen25Omni(NativeModel):
    """A model of images, videos and audio."""

    prefixes = with_thinker_prefix((("model.audio_tower.", "audio_tower."), *PREFIXES))
    talker = Qwen25Talker
    ignored = (*TALKER_PREFIXES, "audio_tower.audio_bos_eos_token.")  # the published model does not use the latter either

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = thinker_config(config, vision_config={}, text_config=TEXT, audio_config=AUDIO)
        decoder, audio = decoder_spec(config, STACK), config["audio_config"]
        tower, merger = qwen25_tower(require(config, "vision_config"), _NAMES)
        check_output_dim(positive_int(audio, "output_dim"), decoder.hidden_size)
        encoder = replace(mel_encoder_spec(audio), positions=positive_int(audio, "n_window"))
        super().__init__(decoder, tower, (merger,), dtype, device, ChunkedEncoder(encoder, decoder.hidden_size, dtype, device))
