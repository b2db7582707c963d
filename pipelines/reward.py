"""`LLM.reward`: numbers of reward models, for whole answers and for the steps of a solution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..callers.errors import ConfigError, ErrorInfo, InputError, short_repr
from ..engine.pooling_params import PoolingParams
from .classify import check_labels_prompts
from .pooling import PoolingRequestOutput, pooling_request
from .run import Task, answer
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.engine import Engine


def reward_tasks(
    engine: Engine,
    prompts: Sequence[object],
    pooling_params: PoolingParams | None = None,
    step_token: str | int | None = None,
) -> list[Task[PoolingRequestOutput]]:
    """Return one task per prompt. Prompts are those of `LLM.generate` and are used unchanged.

    Each result's `data` is the head's number for the prompt, float32 `[1]`; with `step_token`, float32 `[steps, classes]`.

    Args:
        pooling_params: `use_activation=True` applies the checkpoint's activation to the number of a prompt;
            `use_activation=False` returns logits of steps instead of probabilities.
        step_token: token or id that ends each step of a solution, for process reward models (`"<extra_0>"` in
            Qwen2.5-Math-PRM). The steps of a prompt are read one after the other and share its KV cache.

    Raises:
        ConfigError: the checkpoint has no head, or several classes and no `step_token` is given.
        InputError: `step_token` is not one token.
    """
    check_type("pooling_params", pooling_params, PoolingParams, type(None))
    check_type("step_token", step_token, str, int, type(None))
    if not engine.info.num_labels:
        raise ConfigError("the model has no head for rewards; use a checkpoint for classification or a reward model")
    check_labels_prompts(engine)
    if engine.info.num_labels != 1 and step_token is None:
        how = "give step_token for a process reward model, or use classify"
        raise ConfigError(f"the model has {engine.info.num_labels} classes, and the reward of a prompt needs one; {how}")
    params = replace(pooling_params or PoolingParams(), task="classify")
    if step_token is not None:
        step = _step_id(engine, step_token)
        return [partial(_steps, engine, prompt, params, step) for prompt in prompts]
    params = replace(params, use_activation=bool(params.use_activation))
    return [partial(_reward, engine, prompt, params) for prompt in prompts]


def _step_id(engine: Engine, token: str | int) -> int:
    """Return the id of the step token."""
    ids = engine.tokenizer.encode(token, add_special_tokens=False) if isinstance(token, str) else [token]
    if len(ids) != 1:
        raise InputError(f"<<param=>>{short_repr(token)} is {len(ids)} tokens; give one", param="step_token")
    return ids[0]


async def _reward(engine: Engine, prompt: object, params: PoolingParams) -> PoolingRequestOutput:
    output = await answer(pooling_request(engine, prompt, params, {}))
    return PoolingRequestOutput(output.pooled, output.error, output)


async def _steps(engine: Engine, prompt: object, params: PoolingParams, step: int) -> PoolingRequestOutput:
    """Classify the whole prompt, which caches its keys and values, then its beginnings up to each step token.

    A beginning that is the whole prompt is not read again.
    """
    output = await answer(pooling_request(engine, prompt, params, {}))
    ids, rows = output.prompt_token_ids, list[torch.Tensor]()
    error = output.error
    if error is None and step not in ids:
        error = ErrorInfo("invalid_input", f"the prompt has no step token, id {step}", param="step_token")
    for end in [] if error else [i + 1 for i, token in enumerate(ids) if token == step]:
        part = output
        if end < len(ids):
            part = await answer(pooling_request(engine, {"prompt_token_ids": ids[:end]}, params, {}))
        if part.error is not None:
            return PoolingRequestOutput(None, part.error, output)
        assert part.pooled is not None
        rows.append(part.pooled)
    return PoolingRequestOutput(torch.stack(rows) if rows else None, error, output)
