"""Transducers: a prediction network over the tokens so far and a joint network name the next token or a blank in each row.

Sources: arXiv 1211.3711 (RNN-T), arXiv 2304.06795 (TDT, which also predicts how many rows a token or a blank lasts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ...callers.errors import ConfigError, short_repr
from ...checkpoints.config import check_activation, positive_int
from ...kernels.activation import activation
from ..interface import LogitsRule
from ..layers.basic import EmbeddingTable
from ..layers.builder import Builder
from ..layers.linear import LmHead
from ..memory_formulas import FLOAT32, SMALL

STEP_ROWS = 64  # rows of an item that a step of the engine decodes; each may have several tokens, which follow one another
AHEAD = 16  # rows of an item whose logits are computed at once; those of rows behind its next token are discarded
JOINED = 64  # rows of all items whose logits are computed at a time, and items that are decoded at a time
_MAX_ROWS = 1000  # that a token may last
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
        durations: numbers of rows that a token may last; empty: none is predicted (RNN-T).
    """

    vocab: int
    width: int
    layers: int
    act: str
    blank: int
    symbols: int
    durations: tuple[int, ...]


def transducer_spec(config: Mapping[str, Any], has_durations: bool) -> TransducerSpec:
    """Read the whole config.json. Raise ConfigError for a value that is missing or not supported."""
    config = {**_DEFAULTS, **config}
    durations = config.get("durations", list(range(5))) if has_durations else []
    rows = tuple(durations) if isinstance(durations, list) else ()
    if has_durations and not (rows and any(rows) and all(type(count) is int and 0 <= count <= _MAX_ROWS for count in rows)):
        reason = f"it must list numbers of rows from 0 to {_MAX_ROWS}, one of them above 0"
        raise ConfigError(f"durations in config.json is {short_repr(durations)}; {reason}")
    vocab, blank = positive_int(config, "vocab_size"), positive_int(config, "blank_token_id")
    if blank >= vocab:
        raise ConfigError(f"blank_token_id {blank} in config.json must be less than vocab_size, which is {vocab}")
    return TransducerSpec(
        vocab=vocab,
        width=positive_int(config, "decoder_hidden_size"),
        layers=positive_int(config, "num_decoder_layers"),
        act=check_activation("hidden_act", config["hidden_act"]),
        blank=blank,
        symbols=positive_int(config, "max_symbols_per_step"),
        durations=rows,
    )


def transducer_bytes(spec: TransducerSpec, rows: int, seqs: int, dtype: torch.dtype) -> int:
    """Return the bytes that decoding takes: of `rows` rows in all, which belong to `seqs` items, with the items' states."""
    logits = JOINED * (spec.vocab + len(spec.durations)) * (dtype.itemsize + 2 * FLOAT32)
    states = 2 * seqs * (2 * spec.layers + 1) + (24 + 4 * spec.layers) * JOINED
    return SMALL + logits + (rows + states) * spec.width * dtype.itemsize


def transducer_prefixes(layers: int) -> tuple[tuple[str, str], ...]:
    """Return the prefixes of stored names for a Transducer that is named `transducer`."""
    stored = [(i, kind, part) for i in reversed(range(layers)) for kind in ("ih", "hh") for part in ("weight", "bias")]
    gates = [(f"decoder.lstm.{part}_{kind}_l{i}", f"transducer.{kind}_l{i}.{part}") for i, kind, part in stored]
    return (*gates, ("decoder.", "transducer."), ("joint.head.", "transducer.head.lm_head."))


@dataclass(frozen=True, eq=False)
class TransducerState:
    """The decoding of an item's rows so far.

    Args:
        vectors: `[2 * layers + 1, width]`, hidden and cell state of each layer of the LSTM, and the prediction that follows.
        tokens: (token, row, duration in rows, log probability) of each token found.
        given: number of rows so far. row: the next one to be decoded; a token may last longer than the rows so far.
        symbols: tokens of this row so far.
        digest: of the content of the rows so far, if the state is kept for other requests with the same rows.
    """

    vectors: Tensor
    tokens: tuple[tuple[int, int, int, float], ...] = ()
    given: int = 0
    row: int = 0
    symbols: int = 0
    digest: bytes = b""


class _ItemDecoder:
    """A decoding that goes on. `row`: the next one among `rows [n, width]`, the rows that are given now."""

    def __init__(self, spec: TransducerSpec, rows: Tensor, before: TransducerState, rule: LogitsRule | None) -> None:
        self.spec, self.rows, self.before, self.rule = spec, rows, before, rule
        self.row, self.symbols, self.found = before.row - before.given, before.symbols, list(before.tokens)

    def read(self, tokens: Sequence[int], steps: Sequence[int], logprobs: Sequence[float]) -> int | None:
        """Read the likeliest token of each of the next rows, up to the first one that is not blank, and return that one.

        The prediction network has seen the same tokens for all of these rows. Returns None if every row is blank.
        """
        spec, at = self.spec, 0
        while at < len(tokens) and tokens[at] == spec.blank:
            at += max(steps[at], 1)
        self.row, self.symbols = self.row + at, 0 if at else self.symbols
        if at >= len(tokens):
            return None
        row = self.before.given + self.row
        self.found.append((tokens[at], row, steps[at] if spec.durations else 1, logprobs[at]))
        self.symbols += 1
        if steps[at] or self.symbols == spec.symbols:
            self.row, self.symbols = self.row + max(steps[at], 1), 0
        return tokens[at]

    def choose(self, logits: Tensor) -> Tensor:
        """Return the likeliest tokens `[n, 1]` of the next rows, whose logits are `[n, vocab]`, under the request's rule."""
        if self.rule is not None:
            logits = logits.clone()
            self.rule([token for token, *_ in self.found], logits)
        return logits.argmax(1, keepdim=True)

    def after(self, vectors: Tensor) -> TransducerState:
        frames = self.before.given
        return TransducerState(vectors, tuple(self.found), frames + len(self.rows), frames + self.row, self.symbols)


