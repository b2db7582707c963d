"""Which pages of other origins may use the server from a browser (CORS)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware

from .guard import App


def with_cors(app: App, origins: Sequence[str]) -> App:
    """Return an application that answers preflight requests of these origins itself, and adds the headers to responses."""
    methods = ["GET", "POST", "DELETE"]
    return CORSMiddleware(app, allow_origins=origins, allow_methods=methods, allow_headers=["*"], expose_headers=["*"])
