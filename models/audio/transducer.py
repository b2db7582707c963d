"""Transducers: a prediction network over the tokens so far and a joint network name the next token or a blank in each row.

Sources: arXiv 1211.3711 (RNN-T), arXiv 2304.06795 (TDT, which also predicts how many rows a token or a blank lasts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.activation import activation
from ...mm.errors import ConfigError
from ..config import check_activation, positive_int
from ..layers.basic import Embedding
from ..layers.builder import Builder
from ..layers.linear import LmHead
from ..memory_formulas import FLOAT32, SMALL

AHEAD = 16  # rows whose logits are computed at a time; those after the next token are not used
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 8193, "decoder_hidden_size": 640, "num_decoder_layers": 2, "hidden_act": "relu", "max_symbols_per_step": 10,
    "blank_token_id": 8192,
}  # fmt: skip


@dataclass(frozen=True)
class TransducerSpec:
    """The prediction and the joint network.

    Args:
        vocab: number of tokens, the blank included. width: of both networks. layers: of the LSTM.
        act: activation of the joint network.
        symbols: most tokens of a row; after these, decoding goes on with the next row.
        durations: number of durations, 0 to n - 1 rows; 0: none is predicted (RNN-T).
    """

    vocab: int
    width: int
    layers: int
    act: str
    blank: int
    symbols: int
    durations: int


def transducer_spec(config: Mapping[str, Any], has_durations: bool) -> TransducerSpec:
    """Read the whole config.json. Raise ConfigError for a value that is missing or not supported."""
    config = {**_DEFAULTS, **config}
    durations = config.get("durations", list(range(5))) if has_durations else []
    count = len(durations) if isinstance(durations, list) else 0
    if has_durations and (count < 2 or durations != list(range(count))):
        raise ConfigError(f"durations in config.json is {str(durations)[:60]}; only 0, 1, 2, ... without gaps is supported")
    vocab, blank = positive_int(config, "vocab_size"), positive_int(config, "blank_token_id")
    if blank >= vocab:
        raise ConfigError(f"blank_token_id {blank} in config.json must be less than vocab_size, which is {vocab}")
    return TransducerSpec(
        vocab=vocab,
        width=positive_int(config, "decoder_hidden_size"),
        layers=positive_int(config, "num_decoder_layers"),
        act=check_activation("hidden_act", config["hidden_act"], gated=False),
        blank=blank,
        symbols=positive_int(config, "max_symbols_per_step"),
        durations=count,
    )


def transducer_bytes(spec: TransducerSpec, rows: int, dtype: torch.dtype) -> int:
    """Return the bytes alive while the rows of one item are decoded, the copies of these included."""
    logits = AHEAD * (spec.vocab + spec.durations) * (dtype.itemsize + 2 * FLOAT32)
    return SMALL + rows * spec.width * dtype.itemsize + logits + 16 * spec.width * (AHEAD + spec.layers) * dtype.itemsize


def transducer_prefixes(layers: int) -> tuple[tuple[str, str], ...]:
    """Return the prefixes of stored names for a Transducer that is named `transducer`."""
    stored = [(i, kind, part) for i in reversed(range(layers)) for kind in ("ih", "hh") for part in ("weight", "bias")]
    gates = [(f"decoder.lstm.{part}_{kind}_l{i}", f"transducer.{kind}_l{i}.{part}") for i, kind, part in stored]
    return (*gates, ("decoder.", "transducer."), ("joint.head.", "transducer.head.lm_head."))


class Transducer(nn.Module):
    """Greedy decoding of the rows of one item. The result depends on these alone."""

    def __init__(self, spec: TransducerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, width = spec, dtype, spec.width
        build = Builder(self, dtype, device)
        self.embedding = Embedding(spec.vocab, width, dtype, device)
        self.gates = [
            [build.linear([f"{kind}_l{i}"], width, [4 * width], True) for kind in ("ih", "hh")] for i in range(spec.layers)
        ]
        self.decoder_projector = build.linear(["decoder_projector"], width, [width], True)
        self.head = LmHead(width, spec.vocab + spec.durations, None, dtype, device, bias=True)

    def decode(self, rows: Tensor) -> Tensor:
        """Return float32 `[tokens, 4]`: token, row, duration in rows (RNN-T: 1) and log probability.

        Args:
            rows: projected encoder rows `[n, width]` of an item.
        """
        spec, found = self.spec, list[tuple[int, int, int, float]]()
        rows = rows.to(self.embedding.weight.device, self.dtype)
        predicted, state = self._predict(spec.blank, [rows.new_zeros(1, spec.width) for _ in range(2 * spec.layers)])
        row = symbols = 0  # symbols: tokens of this row so far
        while row < len(rows):
            tokens, steps, logprobs = self._join(rows[row : row + AHEAD], predicted)
            at = 0
            while at < len(tokens) and tokens[at] == spec.blank:
                at += max(steps[at], 1)
            row, symbols = row + at, 0 if at else symbols
            if at >= len(tokens):
                continue
            found.append((tokens[at], row, steps[at] if spec.durations else 1, logprobs[at]))
            symbols += 1
            if steps[at] or symbols == spec.symbols:
                row, symbols = row + max(steps[at], 1), 0
            predicted, state = self._predict(tokens[at], state)
        return torch.tensor(found, dtype=torch.float32).view(len(found), 4)

    def _predict(self, token: int, state: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the prediction `[1, width]` after one more token, and the hidden and the cell state of each layer."""
        x, after = self.embedding(torch.tensor([token], device=state[0].device)), list[Tensor]()
        for (inner, outer), hidden, cell in zip(self.gates, state[::2], state[1::2], strict=True):
            take, keep, new, show = (inner(x) + outer(hidden)).chunk(4, -1)
            cell = keep.sigmoid() * cell + take.sigmoid() * new.tanh()
            x = show.sigmoid() * cell.tanh()
            after += [x, cell]
        return self.decoder_projector(x), after

    def _join(self, rows: Tensor, predicted: Tensor) -> tuple[list[int], list[int], list[float]]:
        """Return each row's likeliest token, its duration (RNN-T: 0) and the token's log probability."""
        joint = activation(self.spec.act, rows + predicted)
        logits, durations = self.head(joint).split((self.spec.vocab, self.spec.durations), 1)
        tokens = logits.argmax(1, keepdim=True)
        steps = durations.argmax(1, keepdim=True) if self.spec.durations else torch.zeros_like(tokens)
        logprobs = logits.log_softmax(1).gather(1, tokens)
        found = torch.cat((tokens.float(), steps.float(), logprobs), 1).T.tolist()  # one copy from the device
        return list(map(int, found[0])), list(map(int, found[1])), found[2]
