"""Scores of documents for a query.

Sources: the published usage of Qwen3-VL-Reranker (the score is the probability of "yes" against "no" as the next token) and of
its text models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..callers.errors import ConfigError, InputError
from ..callers.plain import builtin_copy
from ..engine.pooling_params import PoolingParams
from ..mm.columns import column_values
from ..mm.truncation import Truncation
from .classify import pair_prompt
from .embed import Embedding, InputForm, as_inputs, content_parts, message_of, request_options, text_part
from .pooling import failed_request, pooling_request
from .run import Task, answer
from .similarity import Score, similarity_tasks
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.engine import Engine

SCORE_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
SCORE_SYSTEM_PROMPT = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


@dataclass(frozen=True)
class ScoreOptions:
    """Options of `score`.

    Args:
        instruction: the criterion by which documents are judged; the query's, if vectors are compared.
        chat_template: replaces the checkpoint's, as in `LLM.chat`.
        cache_salt: requests with different salts share no cache.
        truncate_prompt_tokens, truncation_side: as in PoolingParams, for each prompt: a pair with its template, or each text
            whose vector is compared. Of a pair that a tokenizer joins, tokens of the longer text are left out first, also
            without them for checkpoints that sentence-transformers saved.

    Raises:
        InputError: an option has a wrong type or value.
    """

    instruction: str = SCORE_INSTRUCTION
    chat_template: str | os.PathLike[str] | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    def __post_init__(self) -> None:
        check_type("instruction", self.instruction, str)
        check_type("chat_template", self.chat_template, str, os.PathLike, type(None))


def score_tasks(
    engine: Engine, query: object, documents: object, options: ScoreOptions
) -> tuple[list[Task[Embedding]], list[Task[Score]]]:
    """Return tasks of the queries, which have to run first, and one task per document, in order; these run as one batch.

    A document that fails gives a Score with `error`. Only models that compare vectors have tasks of queries.

    The score is the probability that the next token is "yes" if only "yes" and "no" are allowed. In a classification
    checkpoint (cross-encoder), the head scores query and document as a pair of texts, without instruction and template.
    A late-interaction model embeds both, and the score is MaxSim: for each token of the query the largest product with a
    token of the document, summed. For other models without a head it is the cosine of the two vectors, and for SigLIP the
    probability that text and image belong together. Checkpoints of sentence-transformers say how vectors are compared, and
    the prompts "query" and "document" that they may have are put before the texts. CLIP's probabilities of several texts for
    one image are the softmax of `llm.logit_scale` times the scores.

    Args:
        query: a text, image or mapping, as for `embed_tasks`; a list has one query for each document.
        documents: one document or a list of documents, in the same forms.

    Raises:
        ConfigError: "yes" and "no" begin with the same token in this vocabulary.
        InputError: the query has an unsupported form. The task raises it if the checkpoint has no chat template.
    """
    column = column_values(query, "query")
    query = builtin_copy(query if column is None else column, "query")
    query = list(query) if isinstance(query, Iterator) else query
    listed = as_inputs(documents)
    queries = _one_per_document(list(query) if isinstance(query, list | tuple) else [query], len(listed))
    pairs = list(zip(queries, listed, strict=True))
    params = PoolingParams(truncate_prompt_tokens=options.truncate_prompt_tokens, truncation_side=options.truncation_side)
    cut = engine.inputs.text.truncation(options.truncate_prompt_tokens, options.truncation_side)
    form = InputForm(options.instruction, params, request_options(options.chat_template, options.cache_salt))
    if engine.info.num_labels and engine.takes_media:
        form = replace(form, pooling=replace(params, task="score"))
        return [], [partial(_rerank, engine, *pair, form) for pair in pairs]
    if engine.info.num_labels:
        cut = engine.inputs.text.truncation(-1, options.truncation_side) if cut is None and engine.truncates_pairs else cut
        return [], [partial(_cross_encode, engine, *pair, cut, options.cache_salt) for pair in pairs]
    if engine.info.pooling == "tokens" or not engine.info.can_generate:
        chosen = None if options.instruction == SCORE_INSTRUCTION else options.instruction
        return similarity_tasks(engine, queries, listed, chosen, form)
    form = replace(form, pooling=replace(params, token_ids=_yes_no_token_ids(engine)))
    if not engine.takes_media:
        form = replace(form, request={**form.request, "chat_template_kwargs": {"enable_thinking": False}})
    starts = [_query_parts(engine, options.instruction, query_item) for query_item in queries]
    return [], [partial(_score, engine, start, document, form) for start, document in zip(starts, listed, strict=True)]


def _one_per_document(queries: list[Any], num_documents: int) -> list[Any]:
    if len(queries) not in (1, num_documents):
        reason = f"{len(queries)} queries for {num_documents} documents; give one query, or one for each document"
        raise InputError(reason, param="query")
    return queries * num_documents if len(queries) == 1 else queries


async def _cross_encode(
    engine: Engine, query: object, document: object, cut: Truncation | None, cache_salt: str | None
) -> Score:
    prompt, pooling, truncated = pair_prompt(engine, query, document, cut)
    output = await answer(pooling_request(engine, {**prompt, "cache_salt": cache_salt}, pooling, {}))
    output = replace(output, truncated=truncated)
    return Score(None if output.pooled is None else float(output.pooled[0]), output.error, output)


async def _rerank(engine: Engine, query: object, document: object, form: InputForm) -> Score:
    """Score a pair with the classification head of a model that takes images; its template writes a document and a query."""
    try:
        pair = builtin_copy(document, "documents", "a document"), query
        prompt = [message_of("user", content_parts(item)) for item in pair]
    except InputError as error:
        output = await answer(failed_request(error))
        return Score(None, output.error, output)
    output = await answer(pooling_request(engine, prompt, form.pooling, dict(form.request)))
    return Score(None if output.pooled is None else float(output.pooled[0]), output.error, output)


def _query_parts(engine: Engine, instruction: str, query: object) -> list[dict[str, Any]]:
    """Return the content parts before a document, as Qwen3-Reranker (text only) or Qwen3-VL-Reranker writes them."""
    parts = content_parts(query)
    if not engine.takes_media:
        return [text_part(f"<Instruct>: {instruction}\n<Query>: "), *parts, text_part("\n<Document>: ")]
    return [text_part(f"<Instruct>: {instruction}"), text_part("<Query>:"), *parts, text_part("\n<Document>:")]


async def _score(engine: Engine, query_parts: Sequence[Mapping[str, Any]], document: object, form: InputForm) -> Score:
    try:
        content = [*query_parts, *content_parts(builtin_copy(document, "documents", "a document"))]
    except InputError as error:
        output = await answer(failed_request(error))
        return Score(None, output.error, output)
    if not engine.takes_media and all(part["type"] == "text" for part in content):
        content = [text_part("".join(part["text"] for part in content))]
    messages = [message_of("system", SCORE_SYSTEM_PROMPT), message_of("user", content)]
    output = await answer(pooling_request(engine, messages, form.pooling, dict(form.request)))
    return Score(_yes_probability(output.pooled), output.error, output)


def _yes_no_token_ids(engine: Engine) -> tuple[int, ...]:
    """Return the first tokens of "yes" and "no"; in the published vocabularies each word is one token."""
    yes, no = (engine.tokenizer.encode(word, add_special_tokens=False)[:1] for word in ("yes", "no"))
    if not yes or not no or yes == no:
        raise ConfigError('"yes" and "no" begin with the same token in this vocabulary; scores need a model where they differ')
    return (*yes, *no)


def _yes_probability(logits: Tensor | None) -> float | None:
    """Return the probability of "yes" from the logits of "yes" and "no", `[2]`."""
    return None if logits is None else float(torch.sigmoid(logits[0] - logits[1]))
