"""`LLM` and `AsyncLLM` as the package exports them: the engine's classes with the pipelines as methods."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Unpack, cast

from ..callers.errors import InputError
from ..engine import async_llm, llm
from ..engine.frontend.arguments import Messages, as_prompts
from ..engine.pooling_params import PoolingParams
from ..engine.progress import ShowProgress
from ..engine.sampling_params import SamplingParams
from .run import Task, in_thread, run_all, run_all_async, run_async
from .validation import read_options
from .with_adapter import one_adapter, take_adapters, with_adapters

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from .beam_search import BeamSearchOutput, BeamSearchParams
    from .classify import ClassificationRequestOutput
    from .documents.api import PageDone
    from .documents.blocks import Document
    from .embed import Embedding
    from .ocr import Page
    from .option_types import (
        AdapterKeywords,
        EmbedKeywords,
        LiveKeywords,
        OcrKeywords,
        ReadKeywords,
        ScoreKeywords,
        SpeakKeywords,
        SpeechTask,
        TranscribeKeywords,
    )
    from .pooling import PoolingRequestOutput
    from .similarity import Score
    from .speak import Speech
    from .speak_text import SpeakTextOptions
    from .speech.live_input import LiveEvent
    from .speech.live_session import LiveAudio
    from .speech.options import FileOptions
    from .transcribe import Transcript

_MAX_DOCUMENTS = 4  # calls of `AsyncLLM.read` that run at a time


@dataclass(frozen=True)
class Metric:
    """One counter of the engine. `engine.stats.EngineStats` documents them."""

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

    def beam_search(
        self, prompts: object, params: BeamSearchParams, **adapters: Unpack[AdapterKeywords]
    ) -> list[BeamSearchOutput]:
        """Return the likeliest answers to each prompt; see `pipelines.beam_search`.

        This method and those below take `adapter` (or `lora_request`): one for all inputs, or one per input, as `generate`.
        """
        from .beam_search import as_sequences, beam_search_tasks

        tasks = with_adapters(self.engine, beam_search_tasks(self.engine, as_prompts(prompts), params), **adapters)
        return [as_sequences(self.engine, output) for output in run_all(self.engine, tasks, False)]

    def encode(
        self,
        prompts: object,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: ShowProgress = True,
        pooling_task: str | None = None,
        **adapters: Unpack[AdapterKeywords],
    ) -> list[PoolingRequestOutput]:
        """Return vectors or logits of prompts, which are used unchanged; see `pipelines.pooling.encode_tasks`."""
        from .pooling import encode_tasks

        tasks = encode_tasks(self.engine, as_prompts(prompts), pooling_params, pooling_task)
        return run_all(self.engine, with_adapters(self.engine, tasks, **adapters), use_tqdm)

    def classify(
        self,
        prompts: object,
        pooling_params: PoolingParams | None = None,
        use_tqdm: ShowProgress = True,
        **adapters: Unpack[AdapterKeywords],
    ) -> list[ClassificationRequestOutput]:
        """Return the class probabilities of prompts; see `pipelines.classify.classify_tasks`."""
        from .classify import classify_tasks

        tasks = classify_tasks(self.engine, as_prompts(prompts), pooling_params)
        return run_all(self.engine, with_adapters(self.engine, tasks, **adapters), use_tqdm)

    def reward(
        self,
        prompts: object,
        pooling_params: PoolingParams | None = None,
        use_tqdm: ShowProgress = True,
        step_token: str | int | None = None,
        **adapters: Unpack[AdapterKeywords],
    ) -> list[PoolingRequestOutput]:
        """Return the rewards of prompts or of their steps; see `pipelines.reward.reward_tasks`."""
        from .reward import reward_tasks

        tasks = reward_tasks(self.engine, as_prompts(prompts), pooling_params, step_token)
        return run_all(self.engine, with_adapters(self.engine, tasks, **adapters), use_tqdm)

    def transcribe(
        self,
        audio: object,
        language: str | None = None,
        task: SpeechTask = "transcribe",
        use_tqdm: ShowProgress = True,
        **options: Unpack[TranscribeKeywords],
    ) -> list[Transcript]:
        """Transcribe one audio item or a list of them; see `pipelines.speech.options.FileOptions` for the options."""
        from .transcribe import transcribe_tasks

        adapters = take_adapters(options)
        tasks = transcribe_tasks(self.engine, audio, file_options(language, task, options))
        return run_all(
            self.engine, with_adapters(self.engine, tasks, **adapters), use_tqdm, 2 * self.engine.config.max_num_seqs
        )

    def speak(
        self,
        messages: Messages | Sequence[Messages] | str | Sequence[str] | None = None,
        sampling_params: SamplingParams | None = None,
        use_tqdm: ShowProgress = True,
        **options: Unpack[SpeakKeywords],
    ) -> list[Speech]:
        """Answer one conversation or a list of them as text and speech, or speak texts, as the model does.

        See `pipelines.speak.speech_requests` for conversations, and `pipelines.speak_text.SpeakTextOptions` for texts.
        """
        return run_all(self.engine, speech_tasks(self.engine, messages, sampling_params, **options), use_tqdm)

    def stream_speak(
        self,
        messages: Messages | str | None = None,
        sampling_params: SamplingParams | None = None,
        exact: bool = True,
        **options: Unpack[SpeakKeywords],
    ) -> Iterator[Speech]:
        """Yield the speech of one answer or text part by part, of an answer first its text.

        See `pipelines.speak.stream_task` for conversations. A part of a text is a sentence, or several short ones.
        """
        from .speak import stream_task
        from .speak_text import stream_tasks

        if self.engine.voices is not None:
            return self._stream_text(stream_tasks(self.engine, messages, text_options(sampling_params, options)))
        task, speak = stream_task(self.engine, cast(Messages, messages), sampling_params, exact=exact, **options)
        (answer,) = run_all(self.engine, [task], False)
        return speak(answer)

    def _stream_text(self, tasks: Iterator[Task[Speech]]) -> Iterator[Speech]:
        from .speak_text import later

        seconds = 0.0
        for task in tasks:
            (part,) = run_all(self.engine, [task], False)
            yield later(part, seconds)
            if part.error is not None:
                return
            seconds += part.seconds

    def live_audio(self, rate: float | None = None, **options: Unpack[LiveKeywords]) -> LiveAudio:
        """Open a session that transcribes samples while they arrive.

        Args:
            rate: hertz of the samples; None: the model's.
            options: see `pipelines.speech.options.LiveOptions`; and `adapter`, as in `generate`.
        """
        from .speech.live_session import LiveAudio, LiveStream
        from .speech.options import LiveOptions

        adapter = one_adapter(self.engine, **take_adapters(options))
        return LiveAudio(LiveStream(AsyncLLM(self), read_options(LiveOptions, {"rate": rate, **options}), adapter))

    def embed(self, inputs: object, use_tqdm: ShowProgress = True, **options: Unpack[EmbedKeywords]) -> list[Embedding]:
        """Embed one text, image or video, or a list of them; see `pipelines.embed.EmbedOptions` for the options."""
        from .embed import EmbedOptions, embed_tasks

        adapters = take_adapters(options)
        tasks = embed_tasks(self.engine, inputs, read_options(EmbedOptions, options))
        return run_all(self.engine, with_adapters(self.engine, tasks, **adapters), use_tqdm)

    def score(
        self, query: object, documents: object, use_tqdm: ShowProgress = True, **options: Unpack[ScoreKeywords]
    ) -> list[Score]:
        """Score how well documents answer a query; see `pipelines.rank.score_tasks` and `ScoreOptions`.

        One adapter is for all queries and documents.
        """
        queries, tasks = scoring(self.engine, query, documents, options)
        run_all(self.engine, queries, False)
        return run_all(self.engine, tasks, use_tqdm)

    def read(
        self,
        files: object,
        output_dir: str | os.PathLike[str] | None = None,
        output_format: str = "md",
        resume: bool = False,
        use_tqdm: ShowProgress = True,
        **options: Unpack[ReadKeywords],
    ) -> list[Document]:
        """Read documents page by page: a PDF, picture or folder, or a list of them.

        The model reads the pages whose text layer is not enough.

        Args:
            output_dir: folder in which the pages' records are kept, and a file for each document is written.
            output_format: of these files: "md", "json", "txt", "html", "csv", "docling", "hocr", "alto" or "pdf".
            resume: go on with the records in `output_dir`.
            options: see `pipelines.documents.options.ReadOptions`; and `adapter`, one for all pages.
        """
        from .documents.api import ReadJob, read_files
        from .documents.options import OutputOptions, ReadOptions

        adapter = one_adapter(self.engine, **take_adapters(options))
        settings = read_options(ReadOptions, options, "files", "output_dir", "output_format", "resume")
        output = OutputOptions(output_dir, output_format, resume)
        return read_files(self.engine, ReadJob(files, settings, output, adapter), use_tqdm)

    def ocr(self, images: object, use_tqdm: ShowProgress = True, **options: Unpack[OcrKeywords]) -> list[Page]:
        """Read the text of one image, PDF or folder, or a list of them; see `pipelines.ocr.OcrOptions` for the options."""
        from .ocr import OcrOptions, ocr_tasks

        adapters = take_adapters(options)
        tasks = ocr_tasks(self.engine, images, read_options(OcrOptions, options))
        return run_all(self.engine, with_adapters(self.engine, tasks, **adapters), use_tqdm)


class AsyncLLM(async_llm.AsyncLLM):
    __doc__ = async_llm.AsyncLLM.__doc__

    @property
    def llm(self) -> LLM:
        """The synchronous interface of the same engine."""
        return LLM.of(self.engine)

    @cached_property
    def _readers(self) -> ThreadPoolExecutor:
        """Threads that read files: a step of a task may take as long as the decoding of an upload."""
        return ThreadPoolExecutor(thread_name_prefix="sensorium-read")

    @cached_property
    def _documents(self) -> ThreadPoolExecutor:
        """Threads that read documents, one each: a document may take hours, and further ones wait."""
        return ThreadPoolExecutor(_MAX_DOCUMENTS, "sensorium-documents")

    @cached_property
    def _speakers(self) -> ThreadPoolExecutor:
        """Threads that speak: a step may take as long as a spoken answer. There is one for each answer in progress."""
        return ThreadPoolExecutor(self.engine.config.max_num_seqs, "sensorium-speak")

    async def beam_search(
        self, prompts: object, params: BeamSearchParams, **adapters: Unpack[AdapterKeywords]
    ) -> list[BeamSearchOutput]:
        """`LLM.beam_search` as a coroutine.

        Cancelling this or any of the coroutines below aborts its unfinished requests.
        """
        from .beam_search import as_sequences, beam_search_tasks

        tasks = with_adapters(self.engine, beam_search_tasks(self.engine, as_prompts(prompts), params), **adapters)
        return [as_sequences(self.engine, output) for output in await run_all_async(self, tasks)]

    async def transcribe(
        self,
        audio: object,
        language: str | None = None,
        task: SpeechTask = "transcribe",
        priority: int = 0,
        **options: Unpack[TranscribeKeywords],
    ) -> list[Transcript]:
        """`LLM.transcribe` as a coroutine. Requests of smaller priorities are served first."""
        from .transcribe import transcribe_tasks

        adapters = take_adapters(options)
        make_tasks = partial(transcribe_tasks, self.engine, audio, file_options(language, task, options))
        tasks = with_adapters(self.engine, await in_thread(self._readers, make_tasks), **adapters)
        return await run_all_async(self, tasks, 2 * self.engine.config.max_num_seqs, self._readers, priority)

    def stream_transcribe(
        self, samples: AsyncIterable[object], rate: float | None = None, **options: Unpack[LiveKeywords]
    ) -> AsyncGenerator[LiveEvent, None]:
        """Transcribe an async iterator of samples while they arrive, and yield events.

        Closing the generator or cancelling the task aborts the running pass and frees everything.

        Args:
            samples, rate, options: blocks as in `LiveAudio.push`, and the arguments of `LLM.live_audio`.
        """
        from .speech.live_session import stream_events
        from .speech.options import LiveOptions

        adapter = one_adapter(self.engine, **take_adapters(options))
        return stream_events(self, samples, read_options(LiveOptions, {"rate": rate, **options}), adapter)

    async def speak(
        self,
        messages: Messages | Sequence[Messages] | str | Sequence[str] | None = None,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[SpeakKeywords],
    ) -> list[Speech]:
        """`LLM.speak` as a coroutine. The talker runs in a thread."""
        tasks = speech_tasks(self.engine, messages, sampling_params, **options)
        return await run_all_async(self, tasks, self.engine.config.max_num_seqs, self._speakers)

    async def stream_speak(
        self,
        messages: Messages | str | None = None,
        sampling_params: SamplingParams | None = None,
        exact: bool = True,
        **options: Unpack[SpeakKeywords],
    ) -> AsyncGenerator[Speech, None]:
        """`LLM.stream_speak` as an async generator. The talker runs in a thread, and stops when the generator is closed."""
        from .speak import stream_task
        from .speak_text import later, stream_tasks

        if self.engine.voices is not None:
            make = partial(stream_tasks, self.engine, messages, text_options(sampling_params, options))
            seconds = 0.0
            for text_task in await in_thread(self._speakers, make):
                part = await run_async(self, text_task, self._speakers)
                yield later(part, seconds)
                if part.error is not None:
                    return
                seconds += part.seconds
            return
        task, speak = stream_task(self.engine, cast(Messages, messages), sampling_params, exact=exact, **options)
        parts = speak(await run_async(self, task))
        step: Future[Speech | None] = Future()
        step.set_result(None)
        try:
            while True:
                step = self._speakers.submit(partial(copy_context().run, partial(next, parts, None)))
                if (spoken := await asyncio.wrap_future(step)) is None:
                    return
                yield spoken
        finally:
            step.add_done_callback(lambda _: parts.close())  # at once, or when the part that is computed now has ended

    async def embed(self, inputs: object, priority: int = 0, **options: Unpack[EmbedKeywords]) -> list[Embedding]:
        """`LLM.embed` as a coroutine. Requests of smaller priorities are served first."""
        from .embed import EmbedOptions, embed_tasks

        adapters = take_adapters(options)
        tasks = embed_tasks(self.engine, inputs, read_options(EmbedOptions, options))
        return await run_all_async(self, with_adapters(self.engine, tasks, **adapters), priority=priority)

    async def classify(
        self, prompts: object, pooling_params: PoolingParams | None = None, **adapters: Unpack[AdapterKeywords]
    ) -> list[ClassificationRequestOutput]:
        """`LLM.classify` as a coroutine."""
        from .classify import classify_tasks

        tasks = classify_tasks(self.engine, as_prompts(prompts), pooling_params)
        return await run_all_async(self, with_adapters(self.engine, tasks, **adapters))

    async def reward(
        self,
        prompts: object,
        pooling_params: PoolingParams | None = None,
        step_token: str | int | None = None,
        **adapters: Unpack[AdapterKeywords],
    ) -> list[PoolingRequestOutput]:
        """`LLM.reward` as a coroutine."""
        from .reward import reward_tasks

        tasks = reward_tasks(self.engine, as_prompts(prompts), pooling_params, step_token)
        return await run_all_async(self, with_adapters(self.engine, tasks, **adapters))

    async def score(self, query: object, documents: object, **options: Unpack[ScoreKeywords]) -> list[Score]:
        """`LLM.score` as a coroutine."""
        queries, tasks = scoring(self.engine, query, documents, options)
        await run_all_async(self, queries)
        return await run_all_async(self, tasks)

    async def read(
        self,
        files: object,
        output_dir: str | os.PathLike[str] | None = None,
        output_format: str = "md",
        resume: bool = False,
        on_page: Callable[[PageDone], object] | None = None,
        **options: Unpack[ReadKeywords],
    ) -> list[Document]:
        """`LLM.read` as a coroutine. Cancelling it ends within a page or so; a later call with `resume` goes on there.

        Args:
            on_page: called with each page that has been read, in another thread.
        """
        from .documents.api import ReadJob, read_files_async
        from .documents.options import OutputOptions, ReadOptions

        adapter = one_adapter(self.engine, **take_adapters(options))
        settings = read_options(ReadOptions, options, "files", "output_dir", "output_format", "resume", "on_page")
        output = OutputOptions(output_dir, output_format, resume)
        return await read_files_async(self, self._documents, ReadJob(files, settings, output, adapter), on_page)

    async def ocr(self, images: object, **options: Unpack[OcrKeywords]) -> list[Page]:
        """`LLM.ocr` as a coroutine. Folders are listed and PDFs are opened in a thread."""
        from .ocr import OcrOptions, ocr_tasks

        adapters = take_adapters(options)
        make_tasks = partial(ocr_tasks, self.engine, images, read_options(OcrOptions, options))
        return await run_all_async(self, with_adapters(self.engine, await in_thread(self._readers, make_tasks), **adapters))


def speech_tasks(
    engine: Engine, messages: object, sampling_params: SamplingParams | None, **options: Unpack[SpeakKeywords]
) -> list[Task[Speech]]:
    """Return the tasks of `speak`: of texts if the model speaks texts, else of conversations."""
    from .speak import speak_tasks
    from .speak_text import text_tasks

    if engine.voices is not None:
        return text_tasks(engine, messages, text_options(sampling_params, options))
    return speak_tasks(engine, cast(Messages, messages), sampling_params, **options)


def text_options(sampling_params: SamplingParams | None, options: SpeakKeywords) -> SpeakTextOptions:
    """Return the options of texts. Raise InputError for those of conversations."""
    from .speak_text import SpeakTextOptions

    if sampling_params is not None:
        reason = "this model samples nothing; leave <<param>> out, and give a seed as seed"
        raise InputError(reason, code="unsupported", param="sampling_params")
    return read_options(SpeakTextOptions, options, "messages")


def file_options(language: str | None, task: str | None, options: TranscribeKeywords) -> FileOptions:
    from .speech.options import FileOptions

    return read_options(FileOptions, {"language": language, "task": task, **options}, "audio")


def scoring(
    engine: Engine, query: object, documents: object, options: ScoreKeywords
) -> tuple[list[Task[Embedding]], list[Task[Score]]]:
    """Return the tasks of `score`. Raise InputError for several adapters: vectors of different ones cannot be compared."""
    from .rank import ScoreOptions, score_tasks

    adapter = one_adapter(engine, **take_adapters(options))
    queries, tasks = score_tasks(engine, query, documents, read_options(ScoreOptions, options))
    return with_adapters(engine, queries, adapter), with_adapters(engine, tasks, adapter)


AsyncLLMEngine = AsyncLLM  # vLLM's older name
