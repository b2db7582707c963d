"""Embeddings of texts, images and videos, and scores of documents for a query.

Sources: the published usage of Qwen3-VL-Embedding (the last token's hidden state of a conversation is the embedding) and
Qwen3-VL-Reranker (the score is the probability of "yes" against "no" as the next token), and of their text models.
"""

from __future__ import annotations

import logging
import mimetypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.pooling_params import PoolingParams
from ..engine.types import RequestOutput
from ..mm.errors import ConfigError, ErrorInfo, InputError, short_repr, typed
from ..mm.pacing import releasing_gil
from ..mm.parse import is_item_list
from ..mm.plain import builtin_copy, builtin_list, check_classes, reading
from .classify import pair_prompt
from .message_parts import media_part
from .pooling import EmbeddingOutput, PooledResult, ScoringOutput, check_dimensions, failed_request, pooling_request, truncate
from .tasks import Task
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.llm import LLM

_logger = logging.getLogger(__name__)
_MAX_PATH = 1024  # characters; a longer text is no path
EMBED_INSTRUCTION = "Represent the user's input."
SCORE_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
SCORE_SYSTEM_PROMPT = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_MEDIA = ("image", "video", "audio")
_PROMPT_KEYS = ("prompt", "prompt_token_ids")  # an input with one of these keys is an already rendered prompt


@dataclass(frozen=True, repr=False)
class Embedding(PooledResult):
    """The embedding of one input.

    Args:
        vector: float32 `[n]` of length 1, or None if there is an error.
        error: why there is no vector, or None.
        output: the request's output.
    """

    vector: Tensor | None
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)

    @property
    def outputs(self) -> EmbeddingOutput:
        """The vector as a list. Raises InputError if there is an error."""
        return EmbeddingOutput(self._checked(self.vector).tolist())


@dataclass(frozen=True, repr=False)
class Score(PooledResult):
    """Score of one document for a query.

    Args:
        score: from 0 (no answer to the query) to 1, or None if there is an error.
        error: the reason why there is no score, or None.
        output: the request's output.
    """

    score: float | None
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)

    @property
    def outputs(self) -> ScoringOutput:
        """The score. Raises InputError if there is an error."""
        return ScoringOutput(self._checked(self.score))


def embed_tasks(
    llm: LLM,
    inputs: object,
    instruction: str = EMBED_INSTRUCTION,
    dimensions: int | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    pooling_params: PoolingParams | None = None,
    cache_salt: str | None = None,
) -> list[Task[Embedding]]:
    """Return one task per input, in order; they run as one batch. An input that fails gives an Embedding with `error`.

    Args:
        inputs: one input or a list of inputs. An input is a text (any str, even one that looks like a path), an image (Path,
            PIL image, pixels or `Media`), a mapping such as `{"text": ..., "image": ..., "video": ...}`, or a prompt as in
            `generate`, which is used unchanged. Each key of the mapping has one value or a list, and a str for an image or
            video is a path or URL.
        instruction: the system prompt, which says what the embeddings are for. Models of sentence-transformers for text read
            a text without a template; an instruction is put before it, as their `prompt` is.
        dimensions: truncate the vectors to this length and normalise them again, for Matryoshka models (arXiv 2205.13147);
            None keeps the whole vectors.
        chat_template: replaces the checkpoint's, as in `LLM.chat`.
        pooling_params: as in vLLM; its `dimensions` and `normalize` are used.
        cache_salt: requests with different salts share no cache; a prompt in `inputs` has its own.

    Raises:
        InputError: `dimensions` is out of range. The task raises it if the checkpoint has no chat template.
    """
    check_type("instruction", instruction, str)
    check_type("chat_template", chat_template, str, os.PathLike, type(None))
    check_type("pooling_params", pooling_params, PoolingParams, type(None))
    pooling = PoolingParams() if pooling_params is None else replace(pooling_params, token_ids=(), task="embed")
    pooling = pooling if dimensions is None else replace(pooling, dimensions=dimensions)
    check_dimensions(llm, pooling.dimensions)
    template, listed = _request_options(chat_template, cache_salt), _as_list(inputs)
    if path := next((item for item in releasing_gil(listed) if llm.takes_media and _is_path(item)), None):
        _logger.warning(
            "embed: %s is embedded as a text, but a file of this name exists; give a pathlib.Path to embed the file",
            short_repr(path),
        )
    return [_embed_task(llm, item, instruction, pooling, template) for item in listed]


