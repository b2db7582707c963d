"""A small HTTP client for streamed answers: HTTP/1.0, so that a body ends with its connection and has no chunks."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ...callers.errors import ConfigError, clip, one_line

_MAX_LINE = 1 << 24
_METRIC = re.compile(r'sensorium_(\w+)(?:\{model_name="[^"]*"\})? (\S+)')


@dataclass
class Reply:
    """A request's answer: seconds to the first token, between tokens and to the last one, and counts of tokens.

    `started`: time of the call. `error`: why it failed.
    """

    started: float = field(default_factory=time.perf_counter)
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    e2el: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of the drafted ones
    text: str = ""
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def add(self, chunk: dict[str, Any]) -> None:
        """Record a chunk of the stream."""
        if "error" in chunk:
            self.error = one_line(str(chunk["error"].get("message")))
        elif chunk.get("choices"):
            choice, seconds = chunk["choices"][0], time.perf_counter() - self.started
            delta = choice.get("delta", {"content": choice.get("text")})
            if delta.get("role") and not delta.get("content"):  # sent before the first token
                return
            if self.ttft:
                self.itl.append(seconds - self.e2el)
            else:
                self.ttft = seconds
            self.e2el = seconds
            self.text += delta.get("content") or ""
        if usage := chunk.get("usage"):
            self.prompt_tokens, self.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            details = usage.get("completion_tokens_details") or {}
            self.accepted_tokens = details.get("accepted_prediction_tokens") or 0
            self.drafted_tokens = self.accepted_tokens + (details.get("rejected_prediction_tokens") or 0)


class Client:
    """Sends requests to one server.

    Args:
        url: address of the server, such as http://127.0.0.1:8000.
        key: API key, or None.

    Raises:
        ConfigError: `url` is not an HTTP address.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {url} is not an address such as http://127.0.0.1:8000", param="base_url")
        self.url, self._host, self._tls = url, parts.hostname, parts.scheme == "https"
        self._port, self._path = parts.port or (443 if self._tls else 80), parts.path.rstrip("/")
        self._headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self._headers += f"Authorization: Bearer {key}\r\n" if key else ""

    async def lines(self, path: str, body: Any = None) -> AsyncGenerator[str, None]:
        """Send a request, and yield the lines of its response.

        Raises:
            ConfigError: the response is an error.
            OSError: there is no connection.
        """
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {self._path}{path} HTTP/1.0\r\n{self._headers}"
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls or None, limit=_MAX_LINE)
        try:
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            await writer.drain()
            status = (await reader.readline()).split()
            while (await reader.readline()).strip():
                pass
            if len(status) < 2 or status[1] != b"200":
                text = (await reader.read()).decode("utf-8", "replace")
                reason = f"{self.url}{path} answered {b' '.join(status).decode('latin-1') or 'nothing'}: {clip(one_line(text))}"
                raise ConfigError(reason)
            while line := await reader.readline():
                yield line.decode("utf-8").rstrip("\r\n")
        finally:
            writer.close()

    async def json(self, path: str, body: Any = None) -> Any:
        """Return the JSON of a response."""
        async with aclosing(self.lines(path, body)) as lines:
            return json.loads("\n".join([line async for line in lines]))

    async def stream(self, path: str, body: Any) -> Reply:
        """Send a request, and return the measured answer."""
        reply, is_done = Reply(), False
        try:
            async with aclosing(self.lines(path, body)) as lines:
                async for line in lines:
                    if line.startswith("data: {"):
                        reply.add(json.loads(line[6:]))
                    is_done = is_done or line == "data: [DONE]"
        except (ConfigError, OSError, ValueError, KeyError) as error:
            reply.error = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        if reply.error is None and not (reply.ttft and is_done):
            reply.error = f"the stream ended before {'its end, data: [DONE]' if reply.ttft else 'the first token'}"
        return reply

    async def metrics(self) -> dict[str, float]:
        """Return sensorium's metrics without other labels than the model's name; empty for servers without such metrics."""
        try:
            async with aclosing(self.lines("/metrics")) as lines:
                matches = [_METRIC.fullmatch(line) async for line in lines]
        except ConfigError:
            return {}
        return {match[1]: float(match[2]) for match in matches if match}
