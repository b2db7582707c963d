"""Tasks on the rows of a Ray dataset, one engine per actor (`pip install sensorium[ray]`)."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..callers.errors import ConfigError, short_repr
from ..engine.config import check_options
from ..engine.engine import OTHERS
from .row_tasks import Checkpoint, check_task, run_rows

if TYPE_CHECKING:
    from ray.data import Dataset

COLUMNS = ("output", "error_code", "error")
"""The columns that are added: text or a vector, and for a row that failed the error's code and message instead."""


def map_batches(
    dataset: Dataset,
    model: str | os.PathLike[str],
    *,
    column: str,
    task: str = "chat",
    options: Mapping[str, Any] = {},
    engine_options: Mapping[str, Any] = {},
    batch_size: int = 32,
    concurrency: int | tuple[int, int] = 1,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Run a task on each row of a dataset, with one engine in each of Ray's actors. One row in is one row out.

    Ray starts and replaces the actors, and limits the bytes in flight. A row that fails has an error in its columns and stops
    no other. A row whose engine dies is computed again, at most twice.

    Args:
        model: as in `LLM`; every node needs it.
        column: the rows' inputs: a text or a list of messages ("chat"), a path, URL or bytes of an image, PDF or sound ("ocr",
            "transcribe", "read"), a text or an image ("embed").
        task: "chat", "ocr", "transcribe", "embed" or "read".
        options: of the task, as in the method of `LLM` with its name; for "chat" also `sampling_params`.
        engine_options: of `LLM`. Unless they say otherwise, the engine runs in a process of its own (`engine_process`).
        batch_size: rows that an actor computes at once.
        concurrency, num_cpus, num_gpus: number of actors, or the smallest and largest number; and what each needs.
        checkpoint: folder in which results are kept by content, shared by all nodes. A job that was killed goes on with them.

    Returns:
        The dataset with the columns `COLUMNS`. It is lazy, as all of Ray's datasets are.

    Raises:
        ConfigError: Ray is not installed, an unknown task, an option of the engine that is wrong, or a column that is there
            already.
    """
    check_task(task)
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("sensorium.ray needs Ray; run pip install 'sensorium[ray]'")
    if not isinstance(column, str) or column in COLUMNS:
        raise ConfigError(f"<<param=>>{short_repr(column)} must be the name of a column other than {COLUMNS}", param="column")
    check_options(model, {name: value for name, value in engine_options.items() if name not in ("max_waiting", *OTHERS)})
    settings = {
        "model": os.fspath(model),
        "column": column,
        "task": task,
        "options": dict(options),
        "engine_options": {"engine_process": True, **engine_options},
        "checkpoint": None if checkpoint is None else os.fspath(checkpoint),
    }
    return dataset.map_batches(
        RowEngine,
        fn_constructor_kwargs=settings,
        batch_size=batch_size,
        batch_format="numpy",
        concurrency=concurrency,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
    )


class RowEngine:
    """The engine of one actor. Arguments: see `map_batches`."""

    def __init__(
        self,
        model: str,
        column: str,
        task: str,
        options: Mapping[str, Any],
        engine_options: Mapping[str, Any],
        checkpoint: str | None = None,
    ) -> None:
        from .llm import AsyncLLM

        self._llm = AsyncLLM(model, **engine_options)
        self._column, self._task, self._options = column, task, options
        self._checkpoint = None if checkpoint is None else Checkpoint(checkpoint, *self._job(engine_options))

    def _job(self, engine_options: Mapping[str, Any]) -> list[object]:
        """Return everything except the row on which results depend."""
        options = [repr(sorted(options.items())) for options in (self._options, engine_options)]
        return [self._llm.engine.checkpoint_digests, self._task, *options]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with `COLUMNS`. `batch`: arrays `[rows]` by column."""
        if self._column not in batch:
            names = ", ".join(batch)
            raise ConfigError(f"<<param=>>{short_repr(self._column)} is not a column; there are {names}", param="column")
        values = [_plain(value, self._task) for value in batch[self._column]]
        results = asyncio.run(run_rows(self._llm, self._task, values, self._options, self._checkpoint))
        return batch | {name: [getattr(result, name) for result in results] for name in COLUMNS}


def _plain(value: Any, task: str) -> object:
    """Return a value of a column as Python's own types: messages may come as arrays or as JSON."""
    if isinstance(value, str):
        return _messages(value) if task == "chat" else value
    return _plain_parts(value)


def _messages(text: str) -> object:
    """Return the messages of a text that is a JSON list of them. Other texts are prompts."""
    if not text.startswith("[{"):
        return text
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return messages if all(isinstance(message, dict) and "role" in message for message in messages) else text


def _plain_parts(value: Any) -> object:
    """Return nested messages without the empty fields that a table's common schema adds to each."""
    if isinstance(value, dict):
        return {name: _plain_parts(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain_parts(part) for part in value]
    return _plain_parts(value.tolist()) if hasattr(value, "tolist") else value
