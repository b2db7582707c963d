"""`LLM.encode`: vectors and logits of prompts, in outputs with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ..callers.errors import ConfigError, ErrorInfo, InputError, SensoriumError, short_repr
from ..callers.repr_mixin import ReprMixin
from ..engine.frontend.request import RequestInput
from ..engine.frontend.request_handle import RequestHandle
from ..engine.outputs import RequestOutput
from ..engine.pooling_params import PoolingParams
from ..engine.sampling_params import SamplingParams
from .run import Task, answer
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.engine import Engine

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
    def truncated(self) -> bool:
        """True if tokens of the prompt were left out; `prompt_token_ids` are those that were computed."""
        return self.output.truncated

    @property
    def finished(self) -> bool:
        return self.output.finished

    def _checked(self, value: T | None) -> T:
        if self.error is not None:
            raise InputError(**self.error.fields())
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
    engine: Engine,
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
    several: Sequence[Any] = (
        pooling_params if isinstance(pooling_params, list | tuple) else [pooling_params or PoolingParams()] * len(prompts)
    )
    valid = len(several) == len(prompts) and all(isinstance(entry, PoolingParams) for entry in several)
    if not valid:
        reason = f"<<param=>>{short_repr(pooling_params)} must be a PoolingParams, or one per prompt ({len(prompts)} here)"
        raise InputError(reason, code="invalid_value", param="pooling_params")
    for params in several:
        both = (pooling_task, params.task)
        if any(task in _OF_TOKENS for task in both) and None not in both and pooling_task != params.task:
            named = f"pooling_task={short_repr(pooling_task)} and PoolingParams(task={short_repr(params.task)})"
            raise InputError(f"{named} contradict each other; leave one out", param="pooling_task")
    several = [replace(params, task=pooling_task or params.task or "embed") for params in several]
    for params in several:
        classifies = params.classifies or params.classifies_tokens
        if params.task not in _TASKS or (classifies and not engine.info.num_labels):
            how = "use embed, score, or PoolingParams(token_ids=...) for the logits of these tokens"
            reason = f"<<param=>>{short_repr(params.task)}: this checkpoint has no such head; {how}"
            raise ConfigError(reason, param="pooling_task")
        check_dimensions(engine, params)
    return [partial(_encode, engine, prompt, params) for prompt, params in zip(prompts, several, strict=True)]


async def _encode(engine: Engine, prompt: object, params: PoolingParams) -> PoolingRequestOutput:
    output = await answer(pooling_request(engine, prompt, params, {}))
    if params.classifies or params.classifies_tokens:
        return PoolingRequestOutput(output.pooled, output.error, output)
    if engine.output_shape is not None and output.pooled is not None and params.pooling in (None, "tokens"):
        return PoolingRequestOutput(output.pooled.view(engine.output_shape), None, output)
    return PoolingRequestOutput(shorten(engine, output.pooled, params.dimensions, params.normalize), output.error, output)


def pooling_request(
    engine: Engine, prompt: object, pooling: PoolingParams, options: dict[str, Any], params: SamplingParams = _NOTHING_SAMPLED
) -> RequestHandle:
    """Return a request that computes a vector. `options`: further arguments of `LLM.request`."""
    prompt, options = with_truncation(prompt, options, pooling.truncate_prompt_tokens, pooling.truncation_side)
    try:
        request = pooling.request(engine.info.pooling)
    except InputError as error:
        return failed_request(error)
    handle = engine.request(prompt, params, **options)
    handle.input = replace(handle.input, pooling=request, first_tokens=pooling.first_tokens)
    return handle


def with_truncation(
    prompt: object, options: dict[str, Any], tokens: int | None, side: str | None = None
) -> tuple[object, dict[str, Any]]:
    """Return the arguments of `LLM.request` for a prompt that is cut, unless the prompt itself says how it is cut."""
    if tokens is None:
        return prompt, options
    cut = {"truncate_prompt_tokens": tokens, "truncation_side": side}
    if isinstance(prompt, str):
        return {"prompt": prompt, **cut}, options
    if isinstance(prompt, Mapping):
        return {**cut, **prompt}, options
    if isinstance(prompt, list | tuple) and all(isinstance(token, int) for token in prompt):
        return {"prompt_token_ids": prompt, **cut}, options
    return prompt, {**cut, **options}


def failed_request(error: SensoriumError) -> RequestHandle:
    """Return a request whose output has this error."""

    def fail() -> NoReturn:
        raise error

    return RequestHandle(RequestInput(fail, _NOTHING_SAMPLED))


def check_dimensions(engine: Engine, params: PoolingParams) -> None:
    """Raise InputError for `dimensions` beyond the length of the model's vectors."""
    size = engine.embedding_size(params.pooling)
    if params.dimensions is not None and params.dimensions > size:
        reason = f"<<param=>>{params.dimensions} must be between 1 and {size}, the width of this model's vectors"
        raise InputError(reason, code="invalid_value", param="dimensions")


def shorten(engine: Engine, vector: Tensor | None, dimensions: int | None, normalize: bool | None = None) -> Tensor | None:
    """Return the first `dimensions` values of vectors, scaled to length 1 again if the whole vectors have it.

    Without `dimensions`, a vector is cut to the checkpoint's `truncate_dim`, and scaled again only if the call asks for it.
    """
    settings = engine.sentence_transformers
    if dimensions is None and vector is not None and vector.ndim == 1 and settings is not None:
        dimensions, normalize = settings.truncate_dim, bool(normalize)
    if vector is None or dimensions is None or dimensions >= vector.shape[-1]:
        return vector
    normalizes = engine.info.normalizes if normalize is None else normalize
    return torch.nn.functional.normalize(vector[..., :dimensions], dim=-1) if normalizes else vector[..., :dimensions].clone()
