"""Log lines of every process of a replica: text or JSON, in UTC, with the id of the request and, in JSON, of its trace.

A message is always one line, so that clients cannot forge log lines.
"""

import json
import logging
import re
import sys
import time
from contextvars import ContextVar
from typing import Literal

import msgspec

from engine import trace

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task works for."""

_MAX_MESSAGE = 4096
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_TALKATIVE = ("uvicorn", "asyncio", "httpx", "sse_starlette", "transformers", "huggingface_hub", "filelock", "urllib3")
"""Libraries whose lines below the level of a warning do not concern users."""


class LogOptions(msgspec.Struct, frozen=True):
    """Options of logging, for a process and its child processes."""

    level: str = "info"
    form: Literal["text", "json"] = "text"


_options = LogOptions()


def configure(options: LogOptions) -> None:
    """Send the logs of the whole process, and Python's warnings, to standard error."""
    global _options
    _options = options
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if options.form == "json" else TextFormatter())
    logging.basicConfig(level=options.level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def current() -> LogOptions:
    """Return the options of this process, for its child processes."""
    return _options


class TextFormatter(logging.Formatter):
    """`time LEVEL logger [request id] message`, and a traceback on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        of_request = f"[{request_id.get()}] " if request_id.get() else ""
        message = printable(record.getMessage(), _MAX_MESSAGE)
        line = f"{_moment(record)} {record.levelname} {record.name}: {of_request}{message}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the extra fields of `extra={"fields": {…}}`."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage(), _MAX_MESSAGE),
            **getattr(record, "fields", {}),
        }
        if request_id.get():
            entry["request_id"] = request_id.get()
        if traceparent := trace.headers().get("traceparent"):
            _, entry["trace_id"], entry["span_id"], _ = traceparent.split("-")
        if record.exc_info is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def printable(text: str, limit: int) -> str:
    """Return `text` on one line, without control characters and no longer than `limit`."""
    text = _UNPRINTABLE.sub(" ", text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def size_text(size: int) -> str:
    """Return a number of bytes as readable text."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _moment(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
