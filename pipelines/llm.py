"""`LLM` and `AsyncLLM` as the package gives them: the engine's, with what is built from their requests. Knows no model."""

from __future__ import annotations

from typing import Any

from ..engine import async_llm, llm
from .asking import gathered, results
from .ocr import Page, pages
from .rank import Embedding, Score, embeddings, scores
from .transcribe import Transcript, transcripts
from .wishes import known


class LLM(llm.LLM):
    __doc__ = llm.LLM.__doc__

    def transcribe(
        self, sounds: object, language: str | None = None, task: str = "transcribe", use_tqdm: bool = True, **options: Any
    ) -> list[Transcript]:
        """What is said in one sound or in each of a list; arguments are those of `pipelines.transcribe.transcripts`."""
        return results(self, transcripts(self, sounds, language, task, **known(transcripts, options)), use_tqdm)

    def embed(self, inputs: object, use_tqdm: bool = True, **options: Any) -> list[Embedding]:
        """A vector for one text, picture or clip, or for each of a list; arguments are those of `pipelines.rank.embeddings`."""
        return results(self, embeddings(self, inputs, **known(embeddings, options)), use_tqdm)

    def score(self, query: object, documents: object, use_tqdm: bool = True, **options: Any) -> list[Score]:
        """How well documents answer a query, with pictures on either side; arguments are those of `pipelines.rank.scores`."""
        return results(self, scores(self, query, documents, **known(scores, options)), use_tqdm)

    def ocr(self, pictures: object, use_tqdm: bool = True, **options: Any) -> list[Page]:
        """What is written in one picture or in each of a list; arguments are those of `pipelines.ocr.pages`."""
        return results(self, pages(self, pictures, **known(pages, options)), use_tqdm)


class AsyncLLM(async_llm.AsyncLLM):
    __doc__ = async_llm.AsyncLLM.__doc__

    async def transcribe(
        self, sounds: object, language: str | None = None, task: str = "transcribe", **options: Any
    ) -> list[Transcript]:
        """As `LLM.transcribe`; cancelling ends what is left, as in all of these."""
        return await gathered(self, transcripts(self.llm, sounds, language, task, **known(transcripts, options)))

    async def embed(self, inputs: object, **options: Any) -> list[Embedding]:
        """As `LLM.embed`."""
        return await gathered(self, embeddings(self.llm, inputs, **known(embeddings, options)))

    async def score(self, query: object, documents: object, **options: Any) -> list[Score]:
        """As `LLM.score`."""
        return await gathered(self, scores(self.llm, query, documents, **known(scores, options)))

    async def ocr(self, pictures: object, **options: Any) -> list[Page]:
        """As `LLM.ocr`."""
        return await gathered(self, pages(self.llm, pictures, **known(pages, options)))
