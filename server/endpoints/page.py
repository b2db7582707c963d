"""The page at `/`: files of `server/page`, which need no key."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fastapi.responses import Response

_FOLDER = Path(__file__).parents[1] / "page"
_ASSETS = Path(__file__).parents[2] / "assets"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_SAMPLE_TYPES = {".png": "image/png", ".flac": "audio/flac"}
_SAMPLES = (
    "media/receipt1.png",
    "media/receipt2.png",
    "media/line1.png",
    "speech/alarm.flac",
    "speech/command.flac",
    "speech/date.flac",
)
_CONTENT_POLICY = (
    *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' blob: data:"),
    *("media-src 'self' blob: data:", "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
)
_HEADERS = {
    "Content-Security-Policy": "; ".join(_CONTENT_POLICY),
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
PAGE_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}
"""Path of a request -> file."""
SAMPLE_FILES = {f"/page/samples/{name.split('/')[1]}": _ASSETS / name for name in _SAMPLES}
"""The files of the page's samples, in the same form."""


def page_file(path: Path) -> Callable[[], Coroutine[Any, Any, Response]]:
    """Return an endpoint that answers with this file."""
    content, kind = path.read_bytes(), {**_TYPES, **_SAMPLE_TYPES}[path.suffix]

    async def endpoint() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return endpoint