def _embed_task(llm: LLM, item: Any, instruction: str, pooling: PoolingParams, template: dict[str, Any]) -> Task[Embedding]:
    try:
        with reading(item, "inputs", "an input"):
            prompt = item = builtin_copy(item, "inputs", "an input")
            if llm.embeds_text and isinstance(item, str):
                prompt = item if instruction == EMBED_INSTRUCTION else instruction + item
                prompt = {"prompt": prompt, "cache_salt": template.get("cache_salt")}
                template = {name: value for name, value in template.items() if name != "cache_salt"}
            elif _is_prompt(item):
                prompt = {"cache_salt": template.get("cache_salt"), **item}
                template = {name: value for name, value in template.items() if name != "cache_salt"}
            else:
                prompt = [_message("system", instruction), _message("user", _content_parts(item))]
    except InputError as error:
        output = yield failed_request(error)
        return Embedding(None, output.error, output)
    output = yield pooling_request(llm, prompt, pooling, template)
    return Embedding(truncate(output.pooled, pooling.dimensions, pooling.normalize), output.error, output)


def score_tasks(
    llm: LLM,
    query: object,
    documents: object,
    instruction: str = SCORE_INSTRUCTION,
    chat_template: str | os.PathLike[str] | None = None,
    cache_salt: str | None = None,
) -> list[Task[Score]]:
    """Return one task per document, in order; they run as one batch. A document that fails gives a Score with `error`.

    The score is the probability that the next token is "yes" if only "yes" and "no" are allowed. In a classification
    checkpoint (cross-encoder), the head scores query and document as a pair of texts, without instruction and template.

    Args:
        query: a text, image or mapping, as for `embed_tasks`; a list has one query for each document.
        documents: one document or a list of documents, in the same forms.
        instruction: the criterion by which documents are judged.
        chat_template: replaces the checkpoint's, as in `LLM.chat`.
        cache_salt: requests with different salts share no cache.

    Raises:
        ConfigError: "yes" and "no" begin with the same token in this vocabulary.
        InputError: the query has an unsupported form. The task raises it if the checkpoint has no chat template.
    """
    check_type("instruction", instruction, str)
    check_type("chat_template", chat_template, str, os.PathLike, type(None))
    query = builtin_copy(query, "query")
    listed, queries = _as_list(documents), list(query) if isinstance(query, list | tuple) else [query]
    if len(queries) not in (1, len(listed)):
        reason = f"{len(queries)} queries for {len(listed)} documents; give one query, or one for each document"
        raise InputError(reason, param="query")
    if len(queries) == 1:
        queries *= len(listed)
    if llm.num_labels:
        return [_cross_encode_task(llm, *pair, cache_salt) for pair in zip(queries, listed, strict=True)]
    starts = [_query_parts(llm, instruction, one) for one in queries]
    pooling, template = PoolingParams(_yes_no_token_ids(llm)), _request_options(chat_template, cache_salt)
    if not llm.takes_media:
        template["chat_template_kwargs"] = {"enable_thinking": False}
    return [_score_task(llm, start, document, pooling, template) for start, document in zip(starts, listed, strict=True)]


def _cross_encode_task(llm: LLM, query: object, document: object, cache_salt: str | None) -> Task[Score]:
    prompt, pooling = pair_prompt(llm, query, document)
    output = yield pooling_request(llm, {**prompt, "cache_salt": cache_salt}, pooling, {})
    return Score(None if output.pooled is None else float(output.pooled[0]), output.error, output)


def _query_parts(llm: LLM, instruction: str, query: object) -> list[dict[str, Any]]:
    """Return the content parts before a document, as Qwen3-Reranker (text only) or Qwen3-VL-Reranker writes them."""
    parts = _content_parts(query)
    if not llm.takes_media:
        return [_text_part(f"<Instruct>: {instruction}\n<Query>: "), *parts, _text_part("\n<Document>: ")]
    return [_text_part(f"<Instruct>: {instruction}"), _text_part("<Query>:"), *parts, _text_part("\n<Document>:")]


