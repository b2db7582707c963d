"""Requests, steps and outputs of the engine: plain data that codec.py encodes as bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ..mm.errors import ErrorInfo
from ..mm.repr_mixin import ReprMixin
from ..mm.types import EncodedItem, ItemPlan, MultiModalFeature
from ..processors.elements.element import Element
from ..processors.elements.formats import MarkedText
from .pooling_params import PoolingParams
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to generate. A request with `params.n > 1` becomes `n` EngineRequests.

    Args:
        eos_token_ids: tokens that end the answer unless `params.ignore_eos` is set.
        features: items in order of their offset.
        priority: smaller values are scheduled first and preempted last.
        seed: seed of this sequence; seed and position determine each random number.
        bad_word_ids: token sequences that must not be generated.
        hold_open: keep the sequence and its KV cache after the answer, for `append` and `truncate`, until
            `append(close=True)` or `abort`.
        salt: KV blocks are shared only with sequences of the same salt.
        adapter: name of the adapter that computes the sequence, "" for none. KV blocks are shared only with the same adapter.
        cross: the input of cross-attention. Its range has the length of its rows, and begins at its token if it has one.
        pooling: what to compute from the prompt's last hidden state instead of generating tokens.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    features: tuple[MultiModalFeature, ...] = ()
    priority: int = 0
    seed: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    hold_open: bool = False
    salt: str = ""
    adapter: str = ""
    cross: MultiModalFeature | None = None
    pooling: PoolingParams | None = None


@dataclass(frozen=True)
class RequestUpdate:
    """A change of a known sequence: cut it to `num_tokens` tokens, then add these tokens and items.

    Args:
        restart: a new answer starts after the added tokens; max_tokens, min_tokens and penalties count from there.
        forbid: token sequences that the rest of the answer must not contain.
        adapter: the adapter that computes the whole sequence from now on; None keeps the current one.
    """

    request_id: str
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    features: tuple[MultiModalFeature, ...] = ()
    restart: bool = False
    forbid: tuple[tuple[int, ...], ...] = ()
    adapter: str | None = None


@dataclass(frozen=True)
class ScheduledRequest:
    """The part of one sequence in a step: `num_tokens` tokens after the first `num_computed`, in the blocks `block_ids`.

    Args:
        block_ids: blocks of the sequence, per KV-cache group.
        sample: False for a chunk that does not reach the end of the known tokens.
        write_cross: also compute the keys and values of the encoder input in this step.
    """

    request_id: str
    num_computed: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    sample: bool = True
    write_cross: bool = False


CROSS = -1  # index of the encoder input of an encoder-decoder model among a request's items


@dataclass(frozen=True)
class EncodeTask:
    """Encode item `index` of the request (CROSS: its encoder input), before this step's forward or beside it."""

    request_id: str
    index: int
    hash: str


