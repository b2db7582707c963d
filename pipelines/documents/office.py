"""Office files as PDFs, made by LibreOffice in a folder and profile of its own, without macros, links and time without end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from ...callers.errors import InputError
from ...mm.media.isolate import watching
from ...mm.media.policy import MediaPolicy

Kind = Literal["docx", "pptx", "xlsx", "odt", "odp", "ods", "doc", "ppt", "xls", "rtf"]
PROGRAMS = ("soffice", "libreoffice")
SECONDS = 180.0
"""Time limit of one conversion."""
_MEMORY = 6 << 20  # KiB of address space, of which LibreOffice maps much at its start
_FILES = 1 << 22  # blocks of 512 bytes of a file that it writes
_OPEN_DOCUMENT: dict[bytes, Kind] = {b"text": "odt", b"presentation": "odp", b"spreadsheet": "ods"}
_PARTS: dict[bytes, Kind] = {b"word/": "docx", b"ppt/": "pptx", b"xl/": "xlsx"}
_STREAMS: dict[str, Kind] = {"WordDocument": "doc", "PowerPoint Document": "ppt", "Workbook": "xls"}
_OLE = bytes.fromhex("d0cf11e0a1b11ae1")
_SCRIPTING = "Common/Security/Scripting"
_SETTINGS = (
    (_SCRIPTING, "MacroSecurityLevel", "3"),  # very high
    (_SCRIPTING, "DisableMacrosExecution", "true"),
    (_SCRIPTING, "DisableActiveContent", "true"),
    (_SCRIPTING, "BlockUntrustedRefererLinks", "true"),  # such as pictures that are other files, or come from the network
    ("Writer/Content/Update", "Link", "0"),  # never
    ("Calc/Content/Update", "Link", "2"),  # never
)
"""Path, name and value of settings of LibreOffice's profile."""


def office_kind(data: bytes) -> Kind | None:
    """Return the kind of an office file by its content, None for other files."""
    if data.startswith(b"PK\3\4"):
        prefix = b"mimetypeapplication/vnd.oasis.opendocument."
        if (start := data[:120].find(prefix)) >= 0:
            rest = data[start + len(prefix) :][:20]
            return next((kind for name, kind in _OPEN_DOCUMENT.items() if rest.startswith(name)), None)
        names = data[-(1 << 20) :]  # the archive's directory is at its end
        return next((kind for name, kind in _PARTS.items() if b"[Content_Types].xml" in names and name in names), None)
    if data.startswith(_OLE):
        return next((kind for name, kind in _STREAMS.items() if name.encode("utf-16-le") in data), None)
    return "rtf" if data.startswith(b"{\\rtf") else None


def office_pdf(data: bytes, policy: MediaPolicy) -> bytes:
    """Return an office file as a PDF.

    Raises:
        InputError: there is no LibreOffice, it cannot read the file, or it takes too long or too much. Also after the stop of
            an Interrupt that this runs in.
    """
    kind = office_kind(data)
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        advice = "install LibreOffice (its command soffice must be in PATH), or save it as a PDF"
        raise InputError(f"{kind} files are read through LibreOffice, which was not found; {advice}", code="unsupported")
    with tempfile.TemporaryDirectory(prefix="sensorium-office-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "profile" / "user").mkdir(parents=True)
        (folder / "profile" / "user" / "registrymodifications.xcu").write_text(_profile(), "utf-8")
        source, result = folder / f"document.{kind}", folder / "document.pdf"
        source.write_bytes(data)
        _run(program, folder, source)
        if not result.exists():
            raise InputError(
                f"LibreOffice cannot read it as {kind}; the file is broken, or needs a password", code="invalid_media"
            )
        if (size := result.stat().st_size) > policy.max_bytes:
            reason = f"its PDF has {size:,} bytes, the limit is {policy.max_bytes:,}"
            raise InputError(reason, code="over_limit", param="max_bytes", limit=policy.max_bytes, value=size)
        return result.read_bytes()


def _profile() -> str:
    """Return the settings as LibreOffice's profile has them."""
    items = (
        f'<item oor:path="/org.openoffice.Office.{path}"><prop oor:name="{name}"><value>{value}</value></prop></item>'
        for path, name, value in _SETTINGS
    )
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<oor:items xmlns:oor="http://openoffice.org/2001/registry">'
    return "\n".join((head, *items, "</oor:items>\n"))


def _run(program: str, folder: Path, source: Path) -> None:
    limits = f'ulimit -v {_MEMORY}; ulimit -f {_FILES}; ulimit -t {int(SECONDS)}; exec "$@"'
    options = ["--headless", "--norestore", "--nolockcheck", "--nodefault", "--nologo", "--convert-to", "pdf"]
    profile = f"-env:UserInstallation=file://{folder}/profile"
    command = ["sh", "-c", limits, "sh", program, profile, *options, "--outdir", str(folder), str(source)]
    env = {
        name: os.environ[name]
        for name in ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "FONTCONFIG_FILE")
        if name in os.environ
    }
    env |= {"HOME": str(folder), "TMPDIR": str(folder), "SAL_USE_VCLPLUGIN": "svp"}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=env, cwd=folder, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    with _ended(process), watching(lambda: _kill(process)):
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            reason = f"LibreOffice took longer than {SECONDS:g} s to convert it; save it as a PDF"
            raise InputError(reason, code="over_limit", limit=SECONDS) from None


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the process, with those that it has started, after the context."""
    try:
        yield
    finally:
        _kill(process)
        process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
