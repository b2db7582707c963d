"""The interface of an engine's core, in this process or in another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ...mm.types import MultiModalFeature
from ..core_info import CoreInfo
from ..stats import EngineStats
from ..types import CoreOutputs, EngineRequest, LoadedAdapter, TokenOutput

ASLEEP = "the engine is asleep; <<wake_up>>"


class CoreClient(Protocol):
    """The verbs of a core. Arguments and results are plain data. `engine_core.EngineCore` documents the verbs and their errors.

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

    def watch(self, on_end: Callable[[], object]) -> None:
        """Call `on_end` in another thread whenever the core's process ends, if it has one."""

    def check_alive(self) -> None:
        """Raise EngineDeadError if the core's process has ended and was not restarted."""

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

    def load_adapter(self, folder: str, seconds: float = math.inf, resume: bool = False) -> LoadedAdapter | None: ...

    def cancel_loading(self) -> None: ...

    def unload_adapter(self, identity: str) -> None: ...

    def stage_weights(self, weights: Mapping[str, Tensor]) -> None: ...

    def restart_answer(self, request_id: str) -> int: ...

    def sleep(self, keep_sequences: bool = False) -> None: ...

    def wake_up(self) -> None: ...

    def close(self) -> None:
        """End the core's process, if it has one. The verbs raise an error afterwards."""
