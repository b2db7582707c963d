"""The readers of vLLM's `kv_transfer_config` and `ec_transfer_config`: where KV blocks and encoder rows are shared."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..callers.errors import ConfigError, equals_one_of, hint, short_repr, typed

_MEMORY, _MULTI = "OffloadingConnector", "MultiConnector"
_DISK = ("ExampleConnector", "SharedStorageConnector")  # vLLM's present and former name
_SHARED_MEMORY, _PEER, _REDIS = "SharedMemoryConnector", "PeerConnector", "RedisConnector"
_CONNECTORS = (_MEMORY, _SHARED_MEMORY, *_DISK, _PEER, _REDIS, _MULTI)
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_EC_DISK, _EC_SHARED_MEMORY = ("ECExampleConnector", "ECSharedStorageConnector"), "ECSharedMemoryConnector"
_EC_CONNECTORS = (*_EC_DISK, _EC_SHARED_MEMORY)
_EC_KEPT = ("encoder_rows", "processed_items")
_EC_ROLES = ("ec_producer", "ec_consumer", "ec_both")
_EC_KEYS = ("ec_connector", "ec_role", "ec_connector_extra_config", "engine_id")
_FOLDER_BYTES = 64 << 30
_OPTIONS = {  # connector -> keys of kv_connector_extra_config
    _MEMORY: ("cpu_bytes_to_use",),
    _SHARED_MEMORY: ("name", "max_bytes"),
    **dict.fromkeys(_DISK, ("shared_storage_path", "max_bytes")),
    _PEER: ("listen", "peers", "token", "timeout_seconds"),
    _REDIS: ("url", "timeout_seconds"),
    _MULTI: ("connectors",),
}
TOKEN_VARIABLE = "SENSORIUM_PEER_TOKEN"
_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[::1\]")
_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {  # accepted values, and why others are refused
    "kv_load_failure_policy": (("recompute",), "blocks that are missing, damaged or late are computed"),
    "kv_buffer_device": (("cpu",), "blocks are copied through the host's memory"),
    "enable_permute_local_kv": ((False,), "blocks keep their layout"),
    "kv_connector_module_path": ((), "connectors of other packages do not run here"),
}
_KEYS = ("kv_connector", "kv_role", "kv_connector_extra_config", "engine_id", *_ONLY)


@dataclass(frozen=True)
class KVTransferOptions:
    """Connectors of KV blocks, and what an engine does with them.

    Args:
        saves: computed blocks are saved. loads: blocks of prompts are looked up.
        memory_bytes: size of the host's memory for blocks; 0 for none.
        shared_memory: name of memory that engines of this machine share, "" for none. shared_bytes: its maximum size.
        folder: path of a folder for blocks, "" for none. folder_bytes: maximum size of its files.
        peers: "host:port" of engines that are asked for blocks.
        listen: "host:port" where this engine serves blocks, "" for nowhere.
        token: secret that peers share.
        redis_url: URL of a Redis-compatible store, "" for none.
        seconds: time limit of a request to a peer or a store.
    """

    saves: bool = True
    loads: bool = True
    memory_bytes: int = 0
    shared_memory: str = ""
    shared_bytes: int = 0
    folder: str = ""
    folder_bytes: int = _FOLDER_BYTES
    peers: tuple[str, ...] = ()
    listen: str = ""
    token: str = field(default="", repr=False)
    redis_url: str = field(default="", repr=False)  # it may hold a password
    seconds: float = 2.0

    def __bool__(self) -> bool:
        """Return whether there is a connector."""
        return bool(self.memory_bytes or self.shared_memory or self.folder or self.peers or self.redis_url)

    def of_rank(self, rank: int, num_ranks: int) -> KVTransferOptions:
        """Return the options of one of the ranks that share the engine's model.

        Each has an equal part of the memory, and talks to the rank of peers that has its number: ports count up from those of
        rank 0. All of them write to the folder, and count all of its files.
        """
        if num_ranks == 1:
            return self
        return replace(
            self,
            memory_bytes=-(-self.memory_bytes // num_ranks),
            peers=tuple(_next_address(peer, rank) for peer in self.peers),
            listen=self.listen and _next_address(self.listen, rank),
        )

    @property
    def is_shared(self) -> bool:
        """Return whether other engines may read what this one saves, or this one what others have saved."""
        return bool(self.shared_memory or self.folder or self.peers or self.listen or self.redis_url)


@dataclass(frozen=True)
class ECTransferOptions:
    """Where an engine keeps encoder rows and processed items outside its caches, for itself and for others.

    Args:
        folder: path of a folder, "" for none. folder_bytes: maximum size of its files.
        shared_memory: name of memory that engines of this machine share, "" for none. shared_bytes: its maximum size.
        rows: encoder rows are kept. items: processed items are kept, so that others need not decode and process them.
    """

    folder: str = ""
    folder_bytes: int = 0
    shared_memory: str = ""
    shared_bytes: int = 0
    rows: bool = True
    items: bool = False

    def __bool__(self) -> bool:
        """Return whether there is a connector."""
        return bool(self.folder or self.shared_memory)


def read_kv_transfer(options: object, offloading_gib: object) -> KVTransferOptions:
    """Return what `kv_transfer_config` and `kv_offloading_size` ask for.

    Raises:
        ConfigError: a connector, key or value that cannot be honoured, by name.
    """
    result = KVTransferOptions() if options is None else _read(options)
    if offloading_gib is None:
        return _check_served(result)
    if isinstance(offloading_gib, bool) or not isinstance(offloading_gib, int | float) or not 0 <= offloading_gib <= 1 << 20:
        reason = f"<<param=>>{short_repr(offloading_gib)} must be a number of GiB, 0 or above"
        raise ConfigError(reason, param="kv_offloading_size", value=short_repr(offloading_gib))
    num_bytes = int(offloading_gib * (1 << 30))
    return _check_served(replace(result, memory_bytes=result.memory_bytes + num_bytes))


def read_ec_transfer(options: object, folder: str | None, folder_bytes: int) -> ECTransferOptions:
    """Return what `ec_transfer_config`, or else `encoder_cache_dir`, asks for. Engines of each role read and write.

    Args:
        folder, folder_bytes: `encoder_cache_dir` and its maximum size.

    Raises:
        ConfigError: a connector, key or value that cannot be honoured, by name.
    """
    param = "ec_transfer_config"
    if options is None:
        return ECTransferOptions(folder or "", folder_bytes)
    if folder is not None:
        raise ConfigError("<<param>> cannot be combined with <<encoder_cache_dir>>; leave one of them out", param=param)
    if not isinstance(options, Mapping):
        raise _type_error(options, 'a mapping, such as {"ec_connector": "ECExampleConnector", ...}', param=param)
    values = {name: value for name, value in options.items() if value is not None}
    _check_keys(values, _EC_KEYS, "", param)
    connector, role, extra = (values.get(name) for name in _EC_KEYS[:3])
    if not equals_one_of(connector, _EC_CONNECTORS):
        raise _error(connector, f"cannot be honoured; the connectors are {', '.join(_EC_CONNECTORS)}", "ec_connector", param)
    if not equals_one_of(role, _EC_ROLES):
        raise _error(role, f"must be one of {', '.join(_EC_ROLES)}", "ec_role", param)
    if not isinstance(extra, Mapping):
        raise _type_error(extra, "a mapping of the connector's options", "ec_connector_extra_config", param)
    is_memory = connector == _EC_SHARED_MEMORY
    keys = ("name", "max_bytes") if is_memory else ("shared_storage_path",)
    _check_keys(extra, (*keys, "keeps"), f" for {connector}", param)
    keeps = extra.get("keeps", _EC_KEPT[:1])
    if not isinstance(keeps, list | tuple) or not keeps or not all(equals_one_of(kind, _EC_KEPT) for kind in keeps):
        raise _error(keeps, f"must be a list of {' and '.join(_EC_KEPT)}", "keeps", param)
    result = ECTransferOptions(rows=_EC_KEPT[0] in keeps, items=_EC_KEPT[1] in keeps)
    if is_memory:
        num_bytes = _positive(extra.get("max_bytes"), "max_bytes", param)
        return replace(result, shared_memory=_memory_name(extra, param), shared_bytes=num_bytes)
    return replace(result, folder=_folder(extra, param), folder_bytes=folder_bytes)


def read_encoders(value: object) -> tuple[str, ...]:
    """Return the addresses that `encoder` gives. Raise ConfigError for one that is no host:port."""
    addresses = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(addresses, list | tuple) or (value is not None and not addresses):
        raise _error(value, "must be an address, host:port, or a list of them", param="encoder")
    for address in addresses:
        if not is_address(address):
            raise _error(address, "must be an address, host:port", param="encoder")
    _check_peer_token("encoder", bool(addresses))
    return tuple(addresses)


def _check_peer_token(param: str, is_used: bool) -> None:
    if is_used and not _is_text(peer_token()):
        raise ConfigError(f"<<param>> needs a {TOKEN_VARIABLE} without lone surrogates", param=param)


def check_encoder_listen(value: object) -> None:
    """Raise ConfigError if encoder rows cannot be served at an address, or other machines would reach it without a token."""
    if value is None:
        return
    if not isinstance(value, str) or not is_address(value):
        raise _error(value, "must be an address, host:port", param="encoder_listen")
    _check_peer_token("encoder_listen", True)
    if not peer_token() and not _LOOPBACK.fullmatch(value.rpartition(":")[0]):
        reason = f"needs a token, because other machines reach it; set {TOKEN_VARIABLE}"
        raise _error(value, reason, param="encoder_listen")


def peer_token() -> str:
    """Return the secret that peers share, from the environment."""
    return os.environ.get(TOKEN_VARIABLE, "")


def _is_text(token: object) -> bool:
    """Return whether a token is a text without lone surrogates, which cannot be encoded."""
    return isinstance(token, str) and not any("\ud800" <= letter <= "\udfff" for letter in token)


def _check_keys(values: Mapping[str, Any], known: Collection[str], where: str = "", param: str = "kv_transfer_config") -> None:
    """Raise ConfigError for an unknown key. `where`: for which connector."""
    for name in values:
        if name not in known:
            raise ConfigError(f"<<param>> has the unknown key {short_repr(name)}{where}; {hint(name, known)}", param=param)


def _read(options: object) -> KVTransferOptions:
    if not isinstance(options, Mapping):
        raise _type_error(options, 'a mapping, such as {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}')
    values = {name: value for name, value in options.items() if value is not None}
    for name, value in values.items():
        if name not in _KEYS:
            raise ConfigError(
                f"<<param>> has the unknown key {short_repr(name)}; {hint(name, _KEYS)}", param="kv_transfer_config"
            )
        if name in _ONLY and not equals_one_of(value, _ONLY[name][0]):
            raise _error(value, f"cannot be honoured: {_ONLY[name][1]}", name)
    role = values.get("kv_role")
    if not equals_one_of(role, _ROLES):
        raise _error(role, f"must be one of {', '.join(_ROLES)}", "kv_role")
    result = KVTransferOptions(saves=role != "kv_consumer", loads=role != "kv_producer")
    return _add(result, values.get("kv_connector"), values.get("kv_connector_extra_config", {}))


def _check_served(options: KVTransferOptions) -> KVTransferOptions:
    """Raise ConfigError if an engine should serve blocks that it does not keep."""
    if options.listen and not (options.memory_bytes or options.shared_memory or options.folder):
        reason = f"serves blocks that are kept here; add {_MEMORY} or {_DISK[0]}, or give <<kv_offloading_size>>"
        raise _error(options.listen, reason, "listen")
    return options


def _add(result: KVTransferOptions, connector: object, extra: object) -> KVTransferOptions:
    """Add a connector with its options."""
    if not isinstance(connector, str) or connector not in _CONNECTORS:
        raise _error(connector, f"cannot be honoured; the connectors are {', '.join(_CONNECTORS)}", "kv_connector")
    if not isinstance(extra, Mapping):
        raise _type_error(extra, "a mapping", "kv_connector_extra_config")
    _check_keys(extra, _OPTIONS[connector], f" for {connector}")
    if connector == _MULTI:
        return _add_several(result, extra.get("connectors"))
    if connector == _MEMORY:
        return replace(result, memory_bytes=_positive(extra.get("cpu_bytes_to_use"), "cpu_bytes_to_use"))
    if connector == _SHARED_MEMORY:
        return replace(result, shared_memory=_memory_name(extra), shared_bytes=_positive(extra.get("max_bytes"), "max_bytes"))
    if connector == _PEER:
        return _add_peers(result, extra)
    if connector == _REDIS:
        url = extra.get("url")
        if not isinstance(url, str) or not re.match(r"(redis|rediss|unix)://", url):
            raise _error("(hidden)", "must be a URL such as redis://host:6379/0", "url")
        return replace(result, redis_url=url, seconds=_seconds(extra, result))
    limit = _positive(extra.get("max_bytes", _FOLDER_BYTES), "max_bytes")
    return replace(result, folder=_folder(extra), folder_bytes=limit)


def _add_several(result: KVTransferOptions, connectors: object) -> KVTransferOptions:
    if not isinstance(connectors, list | tuple) or not connectors or not all(isinstance(part, Mapping) for part in connectors):
        raise _type_error(connectors, "a list of mappings, one for each connector", "connectors")
    names = [part.get("kv_connector") for part in connectors]
    if len({str(name) for name in names}) < len(names) or _MULTI in names:
        raise _error(names, "must be different connectors", "connectors")
    for part in connectors:
        result = _add(result, part.get("kv_connector"), part.get("kv_connector_extra_config", {}))
    return result


def _add_peers(result: KVTransferOptions, extra: Mapping[str, Any]) -> KVTransferOptions:
    listen, peers = extra.get("listen"), extra.get("peers", ())
    if not isinstance(peers, list | tuple):
        raise _error(peers, "must be a list of addresses, host:port", "peers")
    token = extra.get("token", peer_token())
    if not _is_text(token):
        raise _error("(hidden)", "must be a text, without lone surrogates", "token")
    is_silent = listen is None or (isinstance(listen, str) and not listen)
    for key, address in (*([] if is_silent else [("listen", listen)]), *(("peers", peer) for peer in peers)):
        if not is_address(address):
            raise _error(address, "must be an address, host:port", key)
    if listen and not token and not _LOOPBACK.fullmatch(listen.rpartition(":")[0]):
        raise _error(listen, f"needs a token, because other machines reach it; set {TOKEN_VARIABLE}", "listen")
    if not listen and not peers:
        raise _error(dict.fromkeys(extra), "has neither listen nor peers", "kv_connector_extra_config")
    return replace(result, listen=listen or "", peers=tuple(peers), token=token, seconds=_seconds(extra, result))


def _seconds(extra: Mapping[str, Any], options: KVTransferOptions) -> float:
    seconds = extra.get("timeout_seconds", options.seconds)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 3600:
        raise _error(seconds, "must be a number of seconds above 0", "timeout_seconds")
    return float(seconds)


def is_address(address: object) -> bool:
    """Return whether a value is an address, host:port. IPv6 addresses stand in brackets: [::1]:9002."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    return match is not None and int(match[2]) < 1 << 16


