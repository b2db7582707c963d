"""Qwen3-Omni (arXiv 2509.17765): a thinker, which is Qwen3-VL with experts and the AuT encoder, a talker, and code-to-wave.

The talker is a decoder with experts. It reads the user's turns: projected token embeddings of the text, and projected hidden
states of one of the thinker's layers where items are. The answer's token embeddings follow one by one, each added to the
embeddings of the frame before it. A frame is a code that the talker chooses, and those that a small decoder predicts from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....callers.errors import ConfigError, InputError
from ....checkpoints.config import positive_int, require
from ....mm.positions import PlacedItem
from ...audio.aut import AutEncoder, aut_spec
from ...audio.code2wav import Code2Wav, code2wav_spec
from ...audio.mel_encoder import LARGE
from ...interface import CacheSpec, ForwardBatch, StepLimits
from ...layers.basic import EmbeddingTable
from ...layers.connectors import Projector, ProjectorSpec
from ...layers.linear import Linear
from ...native_model import NativeModel
from ...talker import Division, InputDecoder, SpokenAnswer, TalkerPrompt, section
from ...text.attention import gathered_bytes
from ...text.decoder import decoder_bytes
from ...text.decoder_config import decoder_spec
from ...text.spec import interleaved_sections
from ...text.stack import Stack
from ...thinker import TALKER_PREFIXES, check_output_dim, thinker_config, with_thinker_prefix
from ...weights import fill
from ..qwen3_vl.model import PREFIXES, STACK, level_mergers, qwen3_specs

# defaults that the published config.json leaves out
AUDIO = {**LARGE, "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480, "output_dim": 3584}
TEXT = {
    "vocab_size": 3584, "hidden_size": 2048, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "head_dim": None, "max_position_embeddings": 32768, "rope_theta": 1e6, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
_MERGER = ProjectorSpec(0, 0, ("mlp.0", "mlp.2"), norm="ln_q")  # names of its norm and layers
_TOKENS = {
    "im_start": 151644, "user": 872, "assistant": 77091, "tts_bos": 151672, "tts_eos": 151673, "tts_pad": 151671,
}  # fmt: skip
_TALKER: dict[str, Any] = {
    "thinker_hidden_size": 2048, "accept_hidden_layer": 18, "num_code_groups": 32, "codec_eos_token_id": 4198,
    "codec_nothink_id": 4203, "codec_think_bos_id": 4204, "codec_think_eos_id": 4205, "codec_pad_id": 4196,
    "codec_bos_id": 4197, "position_id_per_seconds": 25,
}  # fmt: skip
_TALKER_STACK = Stack(
    {
        "vocab_size": 3072, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
        "num_key_value_heads": 2, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 384,
        "norm_topk_prob": False, "mrope_section": (24, 20, 20),
    },
    qk_norm="head",
    axes=interleaved_sections,
    router={"shared_gate": True},
)  # fmt: skip
_PREDICTOR_STACK = Stack(
    {
        "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "num_code_groups": 32,
    },
    qk_norm="head",
)  # fmt: skip
_WAVE: dict[str, Any] = {
    "codebook_size": 2048, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "sliding_window": 72,
    "intermediate_size": 3072, "num_hidden_layers": 8, "num_quantizers": 16, "upsample_rates": (8, 5, 4, 3),
    "upsampling_ratios": (2, 2), "decoder_dim": 1536, "rms_norm_eps": 1e-5,
}  # fmt: skip
_NAMES = (
    ("talker.model.codec_embedding.", "embed_tokens."),
    ("talker.model.", "decoder."),
    ("talker.code_predictor.model.codec_embedding.", "predictor.tables."),
    ("talker.code_predictor.model.", "predictor.decoder."),
    ("talker.code_predictor.lm_head.", "predictor.heads."),
    ("talker.", ""),
    ("code2wav.", "wave."),
)
_BUFFERS = ("inv_freq", "code_offset")  # ends of the names of tensors that are computed here
_RATE = 24_000
_UNSPOKEN = 1024  # last entries of the talker's vocabulary, which have no sound


class _CodePredictor(nn.Module):
    """Implements `models.talker.CodePredictor`. Each code has a table and a head of its own."""

    __call__: Callable[..., Tensor]
    sampling: Mapping[str, float] = {"temperature": 1.0, "top_k": 50, "top_p": 0.8}

    def __init__(self, config: Mapping[str, Any], first: EmbeddingTable, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        text = section(config, "code_predictor_config", _PREDICTOR_STACK.defaults)
        spec, self.count = decoder_spec({"text_config": text}, _PREDICTOR_STACK), positive_int(text, "num_code_groups") - 1
        self.spec, self.first, self.device = spec, (first,), device
        self.decoder = InputDecoder(spec, dtype, device)
        self.cache_specs: Sequence[CacheSpec] = self.decoder.cache_specs
        width, size, codes = spec.hidden_size, spec.vocab_size, range(self.count)
        self.tables = nn.ModuleList(EmbeddingTable(size, width, dtype, device) for _ in codes)
        self.heads = nn.ModuleList(Linear(width, {str(i): size}, False, dtype, device, exact=True) for i in codes)

    def first_rows(self, hidden: Tensor, code: int) -> Tensor:
        return torch.cat((hidden, self.first[0](torch.tensor([code], device=self.device))))

    def next_row(self, index: int, code: int) -> Tensor:
        row: Tensor = self.tables[index](torch.tensor([code], device=self.device))
        return row

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.decoder(batch)

    def compute_logits(self, hidden: Tensor, index: int) -> Tensor:
        logits: Tensor = self.heads[index](hidden)
        return logits.float()


class Qwen3Talker(nn.Module):
    """Implements `models.talker.Talker`. The code-to-wave model computes in float32."""

    __call__: Callable[..., Tensor]
    sampling: Mapping[str, float] = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05}

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        talker = section(config, "talker_config", _TALKER)
        text = section(talker, "text_config", _TALKER_STACK.defaults)
        spec, wave = decoder_spec({"text_config": text}, _TALKER_STACK), section(config, "code2wav_config", _WAVE)
        self.spec, self.dtype, self.device, self.rate = spec, dtype, device, _RATE
        self.vocab_size, self.max_positions = spec.vocab_size, spec.max_positions
        self.max_codes = self.max_positions
        self.layer: int | None = positive_int(talker, "accept_hidden_layer")
        self._thinker_width, width = positive_int(talker, "thinker_hidden_size"), spec.hidden_size
        projector = ProjectorSpec(self._thinker_width, width, ("linear_fc1", "linear_fc2"), act="silu")
        projector = replace(projector, inner=positive_int(text, "intermediate_size"))
        self.text_projection, self.hidden_projection = (Projector(projector, dtype, device) for _ in range(2))
        self.embed_tokens = EmbeddingTable(spec.vocab_size, width, dtype, device)
        self.decoder = InputDecoder(spec, dtype, device)
        self.cache_specs: Sequence[CacheSpec] = self.decoder.cache_specs
        self.head = Linear(width, {"codec_head": spec.vocab_size}, False, dtype, device, exact=True)
        self.predictor = _CodePredictor(talker, self.embed_tokens, dtype, device)
        self.wave = Code2Wav(code2wav_spec(wave), device)
        _check_sizes(config, talker, self.predictor, self.wave, width)
        tokens = {f"{name}_token_id": value for name, value in _TOKENS.items()}
        self._tokens = {name: int({**tokens, **config}[f"{name}_token_id"]) for name in _TOKENS}
        self.end_ids: Sequence[int] = (int(talker["codec_eos_token_id"]),)
        spoken = min(spec.vocab_size - _UNSPOKEN, self.wave.spec.codes)
        self.forbidden: Collection[int] = sorted(set(range(spoken, spec.vocab_size)) - set(self.end_ids))
        names = ("nothink", "think_bos", "think_eos", "pad", "bos")
        self._codes = [int(talker[f"codec_{name}_id"]) for name in names]
        self._voices = {str(name): int(code) for name, code in (talker.get("speaker_id") or {}).items()}
        self._embed: Callable[[Sequence[int]], Tensor]

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(self._voices)

    def is_unused(self, name: str) -> bool:
        return not name.startswith(("talker.", "code2wav.")) or name.endswith(_BUFFERS)

    def load(self, folder: Path, weights: Iterable[tuple[str, Tensor]], embed: Callable[[Sequence[int]], Tensor]) -> None:
        fill(self, weights, _NAMES)
        self._embed = embed

    def prompt(self, answer: SpokenAnswer, voice: str) -> TalkerPrompt:
        ids, tokens = torch.tensor(answer.prompt_ids), self._tokens
        starts = (ids == tokens["im_start"]).nonzero().flatten().tolist()
        begin = next((i for i in starts[::-1] if ids[i + 1 : i + 2].tolist() == [tokens["assistant"]]), len(ids))
        spoken = [*answer.prompt_ids[begin:], *answer.answer_ids[:-1]]
        if len(spoken) < 4 or begin == len(ids):
            reason = "the prompt does not end with an assistant's turn as in the checkpoint's chat template"
            raise InputError(f"{reason}; use that template, so that the answer can be spoken", param="messages")
        user = torch.zeros(len(ids), dtype=torch.bool)
        for first, stop in zip([0, *starts], [*starts, len(ids)], strict=True):
            user[first:stop] = ids[first + 1 : first + 2].tolist() == [tokens["user"]]
        marks = [tokens["tts_bos"], tokens["tts_eos"], tokens["tts_pad"]]
        embedded = self._embed([*ids[user].tolist(), *spoken, *marks]).to(self.device, self.dtype)
        rows = self.text_projection(embedded)
        count, is_embed = int(user.sum()), answer.is_embed
        if (is_embed & user).any():
            hidden = answer.hidden[is_embed & user].to(self.device, self.dtype)
            rows[:count][is_embed[user].to(self.device)] = self.hidden_projection(hidden)
        answer_rows, (bos, eos, pad) = rows[count:-3], rows[-3:].split(1)
        codes = torch.tensor([*self._codes[:3], self._voices[voice], *self._codes[3:]], device=self.device)
        begun = torch.cat((pad.expand(4, -1), bos, answer_rows[3:4])) + self.embed_tokens(codes)
        return TalkerPrompt(
            [], torch.cat((rows[:count], answer_rows[:3], begun)), torch.cat((answer_rows[4:], eos, pad)), _moved(answer, user)
        )

    def next_row(self, frame: Sequence[int], following: Tensor) -> Tensor:
        code, *others = frame
        row = self.embed_tokens(torch.tensor([code], device=self.device))
        rows = [row, *(self.predictor.next_row(index, other) for index, other in enumerate(others))]
        return torch.cat(rows).sum(0, keepdim=True) + following

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.decoder(batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).float()

    def samples(self, frames: Iterable[Sequence[int]], voice: str, seed: int, division: Division = "exact") -> Iterator[Tensor]:
        return self.wave.parts(frames)

    def kept_bytes(self, longest: int) -> int:
        rows = 4 * self._thinker_width + 2 * self.spec.hidden_size * self.dtype.itemsize  # of the thinker, and inputs
        return longest * rows + self.wave.spec.kept_bytes

    def peak_bytes(self, limits: StepLimits, codes: int) -> int:
        states = 4 * limits.longest * (self._thinker_width + self.spec.hidden_size) * self.dtype.itemsize
        step = decoder_bytes(self.spec, limits, self.dtype) + gathered_bytes(self.spec, limits, self.dtype)
        return max(self.wave.spec.peak_bytes(), step + states)


def _check_sizes(
    config: Mapping[str, Any], talker: Mapping[str, Any], predictor: _CodePredictor, wave: Code2Wav, width: int
) -> None:
    """Raise ConfigError unless thinker, talker, predictor and code-to-wave model fit together."""
    thinker = thinker_config(config, text_config=TEXT)
    pairs = {
        "talker_config.thinker_hidden_size": (talker["thinker_hidden_size"], thinker["text_config"]["hidden_size"]),
        "talker_config.position_id_per_seconds": (
            talker["position_id_per_seconds"], thinker.get("position_id_per_seconds") or 25,
        ),
        "code_predictor_config.hidden_size": (predictor.spec.hidden_size, width),
        "code_predictor_config.vocab_size": (predictor.spec.vocab_size, wave.spec.codes),
        "code_predictor_config.num_code_groups": (predictor.count + 1, wave.spec.codebooks),
        "talker_config.num_code_groups": (talker["num_code_groups"], wave.spec.codebooks),
    }  # fmt: skip
    for name, (stated, needed) in pairs.items():
        if stated != needed:
            raise ConfigError(f"{name} in config.json is {stated}; the other parts of the model need {needed}")
    if talker["accept_hidden_layer"] >= require(thinker["text_config"], "num_hidden_layers"):
        raise ConfigError("talker_config.accept_hidden_layer in config.json must be below the thinker's num_hidden_layers")


def _moved(answer: SpokenAnswer, user: Tensor) -> list[PlacedItem]:
    """Return the items in the user's turns, placed where they are when only these turns are kept.

    A video with an audio track is left out unless an image follows it. The published talker is not told of the track, and then
    numbers the rows of both as text.
    """
    positions, counts = (user.cumsum(0) - 1).tolist(), Counter(feature.range.offset for feature in answer.features)
    features = [feature for feature in answer.features if user[feature.range.offset]]
    last = max((item.range.offset for item in features if item.modality == "image"), default=0)
    items = [(item.range, item.geometry) for item in features if counts[item.range.offset] == 1 or item.range.offset < last]
    return [(replace(item, offset=positions[item.offset]), geometry) for item, geometry in items]


class Qwen3Omni(NativeModel):
    """A model of images, videos and audio."""

    prefixes = with_thinker_prefix(
        (
            ("model.audio_tower.", "audio_tower."),
            ("model.visual.merger_list.", "deepstack_mergers."),
            ("visual.merger_list.", "deepstack_mergers."),
            *PREFIXES,
            ("model.", "language_model."),
        )
    )
    talker = Qwen3Talker
    ignored = TALKER_PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = thinker_config(config, vision_config={}, text_config=TEXT, audio_config=AUDIO)
        decoder, tower, mergers = qwen3_specs(config, replace(STACK, router={"normalise": True}), _MERGER)
        audio = replace(aut_spec(config["audio_config"]), pad_short=False)
        check_output_dim(audio.out, decoder.hidden_size)
        encoder = AutEncoder(audio, dtype, device)
        super().__init__(decoder, tower, mergers, dtype, device, encoder)
        self.level_mergers = level_mergers(config)
