"""The process that compiles each grammar first.

xgrammar's C++ code cannot be interrupted, but this process can be killed.

`python -m engine.embedded.grammar.worker` reads a `Setup` and then guides from stdin and answers each on stdout, in
frames of msgpack (`protocol/frames.py`). A guide is accepted if it compiles within the parent's timeout and the memory
limit, without a warning (xgrammar warns about features it ignores), and trial walks through it are fast. The parent
repeats quick compilations; the result of a slow one is sent. The process ends when stdin closes, even in the middle of
a compilation.
"""

from __future__ import annotations

import os
import queue
import random
import resource
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import msgspec

from engine.types import Guide
from protocol.frames import packed, read_payload

if TYPE_CHECKING:
    import xgrammar

_REPEATABLE_SECONDS = 0.5
"""The parent repeats compilations that take no longer: the result is large, and deserialising it is slow."""
_MEMORY = 2 << 30
_STACK = 4 << 20
"""Half the stack of the parent's threads, so that a grammar that compiles here does not overflow there."""
_WALK_TOKENS = 96
_MAX_STEP_SECONDS = 0.1
_MAX_WALK_SECONDS = 1.0


class Setup(msgspec.Struct, frozen=True):
    tokenizer_folder: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Reply(msgspec.Struct, frozen=True):
    """`error` is why the guide is rejected.

    `compiled` is xgrammar's serialisation, or empty if compiling again is faster.
    """

    error: str = ""
    compiled: bytes = b""


def main() -> NoReturn:
    """Read frames in this thread, compile in another, so that a closed stdin ends the process at once."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.stack_size(_STACK)
    threading.Thread(target=_serve, args=(frames, answers), daemon=True).start()
    while True:
        frames.put(read_payload(_read))


def _read(size: int) -> bytes:
    data = sys.stdin.buffer.read(size)
    if len(data) < size:
        os._exit(0)  # the parent has closed the pipe
    return data


def _serve(frames: queue.SimpleQueue[bytes], answers: BinaryIO) -> None:
    try:
        worker = _Worker(msgspec.msgpack.decode(frames.get(), type=Setup))
        _answer(answers, Reply())
        while True:
            _answer(answers, worker.compile(msgspec.msgpack.decode(frames.get(), type=Guide)))
    finally:
        # Without this thread the process is useless; the parent sees the pipe close.
        traceback.print_exc()
        os._exit(1)


def _answer(answers: BinaryIO, reply: Reply) -> None:
    answers.write(packed(reply))
    answers.flush()


class _Worker:
    def __init__(self, setup: Setup) -> None:
        # Slow to import, and therefore done in this thread.
        from engine.embedded.grammar.guides import load_compiler  # noqa: PLC0415

        self._setup = setup
        _, self._compiler = load_compiler(setup)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        _limit_memory()

    def compile(self, guide: Guide) -> Reply:
        from engine.embedded.grammar.guides import UnsupportedGuideError, compile_guide, plain  # noqa: PLC0415

        started = time.monotonic()
        try:
            with self._warnings() as warnings:
                compiled = compile_guide(self._compiler, guide)
        except UnsupportedGuideError as error:
            return Reply(error=str(error) or "it is not valid")
        except MemoryError:
            return Reply(error="it needs too much memory")
        if warnings:
            return Reply(error=f"it cannot be enforced in full: {plain(chr(10).join(warnings))}")
        seconds = time.monotonic() - started
        if reason := _try_out(compiled, self._setup):
            return Reply(error=reason)
        return Reply(compiled=compiled.serialize_json().encode() if seconds > _REPEATABLE_SECONDS else b"")

    @contextmanager
    def _warnings(self) -> Iterator[list[str]]:
        """Divert standard error; at the end, append the warnings that xgrammar wrote to the list."""
        found: list[str] = []
        saved = os.dup(2)
        os.dup2(self._stderr.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            self._stderr.seek(0)
            written = self._stderr.read().decode(errors="replace")
            self._stderr.seek(0)
            self._stderr.truncate()
            found += [line for line in written.splitlines() if "Warning: " in line]


def _limit_memory() -> None:
    """Limit the growth of the address space to `_MEMORY`. Only Linux reports its size."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _try_out(compiled: xgrammar.CompiledGrammar, setup: Setup) -> str:
    """Walk the grammar as a model would, twice at random and twice repeating one token.

    Return why it is rejected, or "".
    """
    walks = (_walk(compiled, setup, random.Random(seed), sticky=seed > 1) for seed in range(4))
    return next(filter(None, walks), "")


def _walk(compiled: xgrammar.CompiledGrammar, setup: Setup, choose: random.Random, sticky: bool) -> str:
    import numpy as np  # noqa: PLC0415
    import xgrammar  # noqa: PLC0415

    matcher = xgrammar.GrammarMatcher(compiled)
    bitmask = xgrammar.allocate_token_bitmask(1, setup.vocab_size)
    bits = bitmask.numpy().view(np.uint8)
    token, spent = -1, 0.0
    for _ in range(_WALK_TOKENS):
        started = time.thread_time()
        matcher.fill_next_token_bitmask(bitmask)
        seconds = time.thread_time() - started
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if not len(allowed):
            return "nothing that the model can write matches it"
        going_on = [token_id for token_id in choose.choices(allowed, k=8) if token_id not in setup.eos_token_ids]
        if not going_on:
            return ""
        if not sticky or token < 0 or not bits[0, token >> 3] >> (token & 7) & 1:
            token = int(going_on[0])
        started = time.thread_time()
        matcher.accept_token(token)
        seconds += time.thread_time() - started
        spent += seconds
        if seconds > _MAX_STEP_SECONDS or spent > _MAX_WALK_SECONDS:
            return (
                "it is too ambiguous to be followed token by token; "
                "avoid nested repetition and alternatives that overlap"
            )
    return ""


if __name__ == "__main__":
    main()
