"""`LLM` and `AsyncLLM` as the package exports them: the engine's classes with the pipelines as methods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

from ..engine import async_llm, llm
from ..engine.frontend.arguments import Messages, as_prompts
from ..engine.pooling_params import PoolingParams
from ..engine.progress import ShowProgress
from ..engine.sampling_params import SamplingParams
from .beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from .classify import ClassificationRequestOutput, classify_tasks
from .ocr import Page, ocr_tasks
from .pooling import PoolingRequestOutput, encode_tasks
from .rank import Embedding, Score, embed_tasks, score_tasks
from .reward import reward_tasks
from .speak import Speech, speak_tasks, stream_task
from .speech.live_input import LiveEvent
from .speech.live_session import LiveAudio, LiveStream, stream_events
from .tasks import run_tasks, run_tasks_async
from .transcribe import Transcript, transcribe_tasks
from .validation import check_names


@dataclass(frozen=True)
class Metric:
    """One counter of the engine. `engine.types.EngineStats` documents them."""

    name: str
    value: int


class LLM(llm.LLM):
    __doc__ = llm.LLM.__doc__

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the parameters of requests that give none."""
        return self.default_params.clone()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counters. `stats` holds the same as one object."""
        return [Metric(f"sensorium:{name}", value) for name, value in asdict(self.stats).items()]

    def beam_search(self, prompts: object, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Return the likeliest answers to each prompt; see `pipelines.beam_search`."""
        return beam_search(self, as_prompts(prompts), params)

    def encode(
        self,
        prompts: object,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: ShowProgress = True,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return vectors or logits of prompts, which are used unchanged; see `pipelines.pooling.encode_tasks`."""
        return run_tasks(self, encode_tasks(self, as_prompts(prompts), pooling_params, pooling_task), use_tqdm)

    def classify(
        self, prompts: object, pooling_params: PoolingParams | None = None, use_tqdm: ShowProgress = True
    ) -> list[ClassificationRequestOutput]:
        """Return the class probabilities of prompts; see `pipelines.classify.classify_tasks`."""
        return run_tasks(self, classify_tasks(self, as_prompts(prompts), pooling_params), use_tqdm)

    def reward(
        self,
        prompts: object,
        pooling_params: PoolingParams | None = None,
        use_tqdm: ShowProgress = True,
        step_token: str | int | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the rewards of prompts or of their steps; see `pipelines.reward.reward_tasks`."""
        return run_tasks(self, reward_tasks(self, as_prompts(prompts), pooling_params, step_token), use_tqdm)

    def transcribe(
        self,
        audio: object,
        language: str | None = None,
        task: str = "transcribe",
        use_tqdm: ShowProgress = True,
        **options: Any,
    ) -> list[Transcript]:
        """Transcribe one audio item or a list of them; see `pipelines.transcribe.transcribe_tasks` for the arguments."""
        tasks = transcribe_tasks(self, audio, language, task, **check_names(transcribe_tasks, options))
        return run_tasks(self, tasks, use_tqdm, 2 * self.config.max_num_seqs)

    def speak(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | None = None,
        use_tqdm: ShowProgress = True,
        **options: Any,
    ) -> list[Speech]:
        """Answer one conversation or a list of them as text and speech; see `pipelines.speak.speech_requests`."""
        return run_tasks(self, speak_tasks(self, messages, sampling_params, **options), use_tqdm)

    def stream_speak(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Speech]:
        """Answer one conversation as text, then yield its speech part by part; see `pipelines.speak.stream_task`."""
        task, speak = stream_task(self, messages, sampling_params, **options)
        (answer,) = run_tasks(self, [task], False)
        return speak(answer)

    def live_audio(self, rate: float | None = None, **options: Any) -> LiveAudio:
        """Open a session that transcribes samples while they arrive.

        Args:
            rate: hertz of the samples; None: the model's.
            options: see `pipelines.speech.live.LiveTranscriber`, and idle_timeout and max_sessions of `LiveStream`.
        """
        return LiveAudio(LiveStream(AsyncLLM(self), rate=rate, **options))

    def embed(self, inputs: object, use_tqdm: ShowProgress = True, **options: Any) -> list[Embedding]:
        """Embed one text, image or video, or a list of them; see `pipelines.rank.embed_tasks` for the arguments."""
        return run_tasks(self, embed_tasks(self, inputs, **check_names(embed_tasks, options)), use_tqdm)

    def score(self, query: object, documents: object, use_tqdm: ShowProgress = True, **options: Any) -> list[Score]:
        """Score how well documents answer a query; see `pipelines.rank.score_tasks` for the arguments."""
        queries, tasks = score_tasks(self, query, documents, **check_names(score_tasks, options))
        run_tasks(self, queries, False)
        return run_tasks(self, tasks, use_tqdm)

    def ocr(self, images: object, use_tqdm: ShowProgress = True, **options: Any) -> list[Page]:
        """Read the text of one image or a list of images; see `pipelines.ocr.ocr_tasks` for the arguments."""
        return run_tasks(self, ocr_tasks(self, images, **check_names(ocr_tasks, options)), use_tqdm)


class AsyncLLM(async_llm.AsyncLLM):
    __doc__ = async_llm.AsyncLLM.__doc__

    @cached_property
    def _readers(self) -> ThreadPoolExecutor:
        """Threads that read files: a step of a task may take as long as the decoding of an upload."""
        return ThreadPoolExecutor(thread_name_prefix="sensorium-read")

    @cached_property
    def _speakers(self) -> ThreadPoolExecutor:
        """Threads that speak: a step may take as long as a spoken answer. There is one for each answer in progress."""
        return ThreadPoolExecutor(self.llm.config.max_num_seqs, "sensorium-speak")

    async def transcribe(
        self, audio: object, language: str | None = None, task: str = "transcribe", **options: Any
    ) -> list[Transcript]:
        """`LLM.transcribe` as a coroutine. Cancelling this or any of the coroutines below aborts its unfinished requests."""
        tasks = transcribe_tasks(self.llm, audio, language, task, **check_names(transcribe_tasks, options))
        return await run_tasks_async(self, tasks, 2 * self.llm.config.max_num_seqs, self._readers)

    def stream_transcribe(
        self, samples: AsyncIterable[object], rate: float | None = None, **options: Any
    ) -> AsyncGenerator[LiveEvent, None]:
        """Transcribe an async iterator of samples while they arrive, and yield events.

        Closing the generator or cancelling the task aborts the running pass and frees everything.

        Args:
            samples, rate, options: blocks as in `LiveAudio.push`, and the arguments of `LLM.live_audio`.
        """
        return stream_events(self, samples, {"rate": rate, **options})

    async def speak(
        self, messages: Messages | Sequence[Messages], sampling_params: SamplingParams | None = None, **options: Any
    ) -> list[Speech]:
        """`LLM.speak` as a coroutine. The talker runs in a thread."""
        tasks = speak_tasks(self.llm, messages, sampling_params, **options)
        return await run_tasks_async(self, tasks, self.llm.config.max_num_seqs, self._speakers)

    async def stream_speak(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Speech, None]:
        """`LLM.stream_speak` as an async generator. The talker runs in a thread, and stops when the generator is closed."""
        task, speak = stream_task(self.llm, messages, sampling_params, **options)
        (answer,) = await run_tasks_async(self, [task])
        parts = speak(answer)
        step = Future[Speech | None]()
        step.set_result(None)
        try:
            while True:
                step = self._speakers.submit(partial(copy_context().run, partial(next, parts, None)))
                if (part := await asyncio.wrap_future(step)) is None:
                    return
                yield part
        finally:
            step.add_done_callback(lambda _: parts.close())  # at once, or when the part that is computed now has ended

    async def embed(self, inputs: object, priority: int = 0, **options: Any) -> list[Embedding]:
        """`LLM.embed` as a coroutine. Requests of smaller priorities are served first."""
        tasks = embed_tasks(self.llm, inputs, **check_names(embed_tasks, options))
        return await run_tasks_async(self, tasks, priority=priority)

    async def classify(self, prompts: object, pooling_params: PoolingParams | None = None) -> list[ClassificationRequestOutput]:
        """`LLM.classify` as a coroutine."""
        return await run_tasks_async(self, classify_tasks(self.llm, as_prompts(prompts), pooling_params))

    async def reward(
        self, prompts: object, pooling_params: PoolingParams | None = None, step_token: str | int | None = None
    ) -> list[PoolingRequestOutput]:
        """`LLM.reward` as a coroutine."""
        return await run_tasks_async(self, reward_tasks(self.llm, as_prompts(prompts), pooling_params, step_token))

    async def score(self, query: object, documents: object, **options: Any) -> list[Score]:
        """`LLM.score` as a coroutine."""
        queries, tasks = score_tasks(self.llm, query, documents, **check_names(score_tasks, options))
        await run_tasks_async(self, queries)
        return await run_tasks_async(self, tasks)

    async def ocr(self, images: object, **options: Any) -> list[Page]:
        """`LLM.ocr` as a coroutine."""
        return await run_tasks_async(self, ocr_tasks(self.llm, images, **check_names(ocr_tasks, options)))


AsyncLLMEngine = AsyncLLM  # vLLM's older name
