"""Embeddings of texts, images and videos, and scores of documents for a query.

Sources: the published usage of Qwen3-VL-Embedding (the last token's hidden state of a conversation is the embedding) and
Qwen3-VL-Reranker (the score is the probability of "yes" against "no" as the next token), and of their text models.
"""

from __future__ import annotations

import logging
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
from ..mm.parse import is_item_list, modality_of_path
from ..mm.plain import builtin_copy, builtin_list, check_classes, reading
from .classify import pair_prompt
from .message_parts import media_part
from .pooling import EmbeddingOutput, PooledResult, ScoringOutput, check_dimensions, failed_request, pooling_request, truncate
from .tasks import Task
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.llm import LLM

_logger = logging.getLogger(__name__)
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
        vector: float32 `[n]` of length 1, `[tokens, n]` with the pooling "tokens", or None if there is an error.
        error: why there is no vector, or None.
        output: the request's output.
    """

    vector: Tensor | None
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)

    @property
    def outputs(self) -> EmbeddingOutput:
        """The vector or vectors as a list. Raises InputError if there is an error."""
        return EmbeddingOutput(self._checked(self.vector).tolist())


@dataclass(frozen=True, repr=False)
class Score(PooledResult):
    """Score of one document for a query.

    Args:
        score: from 0 (no answer to the query) to 1, for models without a head as `score_tasks` says; None if there is an error.
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
    pooling: str | None = None,
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
        pooling_params: as in vLLM; its `dimensions`, `normalize` and `pooling` are used, and the task "token_embed".
        cache_salt: requests with different salts share no cache; a prompt in `inputs` has its own.
        pooling: "last", "cls" or "mean" for one vector, "tokens" for a vector of each token; None: as the checkpoint says.

    Raises:
        InputError: `dimensions` is out of range. The task raises it if the checkpoint has no chat template.
    """
    check_type("instruction", instruction, str)
    check_type("chat_template", chat_template, str, os.PathLike, type(None))
    check_type("pooling_params", pooling_params, PoolingParams, type(None))
    params = PoolingParams() if pooling_params is None else replace(pooling_params, token_ids=(), task="embed")
    if pooling is not None and params.pooling not in (None, pooling):
        reason = (
            f"pooling={short_repr(pooling)} and pooling_params with pooling={short_repr(params.pooling)} contradict each other"
        )
        raise InputError(f"{reason}; leave one out", param="pooling")
    params = params if dimensions is None else replace(params, dimensions=dimensions)
    params = params if pooling is None else replace(params, pooling=pooling)
    check_dimensions(llm, params)
    template, listed = _request_options(chat_template, cache_salt), _as_list(inputs)
    if path := next((item for item in releasing_gil(listed) if llm.takes_media and modality_of_path(item)), None):
        _logger.warning(
            "embed: %s is embedded as a text, but a file of this name exists; give a pathlib.Path to embed the file",
            short_repr(path),
        )
    return [_embed_task(llm, item, instruction, params, template) for item in listed]


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
                plain = not llm.takes_instruction and instruction == EMBED_INSTRUCTION
                prompt = [*([] if plain else [_message("system", instruction)]), _message("user", _content_parts(item))]
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
) -> tuple[list[Task[Embedding]], list[Task[Score]]]:
    """Return tasks of the queries, which have to run first, and one task per document, in order; these run as one batch.

    A document that fails gives a Score with `error`. Only models that compare vectors have tasks of queries.

    The score is the probability that the next token is "yes" if only "yes" and "no" are allowed. In a classification
    checkpoint (cross-encoder), the head scores query and document as a pair of texts, without instruction and template.
    A late-interaction model embeds both, and the score is MaxSim: for each token of the query the largest product with a
    token of the document, summed. For other models without a head it is the cosine of the two vectors, and for SigLIP the
    probability that text and image belong together. CLIP's probabilities of several texts for one image are the softmax of
    `llm.logit_scale` times the scores.

    Args:
        query: a text, image or mapping, as for `embed_tasks`; a list has one query for each document.
        documents: one document or a list of documents, in the same forms.
        instruction: the criterion by which documents are judged; the query's, if vectors are compared.
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
    if llm.num_labels and llm.takes_media:
        template = _request_options(chat_template, cache_salt)
        return [], [_rerank_task(llm, *pair, template) for pair in zip(queries, listed, strict=True)]
    if llm.num_labels:
        return [], [_cross_encode_task(llm, *pair, cache_salt) for pair in zip(queries, listed, strict=True)]
    if llm.pooling == "tokens" or not llm.can_generate:
        return _similarity_tasks(llm, queries, listed, instruction, _request_options(chat_template, cache_salt))
    starts = [_query_parts(llm, instruction, one) for one in queries]
    pooling, template = PoolingParams(_yes_no_token_ids(llm)), _request_options(chat_template, cache_salt)
    if not llm.takes_media:
        template["chat_template_kwargs"] = {"enable_thinking": False}
    return [], [_score_task(llm, start, document, pooling, template) for start, document in zip(starts, listed, strict=True)]


