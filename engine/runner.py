"""Runs one step on one device: encode, build the batch, forward, sample. Knows no queue and no block pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..mm.embeddings import ROWS
from ..mm.errors import InputError, SensoriumError
from ..mm.fields import group, merge
from ..mm.types import MultiModalFeature
from ..models.interface import Model
from .batch import Row, Track, build_batch
from .kv import allocate_caches, group_layers
from .sampler import gather_logprobs, sample
from .types import EncodeTask, Logprob, ScheduledRequest, SchedulerOutput, TokenOutput

_LOGITS_ROWS = 256  # prompt rows whose logits are held at once
_log = logging.getLogger(__name__)


class ModelRunner:
    """The one path of prompt and decode rows. All it needs arrives in SchedulerOutput; it keeps tokens, rows and caches."""

    def __init__(self, model: Model, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.model, self.block_size, self.device = model, block_size, device
        self.kv_caches = allocate_caches(model.cache_specs, num_blocks, block_size, device)
        groups = enumerate(group_layers(model.cache_specs))
        self.group_of = [index for _, index in sorted((layer, index) for index, group in groups for layer in group.layers)]
        self.tracks: dict[str, Track] = {}
        self.encoded: dict[str, Tensor] = {}  # hash -> [rows, hidden]

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> list[TokenOutput]:
        """One result per scheduled sequence, in order; a failing item is the error of the sequences that need it."""
        self._update(output)
        errors: dict[str, str] = {}
        seconds = self._encode(output.encode, errors)
        rows: list[Row] = []
        for task in output.scheduled:
            error = errors.get(task.request_id) or self._missing_item(task, errors)
            if error is None:
                rows.append((self.tracks[task.request_id], task))
            else:
                errors[task.request_id] = error
        results = {result.request_id: result for result in self._forward(rows)} if rows else {}
        results.update({name: TokenOutput(name, (), error=error) for name, error in errors.items()})
        for name in {task.request_id for task in output.encode} & results.keys():
            results[name].timings["encode"] = seconds
        return [results[task.request_id] for task in output.scheduled]

    def _update(self, output: SchedulerOutput) -> None:
        for request_id in output.finished:
            self.tracks.pop(request_id, None)
        for key in output.free_encoder:
            self.encoded.pop(key, None)
        for message in output.new_requests:
            self.tracks[message.request_id] = Track(message, self.model.rope_axes)
        for change in output.updates:
            self.tracks[change.request_id].update(change)

    def _encode(self, tasks: Sequence[EncodeTask], errors: dict[str, str]) -> float:
        """Items of many requests in one call per kind; seconds taken."""
        if not tasks:
            return 0.0
        start = time.perf_counter()
        features = [self.tracks[task.request_id].features[task.index] for task in tasks]
        for ids in group([feature.kwargs for feature in features], [feature.modality for feature in features]):
            failed = self._encode_items([features[i] for i in ids])
            errors.update({tasks[i].request_id: error for i, error in zip(ids, failed, strict=True) if error})
        return time.perf_counter() - start

    def _encode_items(self, items: list[MultiModalFeature]) -> list[str | None]:
        """Store the rows of items that merge; on an exception each is tried alone, so that only the bad one fails."""
        try:
            merged = merge([item.kwargs for item in items], self.device)
            for item, rows in zip(items, self._rows(items, merged), strict=True):
                if rows.shape[0] != item.range.num_embeds:
                    raise InputError(f"the encoder made {rows.shape[0]} rows for {item.range.num_embeds} placeholder tokens")
                self.encoded[item.hash] = rows.clone() if len(items) > 1 else rows  # a view would keep all of them alive
        except Exception as error:
            if len(items) > 1:
                return [failed for item in items for failed in self._encode_items([item])]
            _log.warning("encoding failed", exc_info=not isinstance(error, InputError))
            return [f"{items[0].modality}: encoding failed: {describe(error)}"]
        return [None] * len(items)

    def _rows(self, items: list[MultiModalFeature], merged: dict[str, object]) -> list[Tensor]:
        """Encoder rows of items that merge: the caller's own, or the encoder's."""
        if ROWS in items[0].kwargs:
            return [torch.as_tensor(item.kwargs[ROWS].data).to(self.device) for item in items]
        return self.model.embed_multimodal(items[0].modality, merged)

    def _missing_item(self, task: ScheduledRequest, errors: dict[str, str]) -> str | None:
        """The error of a sequence whose item another sequence was to encode, and could not."""
        track = self.tracks[task.request_id]
        start, stop = task.num_computed, task.num_computed + task.num_tokens
        if not errors or start >= track.media_end:
            return None
        inside = (f for f in track.features if f.range.offset < stop and f.range.end > start)
        missing = next((f for f in inside if f.hash not in self.encoded), None)
        return None if missing is None else f"{missing.modality}: another request was to encode it and failed; ask again"

    def _forward(self, rows: list[Row]) -> list[TokenOutput]:
        batch = build_batch(rows, self.encoded, self.kv_caches, self.group_of, self.block_size, self.device)
        hidden = self.model.forward(batch)
        starts = batch.attn[0].query_start
        prompts = [self._prompt_logprobs(*row, hidden, start) for row, start in zip(rows, starts, strict=False)]
        ends = [stop - 1 for (_, task), stop in zip(rows, starts[1:], strict=True) if task.sample]
        sampling = [track for track, task in rows if task.sample]
        if not sampling:
            return [TokenOutput(task.request_id, (), None, done) for (_, task), done in zip(rows, prompts, strict=True)]
        last = hidden if len(ends) == hidden.shape[0] else hidden[torch.tensor(ends, device=hidden.device)]
        tokens, logprobs = sample(self.model.compute_logits(last), [track.sample_row() for track in sampling])
        for track, token in zip(sampling, tokens, strict=True):
            track.token_ids.append(token)
        return _results(rows, prompts, tokens, logprobs)

    def _prompt_logprobs(
        self, track: Track, task: ScheduledRequest, hidden: Tensor, start: int
    ) -> tuple[dict[int, Logprob] | None, ...] | None:
        """Extend the prompt's log probabilities by this chunk; all of them once the prompt is complete, else None."""
        count, prompt, done = track.message.params.prompt_logprobs, track.message.prompt_token_ids, track.prompt_logprobs
        if count is None or len(done) == len(prompt):
            return None
        if not done:
            done.append(None)  # nothing predicts the first token
        stop = min(task.num_computed + task.num_tokens, len(prompt) - 1)
        for first in range(len(done) - 1, stop, _LOGITS_ROWS):
            last = min(first + _LOGITS_ROWS, stop)
            base = start - task.num_computed
            logits = self.model.compute_logits(hidden[base + first : base + last])
            done.extend(gather_logprobs(logits, prompt[first + 1 : last + 1], [count] * (last - first)))
        return tuple(done) if len(done) == len(prompt) else None


def _results(
    rows: list[Row],
    prompts: Sequence[tuple[dict[int, Logprob] | None, ...] | None],
    tokens: Sequence[int],
    logprobs: Sequence[dict[int, Logprob] | None],
) -> list[TokenOutput]:
    sampled = iter(zip(tokens, logprobs, strict=True))
    results = []
    for (_, task), prompt in zip(rows, prompts, strict=True):
        if not task.sample:
            results.append(TokenOutput(task.request_id, (), None, prompt))
            continue
        token, entry = next(sampled)
        results.append(TokenOutput(task.request_id, (token,), None if entry is None else (entry,), prompt))
    return results


def describe(error: Exception) -> str:
    """One line for an exception."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SensoriumError) else f"{type(error).__name__}: {text}"
