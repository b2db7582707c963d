"""sensorium: images, videos and audio in, text out. Everything here is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .callers.errors import (
        BusyError,
        CheckpointError,
        ConfigError,
        EngineDeadError,
        ErrorInfo,
        HubError,
        InputError,
        MediaError,
        SensoriumError,
    )
    from .engine.engine_args import AsyncEngineArgs, EngineArgs
    from .engine.frontend.prompts import TextPrompt, TokensPrompt
    from .engine.logits_processors import register_logits_processor
    from .engine.lora_request import LoRARequest
    from .engine.outputs import CompletionOutput, ItemTrace, RequestOutput
    from .engine.pooling_params import PoolingParams
    from .engine.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
    from .engine.session import LiveSession
    from .engine.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
    from .mm.encoded_json import encoded_item_from_json
    from .mm.media.pdf import pdf_pages
    from .mm.media.policy import PdfPage
    from .mm.types import EncodedItem, ItemPlan, Media
    from .models.registry import register_model
    from .pipelines.beam_search import BeamSearchOutput, BeamSearchParams
    from .pipelines.documents.blocks import Document
    from .pipelines.llm import LLM, AsyncLLM, AsyncLLMEngine
    from .pipelines.ocr import Page
    from .pipelines.pooling import PoolingRequestOutput
    from .pipelines.speak import Speech
    from .pipelines.speech.live_input import Gap, LiveEvent
    from .pipelines.speech.live_session import LiveAudio
    from .pipelines.transcribe import Segment, Transcript, Word
    from .server import ray_serve as ray

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BusyError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "Document",
    "EncodedItem",
    "EngineArgs",
    "EngineDeadError",
    "ErrorInfo",
    "Gap",
    "GuidedDecodingParams",
    "HubError",
    "InputError",
    "ItemPlan",
    "ItemTrace",
    "LiveAudio",
    "LiveEvent",
    "LiveSession",
    "LoRARequest",
    "Media",
    "MediaError",
    "Page",
    "PdfPage",
    "PoolingParams",
    "PoolingRequestOutput",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Segment",
    "SensoriumError",
    "Speech",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Transcript",
    "Word",
    "__version__",
    "encoded_item_from_json",
    "pdf_pages",
    "ray",
    "register_logits_processor",
    "register_model",
]

_HOME = {
    "LLM": "pipelines.llm",
    "AsyncLLM": "pipelines.llm",
    "Document": "pipelines.documents.blocks",
    "AsyncLLMEngine": "pipelines.llm",
    "GuidedDecodingParams": "engine.structured_outputs",
    "TextPrompt": "engine.frontend.prompts",
    "TokensPrompt": "engine.frontend.prompts",
    "EngineArgs": "engine.engine_args",
    "AsyncEngineArgs": "engine.engine_args",
    "LiveSession": "engine.session",
    "LoRARequest": "engine.lora_request",
    "SamplingParams": "engine.sampling_params",
    "RequestOutputKind": "engine.sampling_params",
    "StructuredOutputsParams": "engine.structured_outputs",
    "RepetitionDetectionParams": "engine.sampling_params",
    "register_logits_processor": "engine.logits_processors",
    "register_model": "models.registry",
    "CompletionOutput": "engine.outputs",
    "ItemTrace": "engine.outputs",
    "RequestOutput": "engine.outputs",
    "BusyError": "callers.errors",
    "CheckpointError": "callers.errors",
    "ConfigError": "callers.errors",
    "EngineDeadError": "callers.errors",
    "ErrorInfo": "callers.errors",
    "HubError": "callers.errors",
    "InputError": "callers.errors",
    "MediaError": "callers.errors",
    "SensoriumError": "callers.errors",
    "EncodedItem": "mm.types",
    "encoded_item_from_json": "mm.encoded_json",
    "ItemPlan": "mm.types",
    "Media": "mm.types",
    "Page": "pipelines.ocr",
    "PdfPage": "mm.media.policy",
    "pdf_pages": "mm.media.pdf",
    "PoolingParams": "engine.pooling_params",
    "PoolingRequestOutput": "pipelines.pooling",
    "Gap": "pipelines.speech.live_input",
    "LiveEvent": "pipelines.speech.live_input",
    "LiveAudio": "pipelines.speech.live_session",
    "BeamSearchParams": "pipelines.beam_search",
    "BeamSearchOutput": "pipelines.beam_search",
    "Speech": "pipelines.speak",
    "Segment": "pipelines.transcribe",
    "Word": "pipelines.transcribe",
    "Transcript": "pipelines.transcribe",
}


def __getattr__(name: str) -> object:
    if name == "ray":
        return import_module(".server.ray_serve", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