def _memory_name(extra: Mapping[str, Any], param: str = "kv_transfer_config") -> str:
    """Return the name of shared memory. Raise ConfigError for one that no file can have, or if memory has no names here."""
    name = extra.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _error(name, "must be 1 to 64 letters, digits, '-' or '_'", "name", param)
    if not sys.platform.startswith("linux"):
        raise _error(name, "cannot be honoured: memory is shared through /dev/shm, which only Linux has", "name", param)
    return name


def _folder(extra: Mapping[str, Any], param: str = "kv_transfer_config") -> str:
    """Return the path of a shared folder, with `~` expanded. Raise ConfigError for what is none."""
    path = extra.get("shared_storage_path")
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise _error(path, "must be the path of a folder", "shared_storage_path", param)
    return os.fspath(os.path.expanduser(path))


def check_ports(options: KVTransferOptions, num_ranks: int) -> None:
    """Raise ConfigError if an address does not leave a port for each of several ranks (`KVTransferOptions.of_rank`)."""
    served = [("listen", options.listen)] if options.listen else []
    for key, address in (*served, *(("peers", peer) for peer in options.peers)):
        if not 0 < int(address.rpartition(":")[2]) <= 65536 - num_ranks:
            reason = f"must have a port from 1 to {65536 - num_ranks}, because each of {num_ranks} processes needs one"
            raise _error(address, reason, key)


def _next_address(address: str, count: int) -> str:
    """Return the address `count` ports after another one."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + count}"


def _positive(value: object, key: str, param: str = "kv_transfer_config") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _error(value, "must be a number of bytes, 1 or above", key, param)
    return value


def _error(value: object, reason: str, key: str = "", param: str = "kv_transfer_config") -> ConfigError:
    """Return the error of the value of an option, or of one of its keys."""
    name = f"<<param>>[{key!r}]={short_repr(value)}" if key else f"<<param=>>{short_repr(value)}"
    return ConfigError(f"{name} {reason}", param=param, value=short_repr(value))


def _type_error(value: object, wanted: str, key: str = "", param: str = "kv_transfer_config") -> ConfigError:
    """Return the error of a value of another type, which may hold a secret and is not shown."""
    name = f"<<param>>[{key!r}]" if key else "<<param>>"
    return ConfigError(f"{name} must be {wanted}, not {typed(value)}", param=param)
