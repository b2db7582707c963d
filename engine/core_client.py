"""What callers may ask of an engine's core, in whichever process it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..mm.types import MultiModalFeature
from .sampling_params import StructuredOutputsParams
from .types import CoreInfo, CoreOutputs, EngineRequest, EngineStats

ASLEEP = "the engine is asleep; call wake_up() first"


class CoreClient(Protocol):
    """Plain data in and out. The verbs and `stats` belong to one thread; `compile_grammar` may be called from any.

    `EngineCore` is the form in this process and documents what the verbs mean and raise.
    """

    @property
    def info(self) -> CoreInfo: ...

    @property
    def stats(self) -> EngineStats: ...

    def bind_thread(self, num_threads: int) -> None:
        """Called once, in the thread that will call the verbs; `num_threads` is for torch's operations."""

    def compile_grammar(self, wanted: StructuredOutputsParams) -> None:
        """Do now what would delay the request later, if that helps here; InputError for an invalid grammar."""

    def add(self, request: EngineRequest) -> None: ...

    def append(
        self,
        request_id: str,
        token_ids: Sequence[int],
        features: Sequence[MultiModalFeature] = (),
        close: bool = False,
        adapter: str | None = None,
    ) -> None: ...

    def truncate(self, request_id: str, num_tokens: int) -> None: ...

    def pause(self, request_id: str) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> CoreOutputs: ...

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...

    def close(self) -> None:
        """Free what the client holds outside this process; the verbs raise an error afterwards."""
