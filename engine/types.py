"""Requests, steps and outputs of the engine: plain data that core/codec.py encodes as bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest

from torch import Tensor

from ..callers.errors import ErrorInfo
from ..callers.repr_mixin import ReprMixin
from ..mm.types import EncodedItem, ItemPlan, MultiModalFeature
from ..processors.elements.element import Element
from ..processors.elements.formats import MarkedText
from .pooling_requests import PoolingRequest
from .sampling_params import SamplingParams
from .structured_outputs import StructuredOutputsParams


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
        adapter: name or identity (`LoadedAdapter`) of the adapter that computes the sequence, "" for none. KV blocks are
            shared only with the same adapter.
        cross: the items that cross-attention reads, in order. Their ranges have the length of their rows, and begin at their
            tokens if they have one.
        pooling: what to compute from the prompt's hidden states instead of generating tokens.
        first_tokens: number of tokens of a pair's first text; the others have token type 1. None: all have type 0.
        draft_token_ids: the tokens of `params.draft_text`.
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
    cross: tuple[MultiModalFeature, ...] = ()
    pooling: PoolingRequest | None = None
    first_tokens: int | None = None
    draft_token_ids: tuple[int, ...] = ()


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
        epoch: number of the sequence's history: no other sequence has it, and it changes when results in flight become stale.
        draft_token_ids: guesses of the tokens after the known ones. They are the last input tokens of this part, and the row of
            each is sampled too; the worker returns the tokens up to the first one that differs from its guess.
        predict: False if what the worker drafts is no longer wanted.
    """

    request_id: str
    num_computed: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    sample: bool = True
    write_cross: bool = False
    epoch: int = 0
    draft_token_ids: tuple[int, ...] = ()
    predict: bool = True

    @property
    def num_sampled(self) -> int:
        """Rows at the end of this part whose tokens are sampled."""
        return 1 + len(self.draft_token_ids) if self.sample else 0


CROSS = -1
"""Index of the first item that cross-attention reads among a request's items; the second one's is CROSS - 1."""


@dataclass(frozen=True)
class EncodeTask:
    """Encode item `index` of the request (CROSS or less: of its encoder input), before this step's forward or beside it."""

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
        ahead: the tokens of the step before are not known to the scheduler: they are the input of this one.
    """

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    encode: tuple[EncodeTask, ...] = ()
    new_requests: tuple[EngineRequest, ...] = ()
    updates: tuple[RequestUpdate, ...] = ()
    finished: tuple[str, ...] = ()
    free_encoder: tuple[str, ...] = ()
    zero_blocks: tuple[tuple[int, int], ...] = ()
    ahead: bool = False


@dataclass(frozen=True)
class StepHandle:
    """A step that an executor has started.

    Args:
        can_follow: the step's tokens are where the next step reads them, so that this may start before they are polled.
    """

    number: int
    can_follow: bool = False


@dataclass(frozen=True)
class GrammarTask:
    """Compile the grammar of a request, and keep it until it is released. `tenant`: see `GrammarFactory.begin`."""

    request_id: str
    params: StructuredOutputsParams
    tenant: str = ""


@dataclass(frozen=True)
class WorkerUpdate:
    """A change of what workers keep beside steps. `release`: requests whose grammar is no longer needed."""

    compile: tuple[GrammarTask, ...] = ()
    release: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that requests may choose.

    Args:
        identity: `EngineRequest.adapter` of these requests: a digest of what it adds to which weights.
        num_bytes: of its tensors in the engine.
        rank: its largest rank.
    """

    identity: str
    num_bytes: int
    rank: int


@dataclass(frozen=True)
class GrammarResult:
    """A GrammarTask has ended; `error` says why there is no grammar."""

    request_id: str
    error: ErrorInfo | None = None


