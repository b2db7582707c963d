"""Measures which cross-attention heads of an encoder-decoder model follow the audio, for checkpoints that do not name them.

Clips of speech are joined with silence between them, and all heads are read while the decoder reads the texts of the clips. A
head that gives the times of words attends to the clip whose first token comes next, not to the one before. The path of dynamic
time warping through the mean of such heads says when each token was spoken. A head's score is the share of its attention that
is near the path, beyond that of uniform attention. Heads whose score is much below the best one are left out, until the choice
no longer changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...callers.errors import ConfigError, ErrorInfo, InputError
from ...engine.pooling_params import PoolingParams
from .alignment import token_starts
from .decode import answer_tokens

if TYPE_CHECKING:
    from ..llm import LLM

_MARGIN = 0.2  # seconds beside the path
_SILENCE = 0.5  # seconds between two clips
_MIN_FIRST, _MIN_SCORE = 0.8, 0.5  # shares of the best head's attention to the next clip, and of the best score
_MAX_ROUNDS = 10


@dataclass(frozen=True)
class _Joined:
    """Joined clips: weights `[heads, tokens, encoder rows]`, and for each clip after the first its first token and row."""

    weights: Tensor
    num_prefix: int
    starts: tuple[tuple[int, int], ...]


def find_alignment_heads(llm: LLM, audio: Sequence[Any], language: str | None = None) -> list[tuple[int, int]]:
    """Return the (layer, head) pairs that follow the audio, the best first, for `alignment_heads` in generation_config.json.

    Args:
        audio: clips of speech, float32 `[n]` at the model's rate, several of which fit into a window. A minute in all is
            enough.
        language: as in `transcribe`; None: detected.

    Raises:
        ConfigError: the model has no cross-attention.
        InputError: fewer than two clips with a text fit into a window.
        InputError, EngineDeadError, ...: the first error of the requests, if all failed.
    """
    rule = None if llm.engine.speech is None else llm.engine.speech.alignment()
    if rule is None:
        raise ConfigError(f"{llm.config.model} has no cross-attention heads; use an encoder-decoder model")
    layers, count = rule.sizes
    heads = tuple(product(range(layers), range(count)))
    joined = _read_heads(llm, audio, language, heads, rule.step)
    firsts = torch.stack([share for clip in joined for share in _next_clip_shares(clip)]).mean(0)
    allowed = [i for i in range(len(heads)) if firsts[i] >= _MIN_FIRST * firsts.max()]
    chosen = allowed
    for _ in range(_MAX_ROUNDS):
        scores = torch.stack([_scores(clip, chosen, round(_MARGIN / rule.step)) for clip in joined]).mean(0)
        best = max(scores[i] for i in allowed)
        best_heads = sorted((i for i in allowed if scores[i] >= _MIN_SCORE * best), key=lambda i: -float(scores[i]))
        if sorted(best_heads) == sorted(chosen):
            break
        chosen = best_heads
    return [heads[i] for i in best_heads]


def _read_heads(
    llm: LLM, audio: Sequence[Any], language: str | None, heads: tuple[tuple[int, int], ...], step: float
) -> list[_Joined]:
    """Transcribe the clips, join as many as fit into a window, and return the weights of all heads."""
    assert llm.engine.speech is not None
    spec, eos = llm.engine.speech.decode_spec, llm.engine.eos_token_ids[0]
    rate, silence = spec.rate, np.zeros(round(_SILENCE * spec.rate), np.float32)
    limit = spec.max_audio_samples or 30 * rate
    clips = [np.asarray(clip, np.float32) for clip in audio]
    prompts, places, prefix = list[Any](), list[tuple[int, int, tuple[tuple[int, int], ...]]](), list[int]()
    group: list[np.ndarray] = []
    tokens, starts = list[int](), list[tuple[int, int]]()

    def end_group() -> None:
        if starts:
            samples = np.concatenate(group)
            prompts.append({
                "prompt_token_ids": [*prefix, *tokens, eos], "multi_modal_data": {"audio": [(samples, rate)]}
            })  # fmt: skip
            places.append((ceil(len(samples) / rate / step), len(prefix), tuple(starts)))
        for part in (group, tokens, starts):
            part.clear()

    transcripts = llm.transcribe(clips, language, vad=False, temperature=0.0, use_tqdm=False)
    for clip, transcript in zip(clips, transcripts, strict=True):
        if transcript.error or not transcript.text or len(transcript.windows) > 1:
            continue
        if sum(map(len, group)) + len(silence) + len(clip) > limit:
            end_group()
        if group:
            group.append(silence)
            starts.append((len(tokens), round(sum(map(len, group)) / rate / step)))
        else:
            prefix = transcript.output.prompt_token_ids  # of the whole group
        group.append(clip)
        tokens += answer_tokens(transcript.output.outputs[0])
    end_group()
    if not prompts:
        _raise_first([result.error for result in transcripts])
        raise InputError("give two or more clips of speech that fit into a window of the model together", param="audio")
    outputs = llm.encode(prompts, PoolingParams(cross_attention=heads), use_tqdm=False)
    joined = [
        _Joined(result.data[..., :rows], num_prefix, words_at)
        for result, (rows, num_prefix, words_at) in zip(outputs, places, strict=True)
        if result.data is not None
    ]
    if not joined:
        _raise_first([result.error for result in outputs])
    return joined


def _raise_first(errors: Sequence[ErrorInfo | None]) -> None:
    """Raise the first of the errors, if there is one."""
    for error in filter(None, errors):
        raise error.exception()


def _next_clip_shares(joined: _Joined) -> list[Tensor]:
    """Return, for each clip after the first, each head's share of attention on it when its first token is predicted."""
    shares = []
    for token, row in joined.starts:
        weights = joined.weights[:, joined.num_prefix - 1 + token]
        shares.append(weights[:, row:].sum(-1) / weights.sum(-1))
    return shares


def _scores(joined: _Joined, chosen: Sequence[int], margin: int) -> Tensor:
    """Return the share of each head's attention that is near the path of the chosen heads, `[heads]`."""
    weights, num_prefix = joined.weights, joined.num_prefix
    rows = weights.shape[-1]
    starts = torch.from_numpy(token_starts(weights[list(chosen)], num_prefix, rows))
    frames = torch.arange(rows)
    near = (frames >= starts[:-1, None] - margin) & (frames < starts[1:, None] + margin)
    inside = weights[:, num_prefix - 1 : num_prefix - 1 + len(near)]
    share, chance = (inside * near).sum(-1) / inside.sum(-1), near.float().mean(1)
    return ((share - chance) / (1 - chance).clamp(min=1e-6)).mean(-1)
