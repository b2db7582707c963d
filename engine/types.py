"""What goes into the engine, what one step does, what comes out: plain data that round-trips through bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..mm.types import MultiModalFeature
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to compute. `params.n > 1` is fanned out to several requests before they get here."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    features: tuple[MultiModalFeature, ...] = ()
    priority: int = 0


@dataclass(frozen=True)
class ScheduledRequest:
    """`num_tokens` rows of one request in this step, after `num_computed` that are done, on `block_ids`."""

    request_id: str
    num_computed: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]  # per cache group


@dataclass(frozen=True)
class EncodeTask:
    """Item `index` of the request is to be encoded before this step's forward."""

    request_id: str
    index: int
    hash: str


@dataclass(frozen=True)
class SchedulerOutput:
    """All that a worker needs to run one step: new requests once, then only their ids."""

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    encode: tuple[EncodeTask, ...] = ()
    new_requests: tuple[EngineRequest, ...] = ()
    finished: tuple[str, ...] = ()  # requests whose memory the worker may drop
    free_encoder: tuple[str, ...] = ()  # encoder-cache hashes no longer needed


@dataclass(frozen=True)
class Logprob:
    """One token's log probability (natural log), its rank (1 = most likely) and text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class TokenOutput:
    """What one step added to one request. `finish_reason`: None | "stop" | "length" | "abort" | "error"."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. `stop_reason` is the stop string or token id that ended it, None for EOS and length."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt, completions in order of `index`. `error` says why nothing more came, or None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    finished: bool = True
    error: str | None = None
    timings: dict[str, float] = field(default_factory=dict)  # seconds: decode, process, queue, encode, prefill, decode_steps
