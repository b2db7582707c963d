"""Runs a talker: one answer of the thinker at a time becomes codes of speech, and these become samples."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.dispatch import use_backends
from ...kernels.metadata import AttentionMetadata
from ...mm.errors import InputError
from ...mm.positions import mrope_positions
from ...mm.types import MultiModalFeature
from ...models.interface import ForwardBatch
from ...models.talker import SpokenAnswer, Talker
from ..sampling_params import SamplingParams
from ..threads import computing_on
from .cache_tensors import allocate_caches
from .sampler import sample
from .sampling_state import SamplingState

MAX_CODES = 4096  # of speech, unless a request asks for more
STEP_ROWS = 2048  # rows of the prompt that are computed at once
_AXES = 3


class TalkerRunner:
    """Generates speech. Thread-safe: one answer is computed at a time, the others wait.

    The KV cache is as long as one answer needs, and lives while it is spoken. It is paged like the engine's, with one sequence.
    """

    def __init__(self, model: Talker, device: torch.device, block_size: int, kernels: str = "") -> None:
        self.model, self.device, self._block_size, self._kernels = model, device, block_size, kernels
        self._lock = threading.Lock()

    def speak(
        self,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        hidden: Tensor,
        features: Sequence[MultiModalFeature],
        voice: str,
        params: SamplingParams,
        seed: int,
    ) -> tuple[list[int], Tensor]:
        """Return the codes and the samples, float32 `[n]` on the CPU, of an answer of at least two tokens.

        Args:
            prompt_ids, answer_ids, hidden, features: as in `SpokenAnswer`.
            seed: of the codes and of the noise.

        Raises:
            InputError: the prompt leaves no room for speech, or the talker's logits are not finite.
        """
        answer = SpokenAnswer(prompt_ids, answer_ids, hidden, features)
        with self._lock, torch.inference_mode(), use_backends(self._kernels), computing_on(self.device):
            codes = list(self._codes(answer, voice, params, seed))
            parts = [part.cpu() for part in self.model.samples(codes, voice, seed)] if codes else []
        return codes, torch.cat([torch.zeros(0), *parts])

    def _codes(self, answer: SpokenAnswer, voice: str, params: SamplingParams, seed: int) -> Iterator[int]:
        """Yield the codes up to the first one that ends the speech."""
        prompt = self.model.prompt(answer, voice)
        count, placed = len(prompt.rows), [(feature.range, feature.geometry) for feature in answer.features]
        room = min(self.model.max_positions - count, self.model.max_codes)
        if room < 1:
            reason = f"the talker has {self.model.max_positions} positions, and the prompt takes {count}; shorten it"
            raise InputError(reason, param="messages")
        most = min(room, params.max_tokens or MAX_CODES)
        positions, delta = mrope_positions(count, placed, _AXES)
        after = torch.arange(count + delta, count + delta + most).expand(_AXES, -1)
        sequence = _Sequence(self.model, torch.cat((positions, after), 1).to(self.device), self._block_size, self.device)
        tokens = list(prompt.token_ids)
        banned = [(code,) for code in self.model.forbidden]
        state = SamplingState(params, tokens, len(tokens), seed, self.model.end_ids, banned)
        for rows in prompt.rows.split(STEP_ROWS):
            hidden = sequence.step(rows)
        for step in range(most):
            (found,) = sample(self.model.compute_logits(hidden[-1:]), [state], self._to_device)
            if isinstance(found, Exception):
                raise found
            if found.token in self.model.end_ids:
                return
            yield found.token
            tokens.append(found.token)
            if step + 1 < most:
                following = prompt.following[min(step, len(prompt.following) - 1)][None]
                hidden = sequence.step(self.model.next_row(found.token, following))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


class _Sequence:
    """A sequence with a KV cache of its own. `positions`: of all its tokens, `[axes, tokens]`."""

    def __init__(self, model: Talker, positions: Tensor, block_size: int, device: torch.device) -> None:
        self._model, self._positions, self._block_size, self._done = model, positions, block_size, 0
        blocks = -(-positions.shape[1] // block_size)
        self._caches = allocate_caches(model.cache_specs, (blocks,), block_size, device)
        self._table = torch.arange(blocks, dtype=torch.int32, device=device)[None]

    def step(self, rows: Tensor) -> Tensor:
        """Return the hidden states of the next rows. `rows` are overwritten."""
        start, self._done = self._done, self._done + len(rows)
        slots = torch.arange(start, self._done, device=rows.device)
        meta = AttentionMetadata((0, len(rows)), (self._done,), self._table, slots, self._block_size)
        positions = self._positions[:, start : self._done].contiguous()
        return self._model.forward(ForwardBatch(slots, positions, [meta] * len(self._caches), self._caches, embed_rows=rows))
