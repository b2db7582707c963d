"""JSON of large bodies, which a thread parses without holding the interpreter's lock for long."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from json import decoder, scanner
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

LARGE = 1 << 20
"""Bytes above which a body is parsed in a thread. The event loop parses a mebibyte in up to 10 ms."""
_CHUNK = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')


class LargeJsonRoute(APIRoute):
    """Route whose request parses a large JSON body in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return handle


class _Request(Request):
    async def body(self) -> bytes:
        try:
            return bytes(await super().body())
        except ClientDisconnect as error:  # FastAPI makes 400 of every other class
            raise HTTPException(499, "the client has disconnected") from error

    async def json(self) -> Any:
        body = await self.body()
        try:
            return loads(body) if len(body) <= LARGE else await asyncio.to_thread(loads, body)
        except json.JSONDecodeError:
            raise
        except (RecursionError, ValueError) as error:
            raise HTTPException(400, _reason(error)) from None


def _reason(error: RecursionError | ValueError) -> str:
    """Return what is wrong with a body that Python's JSON decoder refuses without a JSONDecodeError."""
    if isinstance(error, RecursionError):
        return "the body is nested too deeply; send lists and objects of fewer levels"
    if isinstance(error, UnicodeDecodeError):
        return f"the body is not JSON: byte {error.start} is not valid {error.encoding.upper()}; encode it as UTF-8"
    return "the body has an integer of too many digits; send a smaller one"


class _Decoder(json.JSONDecoder):
    """Decoder in Python code, between whose steps other threads run. The C decoder holds the lock until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.parse_string = _parse_string
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def loads(body: bytes) -> Any:
    """Return what `json.loads` returns, or raise its errors."""
    return json.loads(body) if len(body) <= LARGE else _Decoder().decode(_text(body))


def member(body: bytes, name: str) -> bytes:
    """Return the JSON of a member of an object, as it is written there. The object must be valid JSON."""
    text, decode = _text(body), (_Decoder() if len(body) > LARGE else json.JSONDecoder()).raw_decode
    member_text, end = "", _after_space(text, 0)
    if text[_after_space(text, end + 1)] == "}":
        return b""  # an empty object
    while text[end] != "}":
        key, end = decode(text, _after_space(text, end + 1))
        start = _after_space(text, _after_space(text, end) + 1)
        end = decode(text, start)[1]
        member_text = text[start:end] if key == name else member_text
        end = _after_space(text, end)
    return member_text.encode("utf-8", "surrogatepass")


def _text(body: bytes) -> str:
    return body.decode(json.detect_encoding(body), "surrogatepass")


def _after_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


def _parse_string(text: str, start: int, strict: bool = True) -> tuple[str, int]:
    """Do the same as `scanstring`, in chunks if the string is long and has no escapes."""
    end = start
    while (match := _PLAIN.match(text, end, end + _CHUNK)) is not None and match.end() == end + _CHUNK:
        end = match.end()
    end = end if match is None else match.end()
    if text[end : end + 1] == '"':
        return text[start:end], end + 1
    parsed: tuple[str, int] = decoder.scanstring(text, start, strict)  # type: ignore[attr-defined]
    return parsed
