"""Serves requests to one caller: submits them in blocks and yields their outputs."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import wait
from operator import attrgetter
from queue import SimpleQueue

from ..outputs import RequestOutput
from ..scheduler.policy import Submitted
from .engine_loop import EngineLoop
from .request_handle import Drop, RequestHandle

_FREE_SECONDS = 10.0  # how long `serve` waits for the memory of aborted requests
_MAX_SUBMITTED = 1024  # answers of one `serve` that are in the engine at a time, if that is enough for 4 batches


def serve(
    engine_loop: EngineLoop, handles: Iterable[RequestHandle], stream: bool = False
) -> Generator[tuple[int, RequestOutput], RequestHandle | Sequence[RequestHandle] | None, None]:
    """Yield (index, output) of each request when it finishes and, with `stream`, whenever its output grows.

    Requests that the caller sends after an output get that output's index. A failed request yields an output with `error`;
    the others go on. Closing the generator, or an exception in it, aborts the unfinished requests and frees their memory.

    Many requests are submitted in blocks, those of a sequence in the policy's order: garbage collection stops all threads
    for a time in proportion to the objects of the requests that are in the engine.
    """
    mail: SimpleQueue[list[RequestHandle]] = SimpleQueue()
    left: dict[RequestHandle, int] = {}
    turn, room = 0, max(_MAX_SUBMITTED, 4 * engine_loop.core.info.max_num_seqs)
    waiting, block = _numbered(engine_loop, handles, room), room // 2
    try:
        while True:
            if room >= block and (more := _take_block(waiting, room)):
                left.update(more)
                room -= _num_answers(more)
                turn = engine_loop.submit(list(more), mail.put, stream, turn)
            if not left:
                return
            for handle in sorted(mail.get(), key=attrgetter("number")):
                output = handle.take() if handle in left else None
                if output is not None:
                    index = left.pop(handle) if output.finished else left[handle]
                    room += handle.input.params.n * output.finished
                    following = yield index, output
                    if following is not None:
                        more = dict.fromkeys([following] if isinstance(following, RequestHandle) else following, index)
                        left.update(more)
                        room -= _num_answers(more)
                        turn = engine_loop.submit(list(more), mail.put, stream, turn)
    finally:
        left = {handle: index for handle, index in left.items() if handle.number >= 0}
        if left:
            freed = engine_loop.call(Drop(tuple(left)))
            if not engine_loop.is_current_thread:  # the garbage collector may run this in any thread
                wait([freed], _FREE_SECONDS)


def _numbered(engine_loop: EngineLoop, handles: Iterable[RequestHandle], room: int) -> Iterator[tuple[int, RequestHandle]]:
    """Return all requests with their indices, in the policy's order if they are a sequence that is larger than `room`."""
    if not isinstance(handles, Sequence) or len(handles) <= room:
        return enumerate(handles)
    engine_loop.check_ready(handles)  # names that are used twice may be in different blocks
    policy = engine_loop.policy
    return iter(sorted(enumerate(handles), key=lambda pair: policy.order(Submitted(pair[1].input.priority, pair[0]))))


def _take_block(waiting: Iterator[tuple[int, RequestHandle]], room: int) -> dict[RequestHandle, int]:
    """Return the next requests and their indices, with about `room` answers."""
    block = dict[RequestHandle, int]()
    for index, handle in waiting:
        block[handle] = index
        room -= handle.input.params.n
        if room <= 0:
            break
    return block


def _num_answers(handles: Iterable[RequestHandle]) -> int:
    return sum(handle.input.params.n for handle in handles)
