"""Downloads models from the Hub into its cache, resumes interrupted transfers, and raises errors that say what to do."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...callers.errors import CheckpointError, HubError, SensoriumError, one_line
from .hub_cache import COMMIT, MAIN, CachedModel, RemoteFile, remote_file, size_of

_log = logging.getLogger(__name__)
_THREADS = 4  # files at a time
_CHUNK = 1 << 20
_RETRIES = 5  # consecutive attempts that receive no byte
_RETRY_SECONDS = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


def list_files(cached: CachedModel, revision: str) -> tuple[str, dict[str, RemoteFile]]:
    """Ask the Hub for a revision's commit and files, and store them in the cache."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

    url = f"{constants.ENDPOINT}/api/models/{cached.name}/revision/{quote(revision, safe='')}"
    response = get_session().get(url, params={"blobs": True}, headers=_headers(), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    hf_raise_for_status(response)
    try:
        info: dict[str, Any] = response.json()
        commit, entries = info["sha"], {}
        for file in info["siblings"]:
            entry = {"size": file["size"], "blob_id": file["blobId"]}
            if file.get("lfs"):
                entry |= {"lfs_sha256": file["lfs"]["sha256"], "lfs_size": file["lfs"]["size"]}
            entries[file["rfilename"]] = entry
        files = {name: remote_file(name, entry) for name, entry in entries.items()}
        if not COMMIT.fullmatch(commit) or (COMMIT.fullmatch(revision) and commit != revision):
            raise ValueError(f"{commit} is not the commit of {revision}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{constants.ENDPOINT} did not answer as the Hub does ({type(error).__name__}: {error})"
        raise HubError(f"{reason}; check HF_ENDPOINT and proxies, or <<give_folder>>") from None
    with suppress(OSError):  # a read-only cache may already hold all files
        cached.write_files(commit, entries)
    return commit, files


def _headers() -> dict[str, str]:
    from huggingface_hub import get_token

    token = get_token()
    return {"user-agent": "sensorium", "accept-encoding": "identity"} | ({"authorization": f"Bearer {token}"} if token else {})


def fetch_files(cached: CachedModel, commit: str, files: Sequence[RemoteFile]) -> None:
    """Download the files that the snapshot lacks, with a progress bar on a terminal. Partial downloads are continued."""
    from huggingface_hub import constants
    from tqdm import tqdm

    files = [file for file in files if not cached.has(commit, file)]
    if not files:
        return
    cached.blobs.mkdir(parents=True, exist_ok=True)
    _check_disk(cached, files)
    stop, total = threading.Event(), sum(file.size for file in files)
    bar = tqdm(
        total=total,
        desc=f"Downloading {cached.name}",
        unit="B",
        unit_scale=True,
        disable=constants.HF_HUB_DISABLE_PROGRESS_BARS,
    )
    with bar, ThreadPoolExecutor(_THREADS, "sensorium-download") as pool:
        try:
            for task in as_completed([pool.submit(_Transfer(cached, commit, file, bar, stop).run) for file in files]):
                task.result()
        except BaseException:
            stop.set()  # the other transfers stop soon and keep their partial files
            raise


def _check_disk(cached: CachedModel, files: Sequence[RemoteFile]) -> None:
    """Raise HubError if the disk of the cache has too little space for these files."""
    blobs = {file.hash: file.size for file in files if size_of(cached.blobs / file.hash) != file.size}
    needed = sum(size - max(size_of(cached.blobs / f"{code}.incomplete"), 0) for code, size in blobs.items())
    if needed > shutil.disk_usage(cached.blobs).free:
        raise _disk_full(cached, needed)


@dataclass(frozen=True)
class _Transfer:
    """Downloads one file to `<hash>.incomplete`, checks its hash, renames it and links it into the snapshot."""

    cached: CachedModel
    commit: str
    file: RemoteFile
    bar: Any
    stop: threading.Event

    def run(self) -> None:
        blob = self.cached.blobs / self.file.hash
        with self._lock():
            if size_of(blob) == self.file.size:
                self.bar.update(self.file.size)
            else:
                partial = blob.with_name(f"{blob.name}.incomplete")
                resumed = partial.exists()
                if not self._complete(partial) and not (resumed and self._complete(partial)):
                    reason = f"{self.file.name} of {self.cached.name} arrived damaged: its hash is not {self.file.hash}"
                    raise CheckpointError(f"{reason}; try again")
                os.replace(partial, blob)
            self.cached.link(self.commit, self.file)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold huggingface_hub's lock of this blob, so that no other process writes it."""
        from filelock import FileLock, Timeout

        folder = self.cached.folder.parent / ".locks" / self.cached.folder.name
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{self.file.hash}.lock", mode=0o664)
        while True:
            self._check_stop()
            try:
                lock.acquire(timeout=0.2)
                break
            except Timeout:
                continue
        try:
            yield
        finally:
            lock.release()

    def _complete(self, partial: Path) -> bool:
        """Download the rest of a file. If its hash is wrong, remove it and return False."""
        failures, done = 0, max(size_of(partial), 0)
        self.bar.update(min(done, self.file.size))
        while done < self.file.size or not partial.exists():
            self._check_stop()
            before, failed = done, None
            try:
                self._append(partial, done)
            except _broken_connection() as error:
                status = getattr(getattr(error, "response", None), "status_code", 500)
                if status < 500 and status != 429:
                    raise
                failed = error
            done = max(size_of(partial), 0)
            failures = 0 if done > before else failures + 1
            if failures >= _RETRIES:
                reason = f"the Hub sends only {done} of {self.file.size} bytes of {self.file.name} of {self.cached.name}"
                raise failed or HubError(f"{reason}; try again later")
            if failures and done < self.file.size:
                self.stop.wait(_RETRY_SECONDS)
        if done == self.file.size and _digest(partial, self.file) == self.file.hash:
            return True
        partial.unlink()
        self.bar.update(-min(done, self.file.size))
        return False

    def _append(self, partial: Path, done: int) -> None:
        """Request the bytes from `done` on and append them."""
        from huggingface_hub import constants, get_session
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

        url = f"{constants.ENDPOINT}/{self.cached.name}/resolve/{self.commit}/{quote(self.file.name)}"
        headers = _headers() | ({"range": f"bytes={done}-"} if done else {})
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:  # a server that sends the whole file again
                self.bar.update(-done)
                done = 0
            with open(partial, "ab" if done else "wb") as out:
                for chunk in response.iter_bytes(_CHUNK):
                    self._check_stop()
                    out.write(chunk)
                    self.bar.update(len(chunk))
                    done += len(chunk)
                    if done > self.file.size:
                        break

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise HubError(f"the download of {self.cached.name} was stopped", code="interrupted")


def _broken_connection() -> type[Exception]:
    """Return the base class of connection errors and of responses with an error status."""
    from huggingface_hub import errors

    kind: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    return kind


def _digest(path: Path, file: RemoteFile) -> str:
    """Return the hash that the Hub gives for a file: SHA-256, or git's SHA-1 outside Git LFS."""
    start = hashlib.sha256() if len(file.hash) == 64 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with open(path, "rb") as opened:
        return hashlib.file_digest(opened, lambda: start).hexdigest()


@contextmanager
def hub_errors(cached: CachedModel, revision: str, offline: bool) -> Iterator[None]:
    """Convert errors of the Hub, the network and the disk to errors that say what to do."""
    from huggingface_hub import constants, errors

    name, page = cached.name, f"{constants.ENDPOINT}/{cached.name}"
    here = f"the cache {cached.folder.parent} lacks {name}" + (f" at {revision}" if revision != MAIN else "")
    if offline or constants.HF_HUB_OFFLINE:
        switch = "offline" if offline else "HF_HUB_OFFLINE"
        raise HubError(f"{here} or a part of it, and {switch} is set; unset it, or <<give_folder>>", value=f"{switch} is set")
    try:
        yield
    except SensoriumError:
        raise
    except errors.GatedRepoError:
        how = f"accept its licence at {page} and set HF_TOKEN to a token of that account"
        raise HubError(f"{name} is gated: {how}", code="gated") from None
    except errors.RepositoryNotFoundError:
        reason = f"{name} is neither a folder nor a model on the Hub that can be read{_near(name)}"
        raise HubError(
            f"{reason}; check the name, set HF_TOKEN if the model is private, or <<give_folder>>", code="not_found"
        ) from None
    except errors.RevisionNotFoundError:
        reason = f"{name} has no revision {revision!r}; give a branch, a tag or a commit of {page}/commits"
        raise HubError(reason, code="not_found", param="revision") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            how = f"set HF_TOKEN to a token that may read {page}"
            raise HubError(f"the Hub refuses access to {name} ({status}); {how}", code="gated") from None
        raise HubError(f"the Hub answers {status} for {name}; try again later, or run `hf download {name}`") from None
    except (ConnectionError, _broken_connection()) as error:
        cause = f"the Hub cannot be reached ({type(error).__name__}: {one_line(str(error))})"
        how = "check the network, HF_ENDPOINT and proxies, or <<give_folder>>"
        raise HubError(f"{here} or a part of it, and {cause}; {how}", value=cause) from None
    except OSError as error:
        if error.errno in _FULL:
            raise _disk_full(cached) from None
        how = "set HF_HOME to a folder that can be written"
        raise CheckpointError(f"the cache {cached.folder} cannot be written ({error.strerror or error}); {how}") from None


def _near(name: str) -> str:
    """Return " (did you mean ...?)" if a local folder has a name similar to `name`, else ""."""
    parent, last = os.path.split(name)
    names = os.listdir(parent) if os.path.isdir(parent) else []
    folders = {folder.casefold(): folder for folder in names if os.path.isdir(os.path.join(parent, folder))}
    near = get_close_matches(last.casefold(), folders, n=1)
    return f" (did you mean the folder {os.path.join(parent, folders[near[0]])}?)" if near else ""


def _disk_full(cached: CachedModel, needed: int | None = None) -> HubError:
    free = shutil.disk_usage(next(path for path in cached.blobs.parents if path.is_dir())).free
    space = "more space than there is" if needed is None else f"{needed / 1e9:.3g} GB"
    how = "free some space, or set HF_HOME to a folder on a larger disk"
    return HubError(
        f"{cached.name} needs {space}, and {free / 1e9:.3g} GB are free at {cached.folder.parent}; {how}", code="disk_full"
    )
