"""`LLM.encode`: vectors and logits of prompts, in outputs with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ..engine.frontend.request_handle import RequestHandle
from ..engine.pooling_params import PoolingParams
from ..engine.sampling_params import SamplingParams
from ..engine.types import RequestOutput
from ..mm.errors import ConfigError, ErrorInfo, InputError, short_repr
from ..mm.plain import check_classes, reading
from ..mm.repr_mixin import ReprMixin
from .tasks import Task
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.llm import LLM

T = TypeVar("T")
_NOTHING_SAMPLED = SamplingParams(max_tokens=1)
_TASKS = ("embed", "token_embed", "classify", "token_classify", "score")
_OF_TOKENS = ("token_embed", "token_classify")


@dataclass(frozen=True, repr=False)
class PoolingOutput(ReprMixin):
    """The vector or logits of one prompt: `data` is float32 `[n]`, or `[tokens, n]` for vectors of tokens."""

    data: Tensor


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector as a list, or a list of vectors of tokens."""

    embedding: list[Any]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding[0] if isinstance(self.embedding[0], list) else self.embedding)


@dataclass(frozen=True)
class ScoringOutput:
    score: float


class PooledResult(ReprMixin):
    """Base of the results of `embed`, `score` and `encode`, with the fields of vLLM's pooling outputs."""

    error: ErrorInfo | None
    output: RequestOutput

    @property
    def request_id(self) -> str:
        return self.output.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.output.prompt_token_ids

    @property
    def num_cached_tokens(self) -> int:
        return self.output.num_cached_tokens

    @property
    def finished(self) -> bool:
        return self.output.finished

    def _checked(self, value: T | None) -> T:
        if self.error is not None:
            raise InputError(self.error.message, code=self.error.code, param=self.error.param)
        assert value is not None
        return value


@dataclass(frozen=True, repr=False)
class PoolingRequestOutput(PooledResult):
    """The output of one prompt of `LLM.encode`.

    Args:
        data: float32 `[n]`, `[tokens, n]` with the pooling "tokens", the result's shape
            for models of tensors, or None if there is an error.
        error: why there is no data, or None.
        output: the request's output.
    """

    data: Tensor | None
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)

    @property
    def outputs(self) -> PoolingOutput:
        """The data. Raises InputError if there is an error."""
        return PoolingOutput(self._checked(self.data))


def encode_tasks(
    llm: LLM,
    prompts: Sequence[object],
    pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    pooling_task: str | None = None,
) -> list[Task[PoolingRequestOutput]]:
    """Return one task per prompt. Prompts are those of `LLM.generate` and are used unchanged.

    Args:
        pooling_params: one for all prompts or one per prompt; None returns the model's vector, for decoders the last
            token's hidden state scaled to length 1.
        pooling_task: "embed" (the default), "token_embed" for a vector of each token, "classify" or "score" for the
            probabilities of the classes, or for the logits of `PoolingParams(token_ids=...)`, or "token_classify" for the
            probabilities of the classes of each token, `[tokens, classes]`.

    Raises:
        ConfigError: a task that no checkpoint can do here.
        InputError: an argument has a wrong type or length.
    """
    check_type("pooling_task", pooling_task, str, type(None))
    check_classes(pooling_params=pooling_params)
    several: Sequence[Any] = (
        pooling_params if isinstance(pooling_params, list | tuple) else [pooling_params or PoolingParams()] * len(prompts)
    )
    with reading(several, "pooling_params"):
        valid = len(several) == len(prompts) and all(isinstance(one, PoolingParams) for one in several)
    if not valid:
        reason = f"pooling_params={short_repr(pooling_params)} must be a PoolingParams, or one per prompt ({len(prompts)} here)"
        raise InputError(reason, param="pooling_params")
    for params in several:
        both = (pooling_task, params.task)
        if any(task in _OF_TOKENS for task in both) and None not in both and pooling_task != params.task:
            named = f"pooling_task={short_repr(pooling_task)} and PoolingParams(task={short_repr(params.task)})"
            raise InputError(f"{named} contradict each other; leave one out", param="pooling_task")
    several = [replace(params, task=pooling_task or params.task or "embed") for params in several]
    for params in several:
        classifies = params.classifies or params.classifies_tokens
        if params.task not in _TASKS or (classifies and not llm.num_labels):
            how = "use embed, score, or PoolingParams(token_ids=...) for the logits of these tokens"
            reason = f"pooling_task={short_repr(params.task)}: this checkpoint has no such head; {how}"
            raise ConfigError(reason, param="pooling_task")
        check_dimensions(llm, params)
    return [_encode_task(llm, prompt, params) for prompt, params in zip(prompts, several, strict=True)]


def _encode_task(llm: LLM, prompt: object, params: PoolingParams) -> Task[PoolingRequestOutput]:
    output = yield pooling_request(llm, prompt, params, {})
    dimensions = None if params.classifies or params.classifies_tokens else params.dimensions
    if llm.output_shape is not None and output.pooled is not None and params.pooling in (None, "tokens"):
        return PoolingRequestOutput(output.pooled.view(llm.output_shape), None, output)
    return PoolingRequestOutput(truncate(output.pooled, dimensions, params.normalize), output.error, output)


def pooling_request(
    llm: LLM, prompt: object, pooling: PoolingParams, options: dict[str, Any], params: SamplingParams = _NOTHING_SAMPLED
) -> RequestHandle:
    """Return a request that computes a vector. `options`: further arguments of `LLM.request`."""
    handle = llm.request(prompt, params, **options)
    handle.pooling = pooling
    return handle


def failed_request(error: InputError) -> RequestHandle:
    """Return a request whose output has this error."""

    def fail() -> NoReturn:
        raise error

    return RequestHandle(fail, _NOTHING_SAMPLED)


def check_dimensions(llm: LLM, params: PoolingParams) -> None:
    """Raise InputError for `dimensions` beyond the length of the model's vectors."""
    size = llm.embedding_size(params.pooling)
    if params.dimensions is not None and params.dimensions > size:
        reason = f"dimensions={params.dimensions} must be between 1 and {size}, the width of this model's vectors"
        raise InputError(reason, param="dimensions")


def truncate(vector: Tensor | None, dimensions: int | None, normalize: bool | None = None) -> Tensor | None:
    """Return the first `dimensions` values of vectors (None: all), scaled to length 1 again unless `normalize` is False."""
    if vector is None or dimensions is None:
        return vector
    if normalize is False:
        return vector[..., :dimensions]
    return torch.nn.functional.normalize(vector[..., :dimensions], dim=-1)
