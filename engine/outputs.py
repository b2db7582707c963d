"""Outputs of requests, as callers get them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ..callers.errors import ErrorInfo
from ..callers.repr_mixin import ReprMixin
from ..mm.types import EncodedItem, ItemPlan
from ..processors.elements.element import Element
from ..processors.elements.marked_text import MarkedText
from .stats import DraftStats
from .types import Logprob


@dataclass(frozen=True)
class ItemTrace:
    """Sizes, caches and timings of one processed item of a prompt.

    Args:
        source_bytes: bytes of the item as given or downloaded, encoded or as pixels; 0 for a uuid without data.
        num_bytes: bytes of the processed tensors.
        num_tokens: tokens of the prompt that the item takes.
        cached: the processed item was in the cache.
        encoder: "encoded", "cache", "disk" or "prefix", see SequenceStats; "" while it is not known.
        timings: seconds of fetch, decode and process.
    """

    modality: str
    index: int
    source_bytes: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    cached: bool = False
    encoder: str = ""
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class CompletionOutput(ReprMixin):
    """One of the answers to a prompt.

    Args:
        stop_reason: the stop string or stop token that ended the answer; None for EOS and other finish reasons.
        marked: the finished answer with its special tokens, decoded on access, for models that name elements; see `elements`.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    marked: MarkedText | None = field(default=None, repr=False, compare=False)
    lora_request = None  # vLLM's names, which have no value here

    def finished(self) -> bool:
        return self.finish_reason is not None

    @cached_property
    def elements(self) -> tuple[Element, ...]:
        """Boxes, points, layout elements and tables that the finished answer names, in pixels of the original image."""
        return () if self.marked is None else self.marked.elements()


@dataclass(frozen=True, repr=False)
class RequestOutput(ReprMixin):
    """The output of a request.

    Args:
        outputs: the answers, in order of `index`.
        finished: True for the last output of the request.
        error: why the request failed, or None.
        items: size, tokens and frames of each item, and whether `fit` made it smaller.
        timings: seconds of fetch, plan, decode, process, queue, encode, prefill and decode_steps. "queue" is the time spent
            waiting. The sum is about the time from the call to the last token.
        trace: how each item was processed, in the order of `items`.
        num_cached_tokens: prompt tokens that the prefix cache had.
        num_preemptions: how many times a sequence of the request was preempted.
        pooled: float32 `[n]`, the result of a request with `PoolingParams`.
        encoded: the result of `LLM.encode_media`, in the order of `items`.
        truncated: True if tokens of the prompt were left out, as `truncate_prompt_tokens` or the checkpoint says.
        drafts: what each proposer of drafted tokens achieved, over all answers.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(default=None, repr=False)
    finished: bool = True
    error: ErrorInfo | None = None
    items: tuple[ItemPlan, ...] = ()
    timings: dict[str, float] = field(default_factory=dict, repr=False)
    trace: tuple[ItemTrace, ...] = field(default=(), repr=False)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    pooled: Tensor | None = field(default=None, compare=False)
    encoded: tuple[EncodedItem, ...] = field(default=(), compare=False)
    truncated: bool = False
    drafts: tuple[DraftStats, ...] = field(default=(), repr=False, compare=False)

    @property
    def elements(self) -> tuple[Element, ...]:
        """The elements of the first answer; see `CompletionOutput.elements`."""
        return self.outputs[0].elements if self.outputs else ()

    # vLLM's names, which have no value here
    encoder_prompt = encoder_prompt_token_ids = metrics = lora_request = kv_transfer_params = None