def _score_task(
    llm: LLM, query_parts: Sequence[Mapping[str, Any]], document: object, pooling: PoolingParams, template: dict[str, Any]
) -> Task[Score]:
    try:
        with reading(document, "documents", "a document"):
            content = [*query_parts, *_content_parts(builtin_copy(document, "documents", "a document"))]
    except InputError as error:
        output = yield failed_request(error)
        return Score(None, output.error, output)
    if not llm.takes_media and all(part["type"] == "text" for part in content):
        content = [_text_part("".join(part["text"] for part in content))]
    messages = [_message("system", SCORE_SYSTEM_PROMPT), _message("user", content)]
    output = yield pooling_request(llm, messages, pooling, template)
    return Score(_yes_probability(output.pooled), output.error, output)


def _as_list(inputs: object) -> Sequence[object]:
    check_classes(inputs=inputs)
    if isinstance(inputs, list | tuple):
        return builtin_list(inputs, "inputs")
    several = not isinstance(inputs, str | Mapping) and is_item_list("image", inputs)
    return list(inputs) if several else [inputs]  # type: ignore[call-overload]


def _is_path(item: object) -> bool:
    """Return whether a text is the path of an image or video."""
    if type(item) is not str or len(item) > _MAX_PATH:
        return False
    return str(mimetypes.guess_type(item)[0])[:6] in ("image/", "video/") and os.path.isfile(item)


def _request_options(chat_template: str | os.PathLike[str] | None, cache_salt: str | None) -> dict[str, Any]:
    """Return options of `LLM.request`. None is left out, because rendered prompts take no such options."""
    options = {"chat_template": chat_template, "cache_salt": cache_salt}
    return {name: value for name, value in options.items() if value is not None}


def _is_prompt(item: object) -> bool:
    return isinstance(item, Mapping) and any(key in item for key in _PROMPT_KEYS)


def _content_parts(item: object) -> list[dict[str, Any]]:
    """Return the content parts of one input, media first as the published models are trained."""
    if item is None or isinstance(item, int | float):
        raise InputError(f"an input is {typed(item)}; give a text, an image or a mapping with text, image, video or audio")
    if not isinstance(item, Mapping):
        item = {"text": item} if isinstance(item, str) else {"image": item}
    for key in item:
        if key not in ("text", *_MEDIA):
            raise InputError(f"an input has no key {short_repr(key)}; its keys are text, {', '.join(_MEDIA)}")
    media = [media_part(name, value) for name in _MEDIA for value in _values(name, item.get(name))]
    parts = media + [_text_part(text) for text in _values("text", item.get("text")) if text != ""]
    if not parts:
        raise InputError("an input is empty; give a text, an image or a mapping with text, image, video or audio")
    return parts


def _values(key: str, value: object) -> Sequence[Any]:
    if value is None or (isinstance(value, str) and not value):
        return []
    return list(value) if not isinstance(value, str) and is_item_list(key, value) else [value]  # type: ignore[call-overload]


def _text_part(text: object) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _message(role: str, content: object) -> dict[str, Any]:
    return {"role": role, "content": content if isinstance(content, list) else [_text_part(content)]}


def _yes_no_token_ids(llm: LLM) -> tuple[int, ...]:
    """Return the first tokens of "yes" and "no"; in the published vocabularies each word is one token."""
    yes, no = (llm.get_tokenizer().encode(word, add_special_tokens=False)[:1] for word in ("yes", "no"))
    if not yes or not no or yes == no:
        raise ConfigError('"yes" and "no" begin with the same token in this vocabulary; scores need a model where they differ')
    return (*yes, *no)


def _yes_probability(logits: Tensor | None) -> float | None:
    """Return the probability of "yes" from the logits of "yes" and "no", `[2]`."""
    return None if logits is None else float(torch.sigmoid(logits[0] - logits[1]))
