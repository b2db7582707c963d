"""Class probabilities of prompts and scores of pairs, from classification checkpoints (`...ForSequenceClassification`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..callers.errors import ConfigError, ErrorInfo, InputError, short_repr
from ..engine.outputs import RequestOutput
from ..engine.pooling_params import PoolingParams
from ..mm.truncation import Truncation
from .pooling import PooledResult, pooling_request
from .run import Task, answer
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.engine import Engine


@dataclass(frozen=True)
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, repr=False)
class ClassificationRequestOutput(PooledResult):
    """The classes of one prompt.

    Args:
        probs: float32 `[classes]` in the order of config.json's `id2label`, or None if there is an error.
        error: why `probs` is None, or None.
        output: the request's output.
    """

    probs: Tensor | None
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)

    @property
    def outputs(self) -> ClassificationOutput:
        """The probabilities as a list. Raises InputError if there is an error."""
        return ClassificationOutput(self._checked(self.probs).tolist())


def classify_tasks(
    engine: Engine, prompts: Sequence[object], pooling_params: PoolingParams | None = None
) -> list[Task[ClassificationRequestOutput]]:
    """Return one task per prompt. Prompts are those of `LLM.generate` and are used unchanged.

    Args:
        pooling_params: `use_activation=False` returns the head's logits instead of probabilities.

    Raises:
        ConfigError: the checkpoint has no classification head.
    """
    check_type("pooling_params", pooling_params, PoolingParams, type(None))
    if not engine.info.num_labels:
        how = "<<use_score_or_logits>>"
        raise ConfigError(f"the model has no classification head; {how}")
    check_labels_prompts(engine)
    params = replace(pooling_params or PoolingParams(), task="classify")
    return [partial(_classify, engine, prompt, params) for prompt in prompts]


def check_labels_prompts(engine: Engine) -> None:
    """Raise ConfigError if the checkpoint classifies tokens."""
    if engine.info.labels_tokens:
        raise ConfigError("the checkpoint classifies tokens, not prompts; <<use_token_classify>>")


async def _classify(engine: Engine, prompt: object, params: PoolingParams) -> ClassificationRequestOutput:
    output = await answer(pooling_request(engine, prompt, params, {}))
    return ClassificationRequestOutput(output.pooled, output.error, output)


def pair_prompt(
    engine: Engine, query: object, document: object, cut: Truncation | None = None
) -> tuple[dict[str, Any], PoolingParams, bool]:
    """Return the prompt of a query and a document, as the checkpoint's tokenizer joins two texts, and its parameters.

    The third value is True if `cut` left out tokens.

    Raises:
        ConfigError: the checkpoint has several classes, or its tokenizer cannot join two texts.
        InputError: query or document is not a text.
    """
    check_labels_prompts(engine)
    if engine.info.num_labels != 1:
        raise ConfigError(f"the model has {engine.info.num_labels} classes, and <<score_needs_one_class>>")
    texts: list[Any] = [
        item.get("text") if isinstance(item, Mapping) and list(item) == ["text"] else item for item in (query, document)
    ]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{short_repr(text)} is not a string; this checkpoint scores pairs of texts", code="unsupported")
    ids, first_tokens, is_cut = engine.tokenizer.encode_pair(texts[0], texts[1], cut)
    return {"prompt_token_ids": ids}, PoolingParams(task="score", first_tokens=first_tokens), is_cut
