"""The training model: transformers' Whisper with windows of 8 s, and a CTC head on its encoder."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..reference import transformers
from .dataset import FRAMES, Batch
from .tokens import END, LETTERS, START, token, tokenizer

SIZES: dict[str, Any] = {
    "d_model": 128,
    "encoder_layers": 4,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 512,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 512,
    "num_mel_bins": 80,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 128,
}


def config() -> Any:
    """Return the WhisperConfig."""
    end, start = token(END), token(START)
    ids = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end, "decoder_start_token_id": start}
    sizes = SIZES | ids | {"vocab_size": tokenizer().get_vocab_size()}
    return transformers().WhisperConfig(**sizes, suppress_tokens=[], begin_suppress_tokens=None, init_std=0.04)


class Trainee(nn.Module):
    """Whisper, a CTC head that predicts letters from encoder rows (not exported), and a moving average of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = transformers().WhisperModel(config())
        self.net.set_attn_implementation("eager")  # whose backward pass is twice as fast on a CPU
        for conv in (self.net.encoder.conv1, self.net.encoder.conv2):
            nn.init.kaiming_normal_(conv.weight)
        self.letters = nn.Linear(SIZES["d_model"], len(LETTERS) + 1)
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def update_average(self, step: int) -> None:
        """Move `average`, the weights that are exported, towards the weights of this step."""
        share = max(0.002, 1 / (step + 1))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.net.parameters()), share)

    def encode(self, frames: Tensor) -> Tensor:
        """Return encoder rows `[b, n / 2, width]` of `[b, 80, n]`. transformers' forward takes whole windows only."""
        encoder = self.net.encoder
        x = F.gelu(encoder.conv2(F.gelu(encoder.conv1(frames)))).transpose(1, 2)
        x = x + encoder.embed_positions.weight[: x.shape[1]]
        for layer in encoder.layers:
            x = layer(x, None)
        return torch.as_tensor(encoder.layer_norm(x))

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, float]:
        """Return answer loss, CTC loss per letter, and the share of correct answer tokens."""
        rows = self.encode(batch.frames)
        hidden = self.net.decoder(input_ids=batch.ids, encoder_hidden_states=rows, use_cache=False).last_hidden_state
        mask = batch.labels >= 0
        chosen, wanted = F.linear(hidden[mask], self.net.decoder.embed_tokens.weight).float(), batch.labels[mask]
        answer = F.cross_entropy(chosen, wanted)
        scores = self.letters(rows).float().log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(rows),), rows.shape[1])
        ctc = F.ctc_loss(scores, batch.letters, lengths, batch.counts, reduction="sum", zero_infinity=True)
        right = (chosen.argmax(-1) == wanted).float().mean().item()
        return answer, ctc / batch.counts.sum().clamp(min=1), right
