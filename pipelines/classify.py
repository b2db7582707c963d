"""Class probabilities of prompts and scores of pairs, from classification checkpoints (`...ForSequenceClassification`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..engine.pooling_params import PoolingParams
from ..engine.types import RequestOutput
from ..mm.errors import ConfigError, ErrorInfo, InputError, short_repr
from .pooling import PooledResult, pooling_request
from .tasks import Task
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.llm import LLM


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
    llm: LLM, prompts: Sequence[object], pooling_params: PoolingParams | None = None
) -> list[Task[ClassificationRequestOutput]]:
    """Return one task per prompt. Prompts are those of `LLM.generate` and are used unchanged.

    Args:
        pooling_params: `use_activation=False` returns the head's logits instead of probabilities.

    Raises:
        ConfigError: the checkpoint has no classification head.
    """
    check_type("pooling_params", pooling_params, PoolingParams, type(None))
    if not llm.num_labels:
        how = "use score, or encode with PoolingParams(token_ids=...) for the logits of single tokens"
        raise ConfigError(f"the model has no classification head; {how}")
    check_labels_prompts(llm)
    params = replace(pooling_params or PoolingParams(), task="classify")
    return [_classify_task(llm, prompt, params) for prompt in prompts]


def check_labels_prompts(llm: LLM) -> None:
    """Raise ConfigError if the checkpoint classifies tokens."""
    if llm.labels_tokens:
        raise ConfigError('the checkpoint classifies tokens, not prompts; use encode(..., pooling_task="token_classify")')


def _classify_task(llm: LLM, prompt: object, params: PoolingParams) -> Task[ClassificationRequestOutput]:
    output = yield pooling_request(llm, prompt, params, {})
    return ClassificationRequestOutput(output.pooled, output.error, output)


def pair_prompt(llm: LLM, query: object, document: object) -> tuple[dict[str, Any], PoolingParams]:
    """Return the prompt of a query and a document, as the checkpoint's tokenizer joins two texts, and its parameters.

    Raises:
        ConfigError: the checkpoint has several classes, or its tokenizer cannot join two texts.
        InputError: query or document is not a text.
    """
    check_labels_prompts(llm)
    if llm.num_labels != 1:
        raise ConfigError(f"the model has {llm.num_labels} classes, and score needs one; use classify")
    texts: list[Any] = [
        item.get("text") if isinstance(item, Mapping) and list(item) == ["text"] else item for item in (query, document)
    ]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{short_repr(text)} is not a string; this checkpoint scores pairs of texts")
    ids, first_tokens = llm.get_tokenizer().encode_pair(*texts)
    return {"prompt_token_ids": ids}, PoolingParams(task="score", first_tokens=first_tokens)
