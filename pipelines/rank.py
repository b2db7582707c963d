"""Texts, pictures and clips to vectors, and how well documents answer a query. Knows no family.

Sources: the published usage of Qwen3-VL-Embedding (a conversation whose last token's hidden state is the vector) and
Qwen3-VL-Reranker (the probability of "yes" against "no" as the next token).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.pooling import Pooling
from ..engine.sampling_params import SamplingParams
from ..engine.ticket import Job
from ..engine.types import RequestOutput
from ..mm.errors import ConfigError, InputError
from ..mm.parse import is_several
from .asking import Asking
from .parts import media_part
from .wishes import check

if TYPE_CHECKING:
    from ..engine.llm import LLM

REPRESENT = "Represent the user's input."
RETRIEVE = "Given a search query, retrieve relevant candidates that answer the query."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_MEDIA = ("image", "video", "audio")
_UNANSWERED = SamplingParams(max_tokens=1)
_READY = ("prompt", "prompt_token_ids")  # a prompt that is rendered already


@dataclass(frozen=True)
class Embedding:
    """`vector`: float32 `[n]` of length 1; None where `error` says why there is none."""

    vector: Tensor | None
    error: str | None
    output: RequestOutput


@dataclass(frozen=True)
class Score:
    """How well a document answers a query: `score` in 0..1; None where `error` says why there is none."""

    score: float | None
    error: str | None
    output: RequestOutput


def embeddings(
    llm: LLM,
    inputs: object,
    instruction: str = REPRESENT,
    dimensions: int | None = None,
    chat_template: str | None = None,
) -> list[Asking[Embedding]]:
    """One vector for one input or for each of a list, in one batch, in the order given. An input that fails has an error.

    Args:
        inputs: each a text (any str, also one that looks like a path), a picture (Path, PIL image, pixels or `Media`), a
            mapping such as `{"text": ..., "image": ..., "video": ...}` of one or several each, in which a str is a path or
            URL, or a prompt as `generate` takes it, which is used as it stands.
        instruction: what the vectors are for, as the model is told.
        dimensions: the first so many numbers only, scaled to length 1 again (models trained for it, arXiv 2205.13147).
        chat_template: Jinja source instead of the checkpoint's own.

    Raises:
        InputError: wrong dimensions and, as the first job is asked for, a checkpoint without a chat template or an input
            of another form.
    """
    check("instruction", instruction, str)
    check("chat_template", chat_template, str, type(None))
    check("dimensions", dimensions, int, type(None))
    if dimensions is not None and not 1 <= dimensions <= llm.hidden_size:
        raise InputError(f"dimensions={dimensions} must be between 1 and {llm.hidden_size}, the width of this model's vectors")
    return [_embedding(llm, one, instruction, dimensions, _template(chat_template)) for one in _listed(inputs)]


def _embedding(
    llm: LLM, given: object, instruction: str, dimensions: int | None, template: Mapping[str, Any]
) -> Asking[Embedding]:
    chat = [_message("system", instruction), _message("user", _parts(given) or "NULL")] if not _is_ready(given) else given
    output = yield _pooled(llm, chat, Pooling(), template)
    return Embedding(_shortened(output.pooled, dimensions), output.error, output)


def scores(
    llm: LLM,
    query: object,
    documents: object,
    instruction: str = RETRIEVE,
    chat_template: str | None = None,
) -> list[Asking[Score]]:
    """How well one document or each of a list answers a query, in one batch, in the order given.

    Args:
        query, documents: texts, pictures or mappings, as for `embeddings`.
        instruction: what a good document is.
        chat_template: Jinja source instead of the checkpoint's own.

    The score is the probability of "yes" where only "yes" and "no" can follow.

    Raises:
        ConfigError: a vocabulary in which "yes" and "no" begin with the same token.
        InputError: a query of another form and, as the first job is asked for, a document of another form or a checkpoint
            without a chat template.
    """
    check("instruction", instruction, str)
    check("chat_template", chat_template, str, type(None))
    asked = [
        _text(f"<Instruct>: {instruction}"),
        _text("<Query>:"),
        *(_parts(query) or [_text("NULL")]),
        _text("\n<Document>:"),
    ]
    pooling = Pooling(_verdicts(llm))
    return [_score(llm, asked, document, pooling, _template(chat_template)) for document in _listed(documents)]


def _score(
    llm: LLM, asked: Sequence[Mapping[str, Any]], document: object, pooling: Pooling, template: Mapping[str, Any]
) -> Asking[Score]:
    chat = [_message("system", JUDGE), _message("user", [*asked, *(_parts(document) or [_text("NULL")])])]
    output = yield _pooled(llm, chat, pooling, template)
    return Score(_probability(output.pooled), output.error, output)


def _pooled(llm: LLM, prompt: object, pooling: Pooling, template: Mapping[str, Any]) -> Job:
    """What the last rows of a prompt or a conversation give, instead of an answer."""
    return replace(llm.job(prompt, _UNANSWERED, **template), pooling=pooling)


def _listed(inputs: object) -> Sequence[object]:
    several = isinstance(inputs, list | tuple) or (not isinstance(inputs, str | Mapping) and is_several("image", inputs))
    return list(inputs) if several else [inputs]  # type: ignore[call-overload]


def _template(given: str | None) -> dict[str, Any]:
    """What goes beside messages; nothing beside prompts that are rendered already."""
    return {} if given is None else {"chat_template": given}


def _is_ready(given: object) -> bool:
    return isinstance(given, Mapping) and any(key in given for key in _READY)


def _parts(given: object) -> list[dict[str, Any]]:
    """Content parts of one input: media first, as the published models are trained; none for an empty one."""
    if not isinstance(given, Mapping):
        given = {"text": given} if isinstance(given, str) else {"image": given}
    for key in given:
        if key not in ("text", *_MEDIA):
            raise InputError(f"an input has no {str(key)[:40]!r}; known are text, {', '.join(_MEDIA)}")
    media = [(name, one) for name in _MEDIA if given.get(name) is not None for one in _each(name, given[name])]
    return [media_part(name, one) for name, one in media] + [_text(one) for one in _each("text", given.get("text"))]


def _each(modality: str, value: object) -> Sequence[Any]:
    if value is None or value == "":
        return []
    return list(value) if not isinstance(value, str) and is_several(modality, value) else [value]  # type: ignore[call-overload]


def _text(text: object) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _message(role: str, content: object) -> dict[str, Any]:
    return {"role": role, "content": content if isinstance(content, list) else [_text(content)]}


def _verdicts(llm: LLM) -> tuple[int, ...]:
    """The tokens that "yes" and "no" begin with: in the published vocabularies each is one."""
    yes, no = (llm.get_tokenizer().encode(word, add_special_tokens=False)[:1] for word in ("yes", "no"))
    if not yes or not no or yes == no:
        raise ConfigError('"yes" and "no" begin alike in this vocabulary; scores are the probability of one against the other')
    return (*yes, *no)


def _shortened(vector: Tensor | None, dimensions: int | None) -> Tensor | None:
    if vector is None or dimensions is None:
        return vector
    return torch.nn.functional.normalize(vector[:dimensions], dim=-1)


def _probability(logits: Tensor | None) -> float | None:
    return None if logits is None else float(torch.sigmoid(logits[0] - logits[1]))
