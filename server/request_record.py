"""What the server notes about a request while it is served, for the access log and the HTTP metrics."""

from __future__ import annotations

import re
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ..callers.errors import ErrorInfo
from ..engine.errors import error_info
from ..engine.outputs import RequestOutput

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass
class RequestRecord:
    """One HTTP request.

    Args:
        id: from the header X-Request-Id, or a new one.
        tenant: fingerprint of the API key, from which nobody can find the key.
        first_byte: seconds until the response's header was sent.
        outcome: "ok", "error" (a status of 400 or above, or an error within a stream), "disconnected" or "failed".
    """

    id: str
    method: str
    path: str
    tenant: str | None = None
    model: str | None = None
    status: int | None = None
    first_byte: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    audio_seconds: float = 0.0
    has_error: bool = False
    disconnected: bool = False
    complete: bool = False  # the response was sent whole
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def outcome(self) -> str:
        if self.disconnected or self.status == 499:
            return "disconnected"
        return "failed" if self.status is None else "error" if self.has_error or self.status >= 400 else "ok"

    @property
    def fields(self) -> dict[str, Any]:
        """Values for the access log. None of them is from a body, except the model's name."""
        return {
            "request_id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 4),
            "first_byte_seconds": None if self.first_byte is None else round(self.first_byte, 4),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "audio_seconds": round(self.audio_seconds, 2),
            "tenant": self.tenant,
        }

    def count_tokens(self, output: RequestOutput) -> None:
        """Add the tokens of a request of the engine that belongs to this HTTP request."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)


current_record: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)
"""The record of the request that this task serves; None outside requests and in lines of batches."""


def note_error() -> None:
    """Note that the current request's stream ends with an error."""
    if (record := current_record.get()) is not None:
        record.has_error = True


def stream_error(error: Exception) -> ErrorInfo:
    """Return the error that ends a stream whose status was sent already, and note it."""
    note_error()
    return error_info(error, "a request")


def request_id(client_id: bytes | None) -> str:
    """Return the id that a client gave, or a new one if it gave none or one that does not belong into a log."""
    return client_id.decode() if client_id is not None and _REQUEST_ID.fullmatch(client_id) else uuid4().hex


def count_audio(seconds: float) -> None:
    """Add the length of a sound that the current request has had transcribed."""
    if (record := current_record.get()) is not None:
        record.audio_seconds += seconds
