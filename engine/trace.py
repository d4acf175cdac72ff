"""Spans of a request: the seam between its stages and `server/http/tracing.py`, free of any library.

The current span is in a context variable, as the request's id is: tasks inherit it. Without tracing no span is set, and
everything here does next to nothing. Spans carry names, numbers and codes; never what a user has written.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from engine.errors import QueueFull, QueueTimeout
from engine.types import PromptReport

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]


class Span(Protocol):
    """A timed operation that has begun."""

    @property
    def headers(self) -> dict[str, str]:
        """W3C trace context (`traceparent`, perhaps `tracestate`) for requests made on its behalf."""
        ...

    def child(
        self, name: str, attributes: Attributes | None = None, *, client: bool = False, start: int | None = None
    ) -> "Span":
        """Begin a child span. `client`: another process does the work. `start`: nanoseconds since the epoch, if not
        now."""
        ...

    def set(self, attributes: Attributes) -> None: ...

    def fail(self, code: str, *, ours: bool = True) -> None:
        """Mark the span as failed; `code` is for programs. `ours`: the request itself was valid."""
        ...

    def end(self, at: int | None = None) -> None:
        """End the span. `at`: nanoseconds since the epoch, if not now."""
        ...


current: ContextVar[Span | None] = ContextVar("span", default=None)
"""The current span of this task."""


def headers() -> dict[str, str]:
    """Return the W3C trace context of the current span; empty without tracing."""
    span = current.get()
    return span.headers if span is not None else {}


@contextmanager
def span(name: str, attributes: Attributes | None = None, *, client: bool = False) -> Iterator[None]:
    """Trace the block as a part of the current span."""
    parent = current.get()
    if parent is None:
        yield
        return
    made = parent.child(name, attributes, client=client)
    token = current.set(made)
    try:
        yield
    except BaseException as error:
        _fail(made, error)
        raise
    finally:
        current.reset(token)
        made.end()


class Stages:
    """Spans of one sequence: `queue` and `prefill`, known once its first token has come, and `decode`."""

    __slots__ = ("_attributes", "_first", "_parent", "_start")

    def __init__(self, index: int = 0) -> None:
        """`index` is the number of the sequence in its request."""
        self._parent = current.get()
        self._attributes = {"trellis.choice": index}
        self._start = time.time_ns()
        self._first = 0

    def begun(self, report: PromptReport, prompt_tokens: int) -> None:
        """Note the first token."""
        if self._parent is None:
            return
        self._first = max(self._start, time.time_ns())  # the clock may have been set back
        prefilling = min(self._start + int(report.queue_seconds * 1e9), self._first)
        self._parent.child("queue", self._attributes, start=self._start).end(prefilling)
        tokens = {
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
        }
        self._parent.child("prefill", {**self._attributes, **tokens}, start=prefilling).end(self._first)
        if not self._attributes["trellis.choice"]:
            waited, first = (prefilling - self._start) / 1e9, (self._first - self._start) / 1e9
            self._parent.set({"gen_ai.latency.time_in_queue": waited, "gen_ai.latency.time_to_first_token": first})

    def end(self, tokens: int, error: BaseException | None = None) -> None:
        """Note the end. Without a first token there is either `prefill` or `queue`: how long it waited is not known."""
        if self._parent is None:
            return
        waiting = "queue" if isinstance(error, QueueFull | QueueTimeout) else "prefill"
        name, start = ("decode", self._first) if self._first else (waiting, self._start)
        last = self._parent.child(name, {**self._attributes, "gen_ai.usage.output_tokens": tokens}, start=start)
        if error is not None:
            _fail(last, error)
        last.end()
        self._parent = None

    def stop(self, tokens: int) -> None:
        """Note that the sequence was cancelled, unless it has ended."""
        self.end(tokens, asyncio.CancelledError())


def _fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed by the error's type: messages may repeat what a user has written."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        span.set({"trellis.cancelled": True})
    else:
        span.fail(type(error).__name__)
