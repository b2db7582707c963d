"""The form of /v1/files and the body of /v1/batches."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from .body import Body, Refused

_NO_MODEL: Refused = {"model": ((), "each line of the file names its model")}


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid")
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=30 * 24 * 3600)


class FileForm(Body):
    """Values of a form are texts, so numbers are converted."""

    model_config = ConfigDict(strict=False)
    refused: ClassVar[Refused] = _NO_MODEL
    purpose: Literal["batch", "user_data", "vision"]
    expires_after: ExpiresAfter | None = None


class BatchBody(Body):
    refused: ClassVar[Refused] = _NO_MODEL
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    output_expires_after: ExpiresAfter | None = None