@dataclass(frozen=True)
class Logprob:
    """Log probability (natural logarithm) of a token, its rank (1 is the most likely token) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class DraftStats:
    """Counts of one proposer of drafted tokens. Each accepted token saves a step.

    Args:
        proposer: "text" (`draft_text`), "hypothesis" (token ids as `draft_text`), "suffix", "corpus", "mtp", "draft_model",
            "eagle3", or its own name.
        num_drafts: drafts that were verified.
        drafted, accepted: tokens verified and accepted, by position in their draft.
        switched_off: sequences for which its drafts cost more than they saved, so that it was switched off.
        failed: sequences for which it raised an error, so that it was dropped.
    """

    proposer: str
    num_drafts: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    switched_off: int = 0
    failed: int = 0

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    def __add__(self, other: DraftStats) -> DraftStats:
        """Return the sum of both; the proposer is this one."""
        drafted, accepted = (
            tuple(map(sum, zip_longest(ours, theirs, fillvalue=0)))
            for ours, theirs in ((self.drafted, other.drafted), (self.accepted, other.accepted))
        )
        switched_off, failed = self.switched_off + other.switched_off, self.failed + other.failed
        return DraftStats(self.proposer, self.num_drafts + other.num_drafts, drafted, accepted, switched_off, failed)


def add_stats(parts: Iterable[Iterable[DraftStats]]) -> tuple[DraftStats, ...]:
    """Return the sums by proposer."""
    sums: dict[str, DraftStats] = {}
    for stats in (stats_of_part for part in parts for stats_of_part in part):
        sums[stats.proposer] = sums[stats.proposer] + stats if stats.proposer in sums else stats
    return tuple(sums.values())


@dataclass(frozen=True)
class SequenceStats:
    """Use of the caches and preemptions of a sequence.

    Args:
        cached_tokens: prompt tokens that the prefix cache had when the sequence was first scheduled.
        preemptions: how many times the sequence was preempted.
        items: how each item's encoder rows were obtained, in order: "encoded", "cache" (encoder cache), "disk", or "prefix"
            (not needed, because the prefix cache had the tokens).
        drafts: what its proposers of drafted tokens achieved.
    """

    cached_tokens: int = 0
    preemptions: int = 0
    items: tuple[str, ...] = ()
    drafts: tuple[DraftStats, ...] = ()


@dataclass(frozen=True)
class TokenOutput:
    """Result of one step for one sequence.

    Args:
        token_ids: the tokens of its sampled rows, in order. logprobs: those of each token.
        finish_reason: None, "stop", "length", "repetition", "abort" or "error".
        num_removed: number of tokens to remove from the end of the answer (repair of a loop); then there are no new tokens.
        timings: seconds of queue, encode, prefill and decode_steps; with the last output of an answer only.
        stats: with the last output of an answer only.
        pooled: float32, the result of `EngineRequest.pooling`.
        encoder_rows: `[rows, width]` of each item, from an engine that has only the encoder.
        predicted: tokens that the worker's drafter expects next; the scheduler keeps them.
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
    predicted: tuple[int, ...] = ()


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
        predict_seconds: seconds that drafting for the next step took.
    """

    tokens: tuple[TokenOutput, ...]
    encoded: tuple[EncodeResult, ...] = ()
    predict_seconds: float = 0.0


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
        drafts: what each proposer of drafted tokens achieved.
        no_drafts: why no sequence of this engine gets drafts: "off", "rows" (a row's bits may depend on the other rows of its
            step, see `batch_invariant`) or "" (sequences do).
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
    drafts: tuple[DraftStats, ...] = ()
    no_drafts: str = ""


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
        normalizes: vectors have length 1 unless a request says otherwise.
        vector_size, token_size: length of a prompt's vector, and of the vectors of its tokens.
        logit_scale, logit_bias: as in `SupportsSimilarity`; None for other models.
        scheduling_policy: as in EngineConfig.
        bodies: which body computes the products and the attention on this CPU, as `op=body`.
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
    normalizes: bool = True
    vector_size: int = 0
    token_size: int = 0
    logit_scale: float | None = None
    logit_bias: float | None = None
    scheduling_policy: str = "fcfs"
    bodies: tuple[str, ...] = ()


def task_without_head(info: CoreInfo) -> str | None:
    """Return what a checkpoint without a language model head does, and the call for it; None if it has a head."""
    if info.can_generate:
        return None
    if info.labels_tokens:
        return "it classifies tokens; <<use_token_classify>>"
    if info.num_labels == 1:
        return "it scores pairs of a query and a document; <<use_score>>"
    if info.num_labels:
        return "it classifies prompts; <<use_classify>>"
    return "it computes vectors; <<use_embed>>"


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