class Transducer(nn.Module):
    """Greedy decoding of the rows of items. The result of an item depends on its own rows alone."""

    def __init__(self, spec: TransducerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, width = spec, dtype, spec.width
        self.steps = spec.durations or (0,)
        build = Builder(self, dtype, device)
        self.embedding = EmbeddingTable(spec.vocab, width, dtype, device)
        self.gates = [
            [build.linear([f"{kind}_l{i}"], width, [4 * width], True) for kind in ("ih", "hh")] for i in range(spec.layers)
        ]
        self.decoder_projector = build.linear(["decoder_projector"], width, [width], True)
        self.head = LmHead(width, spec.vocab + len(spec.durations), None, dtype, device, bias=True)

    def decode(
        self, rows: Sequence[Tensor], before: Sequence[TransducerState | None], rules: Sequence[LogitsRule | None]
    ) -> list[TransducerState]:
        """Decode the next rows of each item; the items are decoded together.

        Args:
            rows: projected encoder rows `[n, width]` of each item. before: of its earlier rows, None if there are none.
            rules: see `SupportsRowDecoding.decode_rows`.
        """
        states = list[TransducerState]()
        for first in range(0, len(rows), JOINED):
            part = slice(first, first + JOINED)
            given = [state or self._begin() for state in before[part]]
            states += self._decode_together(rows[part], given, rules[part])
        return states

    def _begin(self) -> TransducerState:
        nothing = torch.zeros(1, 2 * self.spec.layers + 1, self.spec.width, dtype=self.dtype)
        return TransducerState(self._predict([self.spec.blank], nothing.to(self.embedding.weight.device))[0])

    def _decode_together(
        self, rows: Sequence[Tensor], before: Sequence[TransducerState], rules: Sequence[LogitsRule | None]
    ) -> list[TransducerState]:
        items = [_ItemDecoder(self.spec, *item) for item in zip(rows, before, rules, strict=True)]
        vectors = torch.stack([state.vectors for state in before])
        while active := [number for number, item in enumerate(items) if item.row < len(item.rows)]:
            ahead = min(AHEAD, JOINED // len(active))
            parts = [items[number].rows[items[number].row :][:ahead] for number in active]
            joined = self._join(parts, vectors[active, -1], [items[number] for number in active])
            read = [items[number].read(*part) for number, part in zip(active, joined, strict=True)]
            spoken = {number: token for number, token in zip(active, read, strict=True) if token is not None}
            if spoken:
                numbers = list(spoken)
                vectors[numbers] = self._predict(list(spoken.values()), vectors[numbers])
        return [item.after(item_rows.clone()) for item, item_rows in zip(items, vectors, strict=True)]

    def _predict(self, tokens: Sequence[int], vectors: Tensor) -> Tensor:
        """Return the vectors of decodings after one more token each, see `TransducerState.vectors`."""
        x, after = self.embedding(torch.tensor(tokens, device=vectors.device)), list[Tensor]()
        for layer, (inner, outer) in enumerate(self.gates):
            hidden, cell = vectors[:, 2 * layer], vectors[:, 2 * layer + 1]
            take, keep, new, show = (inner(x) + outer(hidden.contiguous())).chunk(4, -1)
            cell = keep.sigmoid() * cell + take.sigmoid() * new.tanh()
            x = show.sigmoid() * cell.tanh()
            after += [x, cell]
        return torch.stack((*after, self.decoder_projector(x)), 1)

    def _join(
        self, parts: Sequence[Tensor], predicted: Tensor, items: Sequence[_ItemDecoder]
    ) -> Iterator[tuple[Sequence[int], Sequence[int], Sequence[float]]]:
        """Yield for each item its rows' likeliest tokens, their durations (RNN-T: 0) and their log probabilities."""
        lengths = list(map(len, parts))
        behind = predicted.repeat_interleave(torch.tensor(lengths, device=predicted.device), 0)
        joint = activation(self.spec.act, torch.cat(list(parts)).add_(behind))
        logits, durations = self.head(joint).split((self.spec.vocab, len(self.spec.durations)), 1)
        tokens = torch.cat([item.choose(part) for item, part in zip(items, logits.split(lengths), strict=True)])
        choices = durations.argmax(1, keepdim=True) if self.spec.durations else torch.zeros_like(tokens)
        logprobs = logits.log_softmax(1).gather(1, tokens)
        best = torch.cat((tokens.float(), choices.float(), logprobs), 1).tolist()  # one copy from the device
        for stop, length in zip(accumulate(lengths), lengths, strict=True):
            names, chosen, scores = zip(*best[stop - length : stop], strict=True)
            yield list(map(int, names)), [self.steps[int(number)] for number in chosen], scores
