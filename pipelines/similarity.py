"""Scores of models that embed a query and a document each, and compare the vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..callers.errors import ErrorInfo
from ..engine.outputs import RequestOutput
from .embed import EMBED_INSTRUCTION, MEDIA, Embedding, InputForm, content_parts, embed_item
from .pooling import PooledResult, ScoringOutput
from .run import Task

if TYPE_CHECKING:
    from ..engine.engine import Engine

_DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # names of prompts in sentence-transformers, in their order


@dataclass(frozen=True, repr=False)
class Score(PooledResult):
    """Score of one document for a query.

    Args:
        score: how well the document answers the query. `score_tasks` says what the number means for each kind of model. None if
            there is an error.
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


def similarity_tasks(
    engine: Engine,
    queries: Sequence[Any],
    documents: Sequence[Any],
    instruction: str | None,
    form: InputForm,
) -> tuple[list[Task[Embedding]], list[Task[Score]]]:
    """Return tasks that embed each distinct query once, and tasks that compare documents with these vectors.

    Args:
        instruction: the queries'; None: the checkpoint's prompt for queries, if it has one.
        form: how prompts are cut, and the options of the requests.
    """
    keys = [query if isinstance(query, str) else id(query) for query in queries]
    embeddings = dict[str | int, Embedding]()
    distinct = dict(zip(keys, queries, strict=True))
    for query in distinct.values():
        content_parts(query)
    prompts: Mapping[str, str] = {} if engine.sentence_transformers is None else engine.sentence_transformers.prompts
    instruction = prompts.get("query", EMBED_INSTRUCTION) if instruction is None else instruction
    asked = replace(form, instruction=instruction)
    return (
        [partial(_embed_query, engine, query, asked, embeddings, key) for key, query in distinct.items()],
        [partial(_compare, engine, document, form, embeddings, key) for key, document in zip(keys, documents, strict=True)],
    )


async def _embed_query(
    engine: Engine, query: Any, form: InputForm, embeddings: dict[str | int, Embedding], key: str | int
) -> Embedding:
    embeddings[key] = await embed_item(engine, query, form)
    return embeddings[key]


async def _compare(
    engine: Engine, document: Any, form: InputForm, embeddings: Mapping[str | int, Embedding], key: str | int
) -> Score:
    query = embeddings[key]
    if query.vector is None:
        return Score(None, query.error, query.output)
    is_text = isinstance(document, str) or (isinstance(document, Mapping) and not {*document} & {*MEDIA})
    prompts: Mapping[str, str] = {} if engine.sentence_transformers is None else engine.sentence_transformers.prompts
    named = next((prompts[name] for name in _DOCUMENT_PROMPTS if name in prompts), EMBED_INSTRUCTION)
    instruction = (engine.document_instruction if is_text else None) or named
    embedded = await embed_item(engine, document, replace(form, instruction=instruction))
    if embedded.vector is None:
        return Score(None, embedded.error, embedded.output)
    score = similarity(query.vector, embedded.vector, _measure(engine))
    if engine.info.logit_scale is not None and engine.info.logit_bias is not None:
        score = sigmoid(engine.info.logit_scale * score + engine.info.logit_bias)
    return Score(score, None, embedded.output)


def _measure(engine: Engine) -> str:
    """Return how vectors are compared. The product of vectors of length 1 is their cosine."""
    measure = "dot" if engine.sentence_transformers is None else engine.sentence_transformers.similarity
    return "dot" if measure == "cosine" and engine.info.normalizes else measure


def similarity(query: Tensor, document: Tensor, measure: str = "dot") -> float:
    """Compare two vectors `[n]`, or return MaxSim of `[query tokens, n]` and `[document tokens, n]`.

    Args:
        measure: of two vectors: "dot", "cosine", or the negative distance "euclidean" or "manhattan", as in
            sentence-transformers.
    """
    if query.ndim > 1 or measure == "dot":
        return float((torch.atleast_2d(query) @ torch.atleast_2d(document).mT).amax(-1).sum())
    if measure == "cosine":
        return float(torch.nn.functional.cosine_similarity(query, document, dim=-1))
    return -float(torch.linalg.vector_norm(query - document, ord=2 if measure == "euclidean" else 1))


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)). `math.exp` would overflow for large negative logits."""
    return float(torch.tensor(logit, dtype=torch.float64).sigmoid())
