"""The adapters of requests by name: loaded and unloaded while requests run, and kept until the last request that uses them."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...callers.errors import CheckpointError, ErrorInfo, InputError, check_utf8, hint, short_repr, typed
from ...checkpoints.files import read_json
from ..lora_request import LoRARequest
from ..types import LoadedAdapter
from .engine_loop import EngineLoop
from .request_handle import CancelLoading, ServingLoop, UnloadAdapter

_NAME = re.compile(r"\w[\w.:@+-]*(/\w[\w.:@+-]*)*")
_MAX_NAME = 200
_MAX_DIGITS = 18  # of a token's id; no vocabulary has longer ones
_SLICE_SECONDS = 0.01  # for which an adapter is read between two steps


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter that requests may choose, as `LLM.list_adapters` returns it.

    Args:
        name: for `adapter=` of a request.
        path: its folder.
        identity: digest of its content; adapters of equal content share caches.
        rank, num_bytes: 0 if it is not loaded.
        pinned: never unloaded to make room for another one.
        loaded: False if it made room for another one; the next request reads it again.
    """

    name: str
    path: str
    identity: str
    rank: int
    num_bytes: int
    pinned: bool
    loaded: bool


class _Resident:
    """An adapter in the core. When nothing refers to it any more, the core frees it."""

    def __init__(self, loaded: LoadedAdapter) -> None:
        self.loaded = loaded


@dataclass(frozen=True)
class _Load:
    """Load an adapter in the core for a moment; None: it is not loaded yet.

    It is freed again if the caller was interrupted and takes no result.

    Args:
        resume: go on with what the last message has begun.
    """

    folder: str
    resume: bool

    def __call__(self, engine_loop: ServingLoop) -> _Resident | None:
        loaded = engine_loop.core.load_adapter(self.folder, _SLICE_SECONDS, self.resume)
        if loaded is None:
            return None
        resident = _Resident(loaded)
        engine_loop.send_after(resident, UnloadAdapter(resident.loaded.identity))
        return resident


class AdapterLease:
    """Keeps an adapter while one request uses it.

    Args:
        read: loads the adapter and `keep`s it; None if `keep` is called at once.
    """

    def __init__(self, read: Callable[[AdapterLease], None] | None) -> None:
        self.identity = self.encoder_identity = ""
        self.resident: _Resident | None = None
        self._read, self._released = read, False

    def load(self) -> None:
        """Load the adapter if it is not loaded. It waits for the engine's loop. Errors: see `RequestAdapters.load`."""
        if self._read is not None:
            self._read(self)
            self._read = None

    def keep(self, resident: _Resident) -> None:
        """Begin the use, unless it has ended already."""
        self.identity, self.encoder_identity = resident.loaded.identity, resident.loaded.encoder_identity
        self.resident = resident
        if self._released:
            self.resident = None

    def release(self) -> None:
        """End the use. Nothing happens the second time."""
        self._released, self.resident = True, None


AdapterChoice = str | LoRARequest | AdapterLease | None
"""The adapter of a request: a loaded name, a LoRARequest, the lease of another request (whose content it uses, whatever its
name stands for now), or None for the base model.
"""


@dataclass(frozen=True, eq=False)
class _NamedAdapter:
    path: str
    resident: _Resident | None
    pinned: bool
    last_use: int


