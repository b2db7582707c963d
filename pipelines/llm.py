"""`LLM` as the package gives it: the engine's, with what is built from its requests. Knows no model."""

from __future__ import annotations

from typing import Any

from ..engine import llm
from .ocr import Page, read_pictures
from .rank import Embedding, Score, embed, score
from .transcribe import Transcript, transcribe


class LLM(llm.LLM):
    __doc__ = llm.LLM.__doc__

    def transcribe(
        self, sounds: object, language: str | None = None, task: str = "transcribe", **options: Any
    ) -> list[Transcript]:
        """What is said in one sound or in each of a list; arguments are those of `pipelines.transcribe.transcribe`."""
        return transcribe(self, sounds, language, task, **options)

    def embed(self, inputs: object, **options: Any) -> list[Embedding]:
        """A vector for one text, picture or clip, or for each of a list; arguments are those of `pipelines.rank.embed`."""
        return embed(self, inputs, **options)

    def score(self, query: object, documents: object, **options: Any) -> list[Score]:
        """How well documents answer a query, with pictures on either side; arguments are those of `pipelines.rank.score`."""
        return score(self, query, documents, **options)

    def ocr(self, pictures: object, **options: Any) -> list[Page]:
        """What is written in one picture or in each of a list; arguments are those of `pipelines.ocr.read_pictures`."""
        return read_pictures(self, pictures, **options)
