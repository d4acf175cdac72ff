"""Faults on demand, for tests. This module is the only thing here that the real package has not.

    from tensorrt_llm import _test
    _test.faults.request_error = "out of memory"     # the next request fails
    _test.kill_executors(RuntimeError("CUDA error"))  # every live executor dies, as after a background exception
    _test.reset()

A child process gets its faults from FAKE_TRTLLM_FAULTS, a JSON object of the fields of `Faults`.
"""

import dataclasses
import json
import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any

from tensorrt_llm._contract import NEWEST


@dataclass
class Faults:
    """What goes wrong next. Faults are used up when they strike, but for the seconds."""

    request_error: str | None = None
    """Message of the RequestError with which the next request fails, on iteration."""
    device_error: str | None = None
    """Message of an error of the GPU: every request, running or new, fails with it, and health stays as it is. It is
    not used up."""
    hang_after: int | None = None
    """Responses that the next request for more tokens gives before all of the executor hangs, as it does once a worker
    is killed.
    """
    request_error_after: int = 0
    """Responses that request gives first."""
    event_poll_error: str | None = None
    """Why the worker cannot serialise the events of the next poll, which are lost without an error."""
    construction_error: str | None = None
    """Message of the RuntimeError that the next LLM or encoder raises while it loads."""
    construction_seconds: float = 0.0
    """How long loading takes."""
    context_finish_reason: str = "not_finished"
    """Not a fault either way: a context-only result may say "length", too."""
    longest_poll_seconds: float | None = None
    """Not a fault: no poll of events or statistics waits longer than this, whatever its timeout."""

    def take(self, name: str) -> Any:
        """The value of a fault, which is then used up."""
        value = getattr(self, name)
        setattr(self, name, None)
        return value


faults = Faults(**json.loads(os.environ.get("FAKE_TRTLLM_FAULTS", "{}")))
spans: list[dict[str, Any]] = []
"""Spans that the package's own tracer has sent."""
stats_of_all_ranks = NEWEST
"""Statistics have a row for each attention-DP rank, as in newer versions."""
untraced = 0
"""Requests without metrics, of which the tracer has warned and sent nothing."""
executors: weakref.WeakSet[Any] = weakref.WeakSet()
"""The executors of all LLMs and encoders that have not shut down."""


def live() -> int:
    """How many LLMs and encoders have been made and not shut down."""
    return len(executors)


def worker_pids() -> list[int]:
    """The MPI workers of all."""
    return [pid for executor in executors for pid in executor.worker_pids]


def requests() -> int:
    """How many requests have not ended."""
    return sum(len(executor.jobs) for executor in executors)


def asked() -> int:
    """How many requests there have been."""
    return sum(executor.asked for executor in executors)


def freeze() -> None:
    """Have every live executor hang."""
    for executor in executors:
        executor.freeze()


def kill_executors(error: Exception | None = None) -> None:
    """Have every live executor die of `error`: running results raise it, and every later call raises RuntimeError."""
    for executor in list(executors):
        executor.die(error or RuntimeError("Executor worker died during initialization or execution"))


def reset() -> None:
    """No faults, no spans, no executor that hangs, and no embeddings that nobody took."""
    global stats_of_all_ranks, untraced
    stats_of_all_ranks = NEWEST
    spans.clear()
    untraced = 0
    for executor in list(executors):
        executor.thaw()
    if (shared := sys.modules.get("tensorrt_llm._torch.shared_tensor")) is not None:
        shared.free()
    for field in dataclasses.fields(Faults):
        setattr(faults, field.name, field.default)
