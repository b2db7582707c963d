"""Serves the application below a path, for proxies that pass requests on with it."""

from __future__ import annotations

from starlette.responses import RedirectResponse

from .guard import App, Receive, Scope, Send


class RootPath:
    """ASGI middleware that takes a prefix off the paths of requests. Paths without it are served as they are.

    A proxy may therefore pass the prefix on or take it off itself.

    Args:
        prefix: such as "/vision", without a slash at its end.
    """

    def __init__(self, app: App, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        app: App = self._app
        if path == self._prefix and scope["type"] == "http":
            app = RedirectResponse(f"{self._prefix}/")  # the page's links are relative
        elif path.startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path[len(self._prefix) :]}
        await app(scope, receive, send)
