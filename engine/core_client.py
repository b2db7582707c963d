"""The interface of an engine's core, in this process or in another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..mm.types import MultiModalFeature
from .types import CoreInfo, CoreOutputs, EngineRequest, EngineStats, TokenOutput

ASLEEP = "the engine is asleep; call wake_up() first"


class CoreClient(Protocol):
    """The verbs of a core. Arguments and results are plain data. `core.EngineCore` documents the verbs and their errors.

    One thread uses the verbs and `stats`.
    """

    @property
    def info(self) -> CoreInfo: ...

    @property
    def stats(self) -> EngineStats: ...

    def bind_thread(self, num_threads: int) -> None:
        """Prepare the calling thread for the verbs. `num_threads`: number of torch's threads."""

    @property
    def restart(self) -> Callable[[], None] | None:
        """A function that restarts a core after it has died; its requests are lost. None if the core cannot be restarted."""

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

    def pause(self, request_id: str) -> TokenOutput: ...

    def abort(self, request_id: str) -> TokenOutput | None: ...

    def step(self) -> CoreOutputs: ...

    def reset_prefix_cache(self) -> bool: ...

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...

    def close(self) -> None:
        """End the core's process, if it has one. The verbs raise an error afterwards."""
