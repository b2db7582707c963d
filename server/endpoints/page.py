"""The page at `/`: files of `server/page`, which need no key."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fastapi.responses import Response

_FOLDER = Path(__file__).parents[1] / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
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


def page_file(path: Path) -> Callable[[], Coroutine[Any, Any, Response]]:
    """Return an endpoint that answers with this file."""
    content, kind = path.read_bytes(), _TYPES[path.suffix]

    async def endpoint() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return endpoint
