"""Log lines as text or JSON, with the id of the request and, in JSON, of its trace.

A message is always one line, so that clients cannot forge log lines.
"""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Literal

from engine import trace
from server.http.errors import printable
from server.settings.environment import provide

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task works for."""

_MAX_MESSAGE = 4096
_OF_TENSORRT_LLM = {"debug": "VERBOSE", "info": "INFO", "warning": "WARNING", "error": "ERROR"}
"""Values of TLLM_LOG_LEVEL by LOG_LEVEL: names that both halves of TensorRT-LLM know, in capitals as its C++ half
requires.
"""


def configure(level: str, form: Literal["text", "json"]) -> None:
    """Send the logs of the whole process to standard error. TensorRT-LLM, which reads its level when it is imported,
    gets the same level unless TLLM_LOG_LEVEL is set.
    """
    provide("TLLM_LOG_LEVEL", _OF_TENSORRT_LLM[level])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("uvicorn", "asyncio", "httpx", "sse_starlette"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


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


def one_line(error: Exception) -> str:
    """Return the first and the last line of an error. Where it quotes the output of a process that has died, the last
    line is that process' error.
    """
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"


def _moment(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