def _similarity_tasks(
    llm: LLM, queries: Sequence[Any], documents: Sequence[Any], instruction: str, template: dict[str, Any]
) -> tuple[list[Task[Embedding]], list[Task[Score]]]:
    """Return tasks that embed each distinct query once, and tasks that compare documents with these vectors."""
    instruction = EMBED_INSTRUCTION if instruction == SCORE_INSTRUCTION else instruction
    keys = [query if isinstance(query, str) else id(query) for query in queries]
    found = dict[str | int, Embedding]()
    distinct = dict(zip(keys, queries, strict=True))
    for query in distinct.values():
        _content_parts(query)
    return (
        [_query_task(llm, query, instruction, template, found, key) for key, query in distinct.items()],
        [_similarity_task(llm, key, document, template, found) for key, document in zip(keys, documents, strict=True)],
    )


def _query_task(
    llm: LLM, query: Any, instruction: str, template: dict[str, Any], found: dict[str | int, Embedding], key: str | int
) -> Task[Embedding]:
    found[key] = yield from _embed_task(llm, query, instruction, PoolingParams(), template)
    return found[key]


def _similarity_task(
    llm: LLM, key: str | int, document: Any, template: dict[str, Any], found: Mapping[str | int, Embedding]
) -> Task[Score]:
    query = found[key]
    if query.vector is None:
        return Score(None, query.error, query.output)
    is_text = isinstance(document, str) or (isinstance(document, Mapping) and not {*document} & {*_MEDIA})
    own_instruction = llm.document_instruction if is_text else None
    embedded = yield from _embed_task(llm, document, own_instruction or EMBED_INSTRUCTION, PoolingParams(), template)
    if embedded.vector is None:
        return Score(None, embedded.error, embedded.output)
    score = similarity(query.vector, embedded.vector)
    if llm.logit_scale is not None and llm.logit_bias is not None:
        score = sigmoid(llm.logit_scale * score + llm.logit_bias)
    return Score(score, None, embedded.output)


def similarity(query: Tensor, document: Tensor) -> float:
    """Return the product of two vectors `[n]`, or MaxSim of `[query tokens, n]` and `[document tokens, n]`."""
    return float((torch.atleast_2d(query) @ torch.atleast_2d(document).mT).amax(-1).sum())


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)). `math.exp` would overflow for large negative logits."""
    return float(torch.tensor(logit, dtype=torch.float64).sigmoid())


def _cross_encode_task(llm: LLM, query: object, document: object, cache_salt: str | None) -> Task[Score]:
    prompt, pooling = pair_prompt(llm, query, document)
    output = yield pooling_request(llm, {**prompt, "cache_salt": cache_salt}, pooling, {})
    return Score(None if output.pooled is None else float(output.pooled[0]), output.error, output)


def _rerank_task(llm: LLM, query: object, document: object, template: dict[str, Any]) -> Task[Score]:
    """Score a pair with the classification head of a model that takes images; its template writes a document and a query."""
    try:
        with reading(document, "documents", "a document"):
            pair = builtin_copy(document, "documents", "a document"), query
            prompt = [_message("user", _content_parts(item)) for item in pair]
    except InputError as error:
        output = yield failed_request(error)
        return Score(None, output.error, output)
    output = yield pooling_request(llm, prompt, PoolingParams(task="score"), template)
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
