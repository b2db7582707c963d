"""Runs a talker: answers of the thinker become codes of speech, and these become samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ...callers.errors import InputError
from ...kernels.dispatch import use_backends
from ...kernels.metadata import AttentionMetadata
from ...mm.positions import mrope_positions
from ...models.interface import CacheSpec, ForwardBatch
from ...models.talker import Division as Division  # `pipelines` imports it from here
from ...models.talker import SpokenAnswer as SpokenAnswer  # and this
from ...models.talker import Talker
from ..sampling_params import SamplingParams
from ..seeds import splitmix64
from ..threads import computing_on
from .cache_tensors import allocate_caches
from .sampler import sample
from .sampling_state import SamplingState, TokenRules

MAX_CODES = 4096  # frames of speech, unless a request asks for more
Frame = tuple[int, ...]
"""The codes of one frame of speech."""
STEP_ROWS = 2048  # rows of the prompt that are computed at once
_AXES = 3


class TalkerRunner:
    """Generates speech. Thread-safe: one part is computed at a time, the others wait.

    The KV cache is as long as one answer needs, and lives while it is spoken. It is paged like the engine's, with one sequence.

    Args:
        max_streams: maximum number of answers that are spoken at a time, for which memory is planned.
    """

    def __init__(self, model: Talker, device: torch.device, block_size: int, kernels: str = "", max_streams: int = 1) -> None:
        self.model, self.device, self._block_size, self._kernels = model, device, block_size, kernels
        self._lock = threading.RLock()
        self._max_streams, self._num_streams = max_streams, 0
        self._streams_lock = threading.RLock()  # a stream may be garbage collected, and so ended, anywhere

    def speak(self, answer: SpokenAnswer, voice: str, params: SamplingParams, seed: int) -> tuple[list[Frame], Tensor]:
        """Return the frames and the samples of an answer. No part of another answer is computed meanwhile.

        Raises:
            InputError: as `stream`.
        """
        with self._lock:
            parts = list(self.stream(answer, voice, params, seed, "whole"))
        return [frame for frames, _ in parts for frame in frames], torch.cat([torch.zeros(0), *(wave for _, wave in parts)])

    def stream(
        self, answer: SpokenAnswer, voice: str, params: SamplingParams, seed: int, division: Division
    ) -> Iterator[tuple[list[Frame], Tensor]]:
        """Yield new frames and samples, float32 `[n]` on the CPU, of an answer of at least two tokens, as they are made.

        Other answers may be spoken between two parts. An answer holds its KV cache from its first part to its end.

        Args:
            seed: of the codes and of the noise.
            division: of the samples, see `models.talker.Division`.

        Raises:
            InputError: too many answers are being spoken, the prompt leaves no room for speech or cannot be spoken after, or
                logits are not finite.
        """
        with self._counted():
            yield from self._parts(answer, voice, params, seed, division)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count an answer as being spoken while the context lasts. Raise InputError if too many are."""
        with self._streams_lock:
            if self._num_streams >= self._max_streams:
                reason = f"<<param=>>{self._max_streams} answers are being spoken already"
                how = "end one of the streams, or load the model with a higher <<param>>"
                raise InputError(f"{reason}; {how}", code="overloaded", param="max_speech_streams")
            self._num_streams += 1
        try:
            yield
        finally:
            with self._streams_lock:
                self._num_streams -= 1

    def _parts(
        self, answer: SpokenAnswer, voice: str, params: SamplingParams, seed: int, division: Division
    ) -> Iterator[tuple[list[Frame], Tensor]]:
        frames = list[Frame]()

        def kept() -> Iterator[Frame]:
            for frame in self._frames(answer, voice, params, seed):
                frames.append(frame)
                yield frame

        parts = self.model.samples(kept(), voice, seed, division)
        while True:
            with self._lock, torch.inference_mode(), use_backends(self._kernels), computing_on(self.device):
                part = next(parts, None)
                part = None if part is None else part.cpu()
            if part is None:
                return
            yield frames.copy(), part.clone() if part.is_inference() else part  # which callers can use in autograd
            frames.clear()

    def _frames(self, answer: SpokenAnswer, voice: str, params: SamplingParams, seed: int) -> Iterator[Frame]:
        """Yield the frames up to the first code that ends the speech."""
        model = self.model
        prompt = model.prompt(answer, voice)
        count = len(prompt.rows)
        room = min(model.max_positions - count, model.max_codes)
        if room < 1:
            reason = f"the talker has {model.max_positions} positions, and the prompt takes {count}; shorten it"
            raise InputError(reason, param="messages")
        most = min(room, params.max_tokens or MAX_CODES)
        positions, delta = mrope_positions(count, prompt.items, _AXES)
        after = torch.arange(count + delta, count + delta + most).expand(_AXES, -1)
        positions = torch.cat((positions, after), 1).to(self.device)
        sequence = _Sequence(model.forward, model.cache_specs, positions, self._block_size, self.device)
        complete = self._completion(params, seed)
        tokens = list(prompt.token_ids)
        banned = [(code,) for code in model.forbidden]
        state = SamplingState(params, tokens, len(tokens), seed, TokenRules(model.end_ids, banned))
        for rows in prompt.rows.split(STEP_ROWS):
            hidden = sequence.step(rows)
        for step in range(most):
            code = self._sample(model.compute_logits(hidden[-1:]), state)
            if code in model.end_ids:
                return
            frame = complete(hidden[-1:], code)
            yield frame
            tokens.append(code)
            if step + 1 < most:
                following = prompt.following[min(step, len(prompt.following) - 1)][None]
                hidden = sequence.step(model.next_row(frame, following))

    def _completion(self, params: SamplingParams, seed: int) -> Callable[[Tensor, int], Frame]:
        """Return a function from the talker's hidden state `[1, hidden]` and its code to a frame."""
        predictor = self.model.predictor
        if predictor is None:
            return lambda hidden, code: (code,)
        sampling = (
            SamplingParams(temperature=0.0) if params.temperature == 0 else SamplingParams.from_optional(**predictor.sampling)
        )
        tokens = list[int]()
        state = SamplingState(sampling, tokens, 0, splitmix64(seed))
        positions = torch.arange(predictor.count + 1, device=self.device)[None]
        sequence = _Sequence(predictor.forward, predictor.cache_specs, positions, self._block_size, self.device)

        def complete(hidden: Tensor, code: int) -> Frame:
            frame, row = [code], predictor.first_rows(hidden, code)
            sequence.restart()
            for index in range(predictor.count):
                residual_code = self._sample(predictor.compute_logits(sequence.step(row)[-1:], index), state)
                frame.append(residual_code)
                tokens.append(residual_code)
                if index + 1 < predictor.count:
                    row = predictor.next_row(index, residual_code)
            return tuple(frame)

        return complete

    def _sample(self, logits: Tensor, state: SamplingState) -> int:
        (sampled,) = sample(logits, [state], self._to_device)
        if isinstance(sampled, Exception):
            raise sampled
        return sampled.token

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


class _Sequence:
    """A sequence with a KV cache of its own. `positions`: of all its tokens, `[axes, tokens]`."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        specs: Sequence[CacheSpec],
        positions: Tensor,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._forward, self._positions, self._block_size, self._done = forward, positions, block_size, 0
        blocks = -(-positions.shape[1] // block_size)
        self._caches = allocate_caches(specs, (blocks,), block_size, device)
        self._table = torch.arange(blocks, dtype=torch.int32, device=device)[None]

    def restart(self) -> None:
        """Begin anew; earlier keys and values are overwritten."""
        self._done = 0

    def step(self, rows: Tensor) -> Tensor:
        """Return the hidden states of the next rows. `rows` are overwritten."""
        start, self._done = self._done, self._done + len(rows)
        slots = torch.arange(start, self._done, device=rows.device)
        meta = AttentionMetadata((0, len(rows)), (self._done,), self._table, slots, self._block_size)
        positions = self._positions[:, start : self._done].contiguous()
        return self._forward(ForwardBatch(slots, positions, [meta] * len(self._caches), self._caches, embed_rows=rows))