class RequestAdapters:
    """The names of an engine's adapters. Thread-safe.

    A name stands for the content that was read last: requests that run keep what they began with.

    Args:
        token_to_id: the id of a token of the model, or None.
        resolvers: return the folder of an adapter whose name is not loaded, or None. They may take as long as a download.
        default_folders: by modality, the adapter of prompts with such items that name no adapter.
    """

    def __init__(
        self,
        engine_loop: EngineLoop,
        token_to_id: Callable[[str], int | None],
        resolvers: Sequence[Callable[[str], Path | None]] = (),
        default_folders: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._loop, self._clock, self._token_to_id = engine_loop, count(), token_to_id
        self._resolvers, self._default_folders = resolvers, default_folders
        self._lock = threading.Lock()  # guards entries and leases; never held while an adapter is read
        self._reading = threading.Lock()  # held while one is read
        self._entries: dict[str, _NamedAdapter] = {}
        self._leases: weakref.WeakSet[AdapterLease] = weakref.WeakSet()

    def load(self, name: str, path: str | os.PathLike[str], pin: bool = False) -> AdapterInfo:
        """Read the adapter of a folder under this name. New requests with the name use it; running ones keep the old one.

        Raises:
            ConfigError, CheckpointError: the adapter is not supported, or does not fit the model.
            InputError: the name or path has a wrong form, there is too little room, or the engine takes no adapters.
        """
        self._loop.check_open()  # before the locks, which may be held for ever in a forked process
        check_name(name)
        folder = _folder(path)
        with self._reading:
            entry = _NamedAdapter(folder, self._read(folder), bool(pin), next(self._clock))
            with self._lock:
                self._entries[name] = entry
        return _info(name, entry)

    def unload(self, name: str) -> None:
        """Forget a name. The adapter is freed when the last request that uses it ends. Raise InputError for an unknown name."""
        with self._lock:
            self._entry(name)
            del self._entries[name]

    def pin(self, name: str, pinned: bool = True) -> None:
        """Never unload this adapter to make room for another one, or allow it again."""
        with self._lock:
            self._entries[name] = replace(self._entry(name), pinned=bool(pinned))

    def list(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters in the order of their names."""
        with self._lock:
            return tuple(_info(name, entry) for name, entry in sorted(self._entries.items()))

    def check(self, choices: Sequence[AdapterChoice]) -> None:
        """Raise InputError for a choice of another type and for an unknown name. Folders are not read."""
        for choice in {id(choice): choice for choice in choices}.values():
            if isinstance(choice, AdapterLease):
                continue
            name, folder = _parts(choice) if choice is not None else ("", "")
            if folder is None and self._resolvers:
                check_name(name)
            elif folder is None:
                with self._lock:
                    self._entry(name)

    def lease(self, choice: AdapterChoice) -> AdapterLease | None:
        """Return the lease of a request's adapter. If it is not loaded, `AdapterLease.load` loads it.

        Raises:
            InputError: the name is unknown, the choice has another type, or the engine was closed.
        """
        if choice is None:
            return None
        self._loop.check_open()
        if isinstance(choice, AdapterLease):
            return self._share(choice)
        name, folder = _parts(choice)
        again = isinstance(choice, LoRARequest) and choice.load_inplace
        with self._lock:
            if folder is None and self._resolvers and name not in self._entries:
                return AdapterLease(partial(self._resolve_for, name=check_name(name)))
            entry = self._entry(name) if folder is None else self._entries.get(name)
            path = folder or (entry.path if entry is not None else "")
            if again or entry is None or entry.resident is None or entry.path != path:
                return AdapterLease(partial(self._read_for, name=name, path=path, again=again, names=folder is not None))
            lease = AdapterLease(None)
            self._lend(lease, name, entry)
            return lease

    @property
    def resolves_names(self) -> bool:
        """True if there are resolvers for names that are not loaded."""
        return bool(self._resolvers)

    @property
    def default(self) -> Callable[[Collection[str]], AdapterLease | None] | None:
        """Return a function from the modalities of a prompt that names no adapter to its adapter; None without defaults."""
        return self._default if self._default_folders else None

    def _default(self, modalities: Collection[str]) -> AdapterLease | None:
        """Return the lease of the default adapter of these modalities; None if several have one, as in vLLM."""
        chosen = [name for name in self._default_folders if name in modalities]
        if len(chosen) != 1:
            return None
        return self.lease(LoRARequest(f"default:{chosen[0]}", 0, self._default_folders[chosen[0]]))

    def _resolve_for(self, lease: AdapterLease, *, name: str) -> None:
        """Ask the resolvers for an adapter, and load it under its name.

        Raises:
            InputError: no resolver has it ("not_found").
            HubError, CheckpointError: it cannot be downloaded, or a resolver fails.
        """
        folder = next((found for resolver in self._resolvers if (found := resolver(name)) is not None), None)
        if folder is None:
            reason = f"no adapter {short_repr(name)} is loaded, and none of <<lora_resolvers>> has one of this name"
            raise InputError(reason, code="not_found", value=short_repr(name), param="adapter")
        self._read_for(lease, name=name, path=_folder(folder), again=False, names=True)

    def _lend(self, lease: AdapterLease, name: str, entry: _NamedAdapter) -> None:
        """Give a request the adapter of an entry that is loaded. The caller holds the lock."""
        assert entry.resident is not None
        self._entries[name] = replace(entry, last_use=next(self._clock))
        lease.keep(entry.resident)
        self._leases.add(lease)

    def _share(self, lease: AdapterLease) -> AdapterLease:
        """Return another lease of the adapter of a lease that is loaded and not released."""
        assert lease.resident is not None
        shared = AdapterLease(None)
        with self._lock:
            shared.keep(lease.resident)
            self._leases.add(shared)
        return shared

    def _read_for(self, lease: AdapterLease, *, name: str, path: str, again: bool, names: bool) -> None:
        """Read the adapter of a request, unless another request has read it meanwhile.

        Args:
            names: the request gives the name, also if it stands for nothing or for another folder.
        """
        with self._reading:
            with self._lock:
                entry = self._entries.get(name)
                if not again and entry is not None and entry.resident is not None and entry.path == path:
                    return self._lend(lease, name, entry)
                del entry  # it would keep an adapter that has to make room
            resident = self._read(path)
            with self._lock:
                before = self._entries.get(name)
                if names or (before is not None and before.path == path):
                    pinned = before is not None and before.pinned
                    return self._lend(lease, name, _NamedAdapter(path, resident, pinned, 0))
                lease.keep(resident)
                self._leases.add(lease)

    def _entry(self, name: str) -> _NamedAdapter:
        if not isinstance(name, str) or name not in self._entries:
            advice = "load it first, with <<enable_lora=>>True of the engine"
            advice = hint(str(name), self._entries) if self._entries else advice
            raise InputError(f"no adapter {short_repr(name)} is loaded; {advice}",
                             code="unknown_name", value=short_repr(name), param="adapter")  # fmt: skip
        return self._entries[name]

    def _read(self, folder: str) -> _Resident:
        """Load an adapter in the core. While there is too little room, unload the one that was used least recently."""
        resume = False
        while True:
            try:
                resident: _Resident | None = self._loop.call(_Load(folder, resume)).result()
            except InputError as error:
                if not _lacks_room(error.info) or not self._evict():
                    raise
                resume = False
                continue
            except BaseException:  # for example KeyboardInterrupt: nobody will resume the reading
                self._loop.send(CancelLoading())
                raise
            if resident is not None:
                if resident.loaded.changes_embeddings:
                    check_added_tokens(Path(folder), self._token_to_id)
                return resident
            resume = True

    def _evict(self) -> bool:
        """Unload the adapter that was used least recently, without pin and requests. Return False if there is none."""
        with self._lock:
            used = {id(lease.resident) for lease in self._leases}
            pinned = {id(entry.resident) for entry in self._entries.values() if entry.pinned}
            idle = [
                (entry.last_use, name)
                for name, entry in self._entries.items()
                if entry.resident is not None and id(entry.resident) not in used | pinned
            ]
            if idle:
                _, name = min(idle)
                self._entries[name] = replace(self._entries[name], resident=None)
            return bool(idle)


def as_adapters(adapter: object, lora_request: object, num_prompts: int) -> Sequence[Any]:
    """Return the adapter of each prompt. Raise InputError if both arguments are given, or their number does not fit."""
    param = "adapter" if lora_request is None else "lora_request"
    if adapter is not None and lora_request is not None:
        raise InputError("adapter and lora_request are two spellings of one argument; leave one of them out", param=param)
    choice = adapter if lora_request is None else lora_request
    if not isinstance(choice, list | tuple):
        return [choice] * num_prompts
    if len(choice) != num_prompts:
        raise InputError(
            f"{len(choice)} values of <<param>> for {num_prompts} prompts; give one, or one per prompt", param=param
        )
    return choice


def _lacks_room(error: ErrorInfo) -> bool:
    """Return whether an adapter could not be loaded because others are, not because it is too large for an empty store."""
    size, limit = error.value, error.limit
    return error.param == "max_loras" and isinstance(size, int) and isinstance(limit, int) and size <= limit


def _info(name: str, entry: _NamedAdapter) -> AdapterInfo:
    if entry.resident is None:
        return AdapterInfo(name, entry.path, "", 0, 0, entry.pinned, loaded=False)
    loaded = entry.resident.loaded
    return AdapterInfo(name, entry.path, loaded.identity, loaded.rank, loaded.num_bytes, entry.pinned, loaded=True)


def check_name(name: object) -> str:
    """Return the name of an adapter. Raise InputError if it has another type or other characters."""
    if not isinstance(name, str) or len(name) > _MAX_NAME or not _NAME.fullmatch(check_utf8(name, "name")):
        raise InputError(
            f"<<param=>>{short_repr(name)} must consist of letters, digits and ._:@+- (in parts that / divides), "
            f"{_MAX_NAME} characters at most",
            code="invalid_value", param="name",
        )  # fmt: skip
    return name


def check_added_tokens(folder: Path, token_to_id: Callable[[str], int | None]) -> None:
    """Raise CheckpointError if the tokenizer in an adapter's folder has added tokens that the model's tokenizer lacks."""
    for content, number in _added_tokens(folder):
        if isinstance(content, str) and token_to_id(content) != number:
            raise CheckpointError(
                f"the adapter {folder} changes token embeddings, and its tokenizer has the token {short_repr(content)}, which "
                "the model's lacks: all adapters per request use the model's tokenizer; give the adapter an engine of its own, "
                "<<base_with_adapter>>"
            )


def _added_tokens(folder: Path) -> Iterator[tuple[object, object]]:
    """Yield the added tokens and their ids from the three files in which tokenizers of transformers store them."""
    tokenizer, config, added = (
        read_json(folder / name) if (folder / name).is_file() else {}
        for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
    )
    tokens = tokenizer.get("added_tokens")
    for token in tokens if isinstance(tokens, list) else ():
        if isinstance(token, dict):
            yield token.get("content"), token.get("id")
    decoder = config.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and number.isdecimal():
            yield token.get("content"), int(number) if len(number) <= _MAX_DIGITS else -1  # Python reads no longer ones
    yield from added.items()


def _folder(path: object) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InputError(f"<<param>> must be the path of an adapter's folder, not {short_repr(path)}",
                         code="invalid_value", param="path")  # fmt: skip
    try:
        return str(Path(text).expanduser().absolute())
    except (RuntimeError, OSError) as error:  # a home or a working directory that does not exist
        raise InputError(f"<<param=>>{short_repr(text)} names no folder: {error}",
                         code="invalid_value", param="path") from None  # fmt: skip


def _parts(choice: object) -> tuple[str, str | None]:
    """Return the name of an adapter, and the folder of a LoRARequest. Raise InputError for another type."""
    if isinstance(choice, LoRARequest):
        return check_name(choice.lora_name), _folder(choice.lora_path)
    if isinstance(choice, str):
        return choice, None
    raise InputError(
        f"<<param>> must be the name of a loaded adapter, a LoRARequest or None, not {typed(choice)}",
        code="invalid_value", param="adapter",
    )  # fmt: skip