@dataclass(frozen=True)
class SchedulerOutput:
    """A step to run, from the scheduler to a worker. A request is sent once; later steps refer to it by id.

    Args:
        updates: changes of known requests in the order they were made; they apply after `new_requests`.
        finished: requests whose state the worker may drop.
        free_encoder: hashes of items whose encoder rows are no longer needed.
        zero_blocks: (cache group, block) to fill with zeros, because they may hold NaN and 0 x NaN is NaN.
    """

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    encode: tuple[EncodeTask, ...] = ()
    new_requests: tuple[EngineRequest, ...] = ()
    updates: tuple[RequestUpdate, ...] = ()
    finished: tuple[str, ...] = ()
    free_encoder: tuple[str, ...] = ()
    zero_blocks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Logprob:
    """Log probability (natural logarithm) of a token, its rank (1 is the most likely token) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class SequenceStats:
    """Use of the caches and preemptions of a sequence.

    Args:
        cached_tokens: prompt tokens that the prefix cache had when the sequence was first scheduled.
        preemptions: how many times the sequence was preempted.
        items: how each item's encoder rows were obtained, in order: "encoded", "cache" (encoder cache), "disk", or "prefix"
            (not needed, because the prefix cache had the tokens).
    """

    cached_tokens: int = 0
    preemptions: int = 0
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenOutput:
    """Result of one step for one sequence.

    Args:
        finish_reason: None, "stop", "length", "repetition", "abort" or "error".
        num_removed: number of tokens to remove from the end of the answer (repair of a loop); then there are no new tokens.
        timings: seconds of queue, encode, prefill and decode_steps; with the last output of an answer only.
        stats: with the last output of an answer only.
        pooled: float32, the result of `EngineRequest.pooling`.
        encoder_rows: `[rows, width]` of each item, from an engine that has only the encoder.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: ErrorInfo | None = None
    num_removed: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    stats: SequenceStats | None = None
    pooled: Tensor | None = field(default=None, compare=False)
    encoder_rows: tuple[Tensor, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class EncodeResult:
    """The result of one EncodeTask.

    Args:
        source: "encoded", "disk" if the rows were read from disk, or "dropped" if they were not needed any more.
        error: why there are no rows, or None. It does not yet name the item.
        item_failed: True if the item itself made the encoder fail, not a lack of memory. It is then quarantined.
        seconds: the item's share of the encoder call's time.
    """

    hash: str
    source: str = "encoded"
    error: ErrorInfo | None = None
    item_failed: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class StepOutput:
    """A worker's answer to a SchedulerOutput.

    Args:
        tokens: one TokenOutput per scheduled request, in order.
        encoded: results of encoder calls that have finished; they may be of earlier steps.
    """

    tokens: tuple[TokenOutput, ...]
    encoded: tuple[EncodeResult, ...] = ()


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start of the engine; "now" marks current values.

    Args:
        running, waiting, idle: sequences now; idle ones are held open after their answer.
        steps: steps computed. steps_ahead: steps that were started before the previous step's tokens were known.
        blocks, blocks_used, blocks_cached: KV-cache blocks in total, now in use, and now only in the prefix cache. A state
            counts as a block.
        kv_usage: fraction of the KV cache's bytes in use now.
        prefix_queries, prefix_hits: prompt tokens of scheduled sequences, and how many of them the prefix cache had.
        prefix_evictions: cached blocks that were evicted.
        encoder_calls: items encoded. encoder_disk_hits: items read from disk.
        encoder_hits, encoder_evictions: items found in the encoder cache, and items evicted from it.
        encoder_bytes, encoder_capacity: bytes of the encoder cache in use now, and its size.
        preemptions: preempted sequences. cut_items: items that were computed in more than one step.
        quarantined: items that are refused now.
    """

    running: int = 0
    waiting: int = 0
    idle: int = 0
    steps: int = 0
    steps_ahead: int = 0
    blocks: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_evictions: int = 0
    encoder_calls: int = 0
    encoder_disk_hits: int = 0
    encoder_hits: int = 0
    encoder_evictions: int = 0
    encoder_bytes: int = 0
    encoder_capacity: int = 0
    preemptions: int = 0
    cut_items: int = 0
    quarantined: int = 0


@dataclass(frozen=True)
class CoreInfo:
    """Constants of a core.

    Args:
        max_model_len: maximum number of tokens of prompt and answer together.
        max_num_seqs: maximum number of sequences per step.
        vocab_size: token ids are below it.
        hidden_size: length of a hidden state.
        row_bytes: bytes of one encoder row.
        dtype: dtype of weights and encoder rows, such as "bfloat16".
        device: the model's device, such as "cpu" or "cuda:0".
        adapters: valid names of `EngineRequest.adapter`.
        modalities: modalities of items that the model takes.
        structured_outputs: True if requests may have a grammar.
        can_sleep: True if `sleep` works.
        can_generate: False if the checkpoint has no head, so that requests must have a `pooling` without `token_ids`.
        num_labels: classes of the checkpoint's classification head, 0 without one.
        labels_tokens: that head is made for tokens, not for whole prompts.
        cross_attention: number of decoder layers whose cross-attention weights a request can return, and of heads in each.
        captured_layers: largest `PoolingParams.layer` of a request, 0 if the model has none.
        pooling: the `PoolingParams.pooling` of requests that name none.
        vector_size, token_size: length of a prompt's vector, and of the vectors of its tokens.
        logit_scale, logit_bias: as in `SupportsSimilarity`; None for other models.
    """

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    hidden_size: int
    row_bytes: int
    dtype: str
    device: str
    adapters: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ()
    structured_outputs: bool = False
    can_sleep: bool = False
    can_generate: bool = True
    num_labels: int = 0
    labels_tokens: bool = False
    cross_attention: tuple[int, int] = (0, 0)
    captured_layers: int = 0
    pooling: str = "last"
    vector_size: int = 0
    token_size: int = 0
    logit_scale: float | None = None
    logit_bias: float | None = None


@dataclass(frozen=True)
class CoreOutputs:
    """Result of one step of the core.

    Args:
        outputs: one output per sequence that got tokens or ended.
        idle: True if there was nothing to compute.
        stats: a snapshot of the statistics, at most 50 ms old and taken after the last sequence began or ended.
    """

    outputs: tuple[TokenOutput, ...]
    idle: bool
    stats: EngineStats


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

    @property
    def elements(self) -> tuple[Element, ...]:
        """The elements of the first answer; see `CompletionOutput.elements`."""
        return self.outputs[0].elements if self.outputs else ()

    # vLLM's names, which have no value here
    encoder_prompt = encoder_prompt_token_ids = metrics = lora_request = kv_transfer_params = None
