"""Bodies that load and unload adapters, with vLLM's fields, and that replace weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .body import Body


class LoadAdapterBody(Body):
    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    is_pinned: bool = False


class UpdateWeightsBody(Body):
    path: str = Field(min_length=1)
    mode: Literal["wait", "abort", "pause", "restart"] = "wait"


class UnloadAdapterBody(Body):
    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None
