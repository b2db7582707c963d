"""`LLM` and `AsyncLLM` as the package exports them: the engine's classes with the pipelines as methods."""

from __future__ import annotations

from typing import Any

from ..engine import async_llm, llm
from .ocr import Page, ocr_tasks
from .rank import Embedding, Score, embed_tasks, score_tasks
from .tasks import run_tasks, run_tasks_async
from .transcribe import Transcript, transcribe_tasks
from .validation import check_names


class LLM(llm.LLM):
    __doc__ = llm.LLM.__doc__

    def transcribe(
        self, audio: object, language: str | None = None, task: str = "transcribe", use_tqdm: bool = True, **options: Any
    ) -> list[Transcript]:
        """Transcribe one audio item or a list of them; see `pipelines.transcribe.transcribe_tasks` for the arguments."""
        return run_tasks(
            self, transcribe_tasks(self, audio, language, task, **check_names(transcribe_tasks, options)), use_tqdm
        )

    def embed(self, inputs: object, use_tqdm: bool = True, **options: Any) -> list[Embedding]:
        """Embed one text, image or video, or a list of them; see `pipelines.rank.embed_tasks` for the arguments."""
        return run_tasks(self, embed_tasks(self, inputs, **check_names(embed_tasks, options)), use_tqdm)

    def score(self, query: object, documents: object, use_tqdm: bool = True, **options: Any) -> list[Score]:
        """Score how well documents answer a query; see `pipelines.rank.score_tasks` for the arguments."""
        return run_tasks(self, score_tasks(self, query, documents, **check_names(score_tasks, options)), use_tqdm)

    def ocr(self, images: object, use_tqdm: bool = True, **options: Any) -> list[Page]:
        """Read the text of one image or a list of images; see `pipelines.ocr.ocr_tasks` for the arguments."""
        return run_tasks(self, ocr_tasks(self, images, **check_names(ocr_tasks, options)), use_tqdm)


class AsyncLLM(async_llm.AsyncLLM):
    __doc__ = async_llm.AsyncLLM.__doc__

    async def transcribe(
        self, audio: object, language: str | None = None, task: str = "transcribe", **options: Any
    ) -> list[Transcript]:
        """`LLM.transcribe` as a coroutine. Cancelling this or any of the coroutines below aborts its unfinished requests."""
        return await run_tasks_async(
            self, transcribe_tasks(self.llm, audio, language, task, **check_names(transcribe_tasks, options))
        )

    async def embed(self, inputs: object, **options: Any) -> list[Embedding]:
        """`LLM.embed` as a coroutine."""
        return await run_tasks_async(self, embed_tasks(self.llm, inputs, **check_names(embed_tasks, options)))

    async def score(self, query: object, documents: object, **options: Any) -> list[Score]:
        """`LLM.score` as a coroutine."""
        return await run_tasks_async(self, score_tasks(self.llm, query, documents, **check_names(score_tasks, options)))

    async def ocr(self, images: object, **options: Any) -> list[Page]:
        """`LLM.ocr` as a coroutine."""
        return await run_tasks_async(self, ocr_tasks(self.llm, images, **check_names(ocr_tasks, options)))
