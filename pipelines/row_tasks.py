"""Tasks on the rows of a table: each row has its own result or error, and a checkpoint keeps the results by content."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..callers.errors import ConfigError, EngineDeadError, ErrorInfo, InputError, SensoriumError, hint, short_repr
from ..engine.errors import error_info
from ..engine.sampling_params import SamplingParams
from ..mm.hashing import digest

if TYPE_CHECKING:
    from .llm import AsyncLLM

T = TypeVar("T")
_OF_FILES = ("ocr", "transcribe", "read")  # tasks whose rows may be paths
_ATTEMPTS = 3  # of a row whose engine dies
_MAX_FILE = 1 << 30  # bytes of a file that are hashed; the whole of a larger one would take longer than reading it


@dataclass(frozen=True)
class RowResult:
    """The result of a row: text, or the numbers of a vector; or the error's code and message."""

    output: str | list[float] | None
    error_code: str | None = None
    error: str | None = None


async def _chat(llm: AsyncLLM, value: object, options: Mapping[str, Any]) -> object:
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    params = options.get("sampling_params") or SamplingParams(temperature=0.0, max_tokens=1024)
    others = {name: option for name, option in options.items() if name != "sampling_params"}
    (output,) = [output async for output in llm.generate(messages, params, output_kind="final", **others)]
    return output.error or output.outputs[0].text


def _only(results: Sequence[T]) -> T:
    """Return the result of a row's only input."""
    if len(results) != 1:
        raise InputError(f"a row must have one input, not {len(results)}; give each a row of its own", code="invalid_value")
    return results[0]


async def _ocr(llm: AsyncLLM, value: object, options: Mapping[str, Any]) -> object:
    pages = await llm.ocr(value, **options)
    if not pages:
        raise InputError("a row must have a picture or PDF, not an empty list", code="invalid_value")
    return next((page.error for page in pages if page.error), None) or "\n\n".join(page.text for page in pages)


async def _transcribe(llm: AsyncLLM, value: object, options: Mapping[str, Any]) -> object:
    transcript = _only(await llm.transcribe(value, **options))
    return transcript.error or transcript.text


async def _embed(llm: AsyncLLM, value: object, options: Mapping[str, Any]) -> object:
    embedding = _only(await llm.embed(value, **options))
    if embedding.vector is not None and embedding.vector.dim() > 1:
        reason = "give a vector per token, which no column of vectors holds; use a model or `pooling` with one vector"
        raise InputError(f"embeddings of this model {reason}", param="pooling")
    return embedding.error or embedding.vector


async def _read(llm: AsyncLLM, value: object, options: Mapping[str, Any]) -> object:
    document = _only(await llm.read(value, **options))
    failed = document.failed
    return document.error or (failed[0].error if failed else None) or document.text


TASKS: Mapping[str, Callable[[AsyncLLM, object, Mapping[str, Any]], Awaitable[Any]]] = {
    "chat": _chat,
    "ocr": _ocr,
    "transcribe": _transcribe,
    "embed": _embed,
    "read": _read,
}


def check_task(task: object) -> None:
    """Raise ConfigError for a task that is not in TASKS."""
    if not isinstance(task, str) or task not in TASKS:
        names = ", ".join(TASKS)
        raise ConfigError(f"<<param=>>{short_repr(task)} must be one of {names}; {hint(str(task), TASKS)}", param="task")


async def run_row(llm: AsyncLLM, task: str, value: object, options: Mapping[str, Any]) -> RowResult:
    """Return the result of one row. A row whose engine dies is tried again after the restart, at most twice."""
    for attempt in range(_ATTEMPTS):
        try:
            output = await TASKS[task](llm, value, options)
        except EngineDeadError as error:
            if attempt == _ATTEMPTS - 1:
                return _failed(error_info(error, task))
        except (SensoriumError, ValueError, TypeError, OSError) as error:
            return _failed(error_info(error, task))
        else:
            if not isinstance(output, ErrorInfo):
                return RowResult(output if isinstance(output, str) else output.tolist())
            if output.code != "engine_dead" or attempt == _ATTEMPTS - 1:
                return _failed(output)
        await asyncio.sleep(1.0)
    raise AssertionError


def _failed(error: ErrorInfo) -> RowResult:
    return RowResult(None, error.code, str(error))


class Checkpoint:
    """Results of rows in a folder, by content, so that a job that was killed goes on. Any number of processes share the folder.

    Each process appends to a file of its own, and reads those of the others when it starts. Errors are not kept.

    Args:
        folder: it is created if it does not exist.
        job: what the results depend on beside the row: model, task and options.
    """

    def __init__(self, folder: str | os.PathLike[str], *job: object) -> None:
        self._folder, self._job = Path(folder), digest("sensorium.rows", *job)
        self._file = self._folder / f"rows-{uuid.uuid4().hex}.jsonl"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._results: dict[str, str | list[float] | None] = dict(
                line for file in self._folder.glob("rows-*.jsonl") for line in _lines(file)
            )
        except OSError as error:
            raise ConfigError(f"<<param=>>{short_repr(str(folder))} cannot be used ({error})", param="checkpoint") from None

    def key(self, value: object, is_path: bool) -> str | None:
        """Return the key of a row: of the content of the file that it names, if it names one, else of its value.

        None: the row has an object whose content is not known, so its result is not kept.

        Args:
            is_path: whether a text may name a file.
        """
        content = _file_digest(Path(value)) if is_path and isinstance(value, str) else None
        try:
            return digest("sensorium.row", self._job, value if content is None else {"file": content})
        except InputError:
            return None

    def get(self, key: str) -> RowResult | None:
        return RowResult(self._results[key]) if key in self._results else None

    def put(self, key: str, result: RowResult) -> None:
        """Keep a result; errors are tried again by the next run."""
        if result.error_code is None:
            self._results[key] = result.output
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, result.output]) + "\n")


def _lines(file: Path) -> list[tuple[str, str | list[float]]]:
    """Return the lines of a file. The last one may be incomplete, because its process was killed."""
    found = []
    for line in file.read_text("utf-8", errors="replace").splitlines():
        try:
            key, output = json.loads(line)
        except ValueError:
            continue
        found.append((str(key), output))
    return found


def _file_digest(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_FILE:
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return None


async def run_rows(
    llm: AsyncLLM, task: str, values: Sequence[object], options: Mapping[str, Any], checkpoint: Checkpoint | None = None
) -> list[RowResult]:
    """Return the results of rows in their order. With a checkpoint, equal rows are computed once, unless they fail."""
    locks = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def run(value: object) -> RowResult:
        key = None if checkpoint is None else checkpoint.key(value, task in _OF_FILES)
        if checkpoint is None or key is None:
            return await run_row(llm, task, value, options)
        async with locks[key]:
            result = checkpoint.get(key)
            if result is None:
                result = await run_row(llm, task, value, options)
                checkpoint.put(key, result)
            return result

    return list(await asyncio.gather(*map(run, values)))
