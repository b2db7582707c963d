"""The server's log on stderr: one line, or one JSON object, for each record."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from .config import ServerConfig

FIELDS = "fields"
"""Attribute of a record: values that stand beside its message, by name."""
_PACKAGE = __name__.partition(".")[0]
_LOGGERS = (_PACKAGE, "uvicorn.error")

_COUNTED = (
    *("Invalid HTTP request received.", "Unsupported upgrade request."),
    "ASGI callable returned without completing handshake.",  # of a refused WebSocket
)
"""Messages of uvicorn that anyone can cause as often as they like; a metric or the access log has them instead."""


class TextFormatter(logging.Formatter):
    """Writes the time, the level, the message and the record's fields. A traceback follows on further lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _timestamp(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        pairs = getattr(record, FIELDS, {}).items()
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in pairs if value is not None)])


class JsonFormatter(logging.Formatter):
    """Writes one JSON object on one line, with the traceback as a text."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def json_line(message: str, level: int = logging.INFO) -> str:
    """Return a record as one line of JSON."""
    return JsonFormatter().format(logging.LogRecord(_PACKAGE, level, "", 0, message, None, None))


@contextmanager
def logging_to_stderr(config: ServerConfig) -> Iterator[None]:
    """Write the log of sensorium and of uvicorn to stderr, with the level and the format of the options."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: record.msg not in _COUNTED)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    loggers[0].setLevel(config.log_level.upper())
    try:
        yield
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def _timestamp(record: logging.LogRecord) -> str:
    """Return the time of a record in UTC, in the form of RFC 3339 with milliseconds."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
