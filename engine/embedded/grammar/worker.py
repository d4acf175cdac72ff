"""The process that compiles each grammar first: native code cannot be interrupted, but this process can be killed.

`python -m engine.embedded.grammar.worker` reads a `Setup` and then guides from stdin and answers each on stdout, in
frames of msgpack (`protocol/frames.py`). A guide is accepted if it compiles within the parent's timeout and the memory
limit, and trial walks through it are fast. The parent then builds what the reply holds. The process ends when stdin
closes, even in the middle of a compilation.
"""

from __future__ import annotations

import os
import queue
import random
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.embedded.grammar.library import Compiled, Setup, UnsupportedGuideError, load
from engine.types import Guide
from protocol.frames import packed, read_payload

_MEMORY = 2 << 30
_STACK = 4 << 20
"""Half the stack of the parent's threads, so that a grammar that compiles here does not overflow there."""
_WALK_TOKENS = 48
_DRAWS = 8
"""Attempts to find an id that goes on where the output may end."""
_MAX_STEP_SECONDS = 0.1
_MAX_WALK_SECONDS = 1.0
_TOO_AMBIGUOUS = (
    "it is too ambiguous to be followed token by token; avoid nested repetition and alternatives that overlap"
)


class Reply(msgspec.Struct, frozen=True):
    """`error` is why the guide is rejected; `prepared` is what the engine builds the grammar from."""

    error: str = ""
    prepared: bytes = b""


def main() -> NoReturn:
    """Read frames in this thread, compile in another, so that a closed stdin ends the process at once."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # of a service manager, while the parent drains
        signal.signal(signum, signal.SIG_IGN)
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
        setup = msgspec.msgpack.decode(frames.get(), type=Setup)
        library = load(setup)
        _limit_memory()
        _answer(answers, Reply())
        while True:
            guide = msgspec.msgpack.decode(frames.get(), type=Guide)
            try:
                compiled, prepared = library.prepare(guide)
                reply = Reply(_try_out(compiled, setup), prepared)
            except UnsupportedGuideError as error:
                reply = Reply(str(error))
            except MemoryError:
                reply = Reply("it needs too much memory")
            _answer(answers, reply)
    finally:
        # Without this thread the process is useless; the parent sees the pipe close.
        traceback.print_exc()
        os._exit(1)


def _answer(answers: BinaryIO, reply: Reply) -> None:
    answers.write(packed(reply))
    answers.flush()


def _limit_memory() -> None:
    """Limit the growth of the address space to `_MEMORY`. Only Linux reports its size."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _try_out(compiled: Compiled, setup: Setup) -> str:
    """Walk the grammar as a model would, twice at random and twice repeating one token.

    Return why it is rejected, or "".
    """
    walks = (_walk(compiled, setup, random.Random(seed), sticky=seed > 1) for seed in range(4))
    return next(filter(None, walks), "")


def _walk(compiled: Compiled, setup: Setup, choose: random.Random, sticky: bool) -> str:
    position = compiled.start()
    bitmask = np.zeros((1, -(-setup.vocab_size // 32)), dtype=np.int32)
    token, spent = -1, 0.0
    for _ in range(_WALK_TOKENS):
        started = time.thread_time()
        position.fill(bitmask, 0)
        seconds = time.thread_time() - started
        if position.error:
            return position.error
        words = np.flatnonzero(bitmask[0])
        if not len(words):
            return "nothing that the model can write matches it"
        drawn = (_draw(bitmask[0], words, choose) for _ in range(_DRAWS))
        going_on = next((token_id for token_id in drawn if token_id not in setup.eos_token_ids), None)
        if going_on is None:
            return ""
        if not sticky or token < 0 or not bitmask[0, token >> 5] >> (token & 31) & 1:
            token = going_on
        started = time.thread_time()
        position.accept(token)
        seconds += time.thread_time() - started
        if position.error:
            return position.error
        spent += seconds
        if seconds > _MAX_STEP_SECONDS or spent > _MAX_WALK_SECONDS:
            return _TOO_AMBIGUOUS
    return ""


def _draw(row: NDArray[np.int32], words: NDArray[np.int64], choose: random.Random) -> int:
    """Return a random allowed id: a bit of a random one of the words that are not 0."""
    word = int(words[choose.randrange(len(words))])
    value = int(row[word])
    return 32 * word + choose.choice([bit for bit in range(32) if value >> bit & 1])


if __name__ == "__main__":
    main()
