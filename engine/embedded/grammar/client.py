"""The parent's side of one grammar worker: starts it, asks it, and kills it when it takes too long."""

from __future__ import annotations

import asyncio
import signal

import msgspec

from engine.embedded.grammar.library import Setup
from engine.embedded.grammar.worker import Reply
from engine.errors import EngineFailure
from engine.process.command import kill, module_command
from engine.types import Guide
from protocol.frames import packed, receive_payload

_START_SECONDS = 120.0
_CRASHES = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, 1)
"""Exit codes of a worker that ran out of memory or stack on a grammar."""


class WorkerTimeoutError(Exception):
    """The worker did not answer in time and was killed."""


class WorkerKilledError(Exception):
    """The worker was killed by something other than the guide, such as the kernel short of memory."""


class GrammarWorker:
    """One worker process, started on first use and anew after it was lost. Ask it one thing at a time."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process unless it runs. Raises EngineFailure if it cannot be started."""
        if self.alive:
            return
        await self.close()
        process = await asyncio.create_subprocess_exec(
            *module_command("engine.embedded.grammar.worker"),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(_START_SECONDS):
                reply = await _ask(process, self._setup)
        except (TimeoutError, EOFError, ConnectionError):
            reply = Reply(error="it did not start")
        except BaseException:
            await _end(process)
            raise
        if reply.error:
            await _end(process)
            raise EngineFailure(f"the grammar worker failed: {reply.error}")
        self._process = process

    async def compile(self, guide: Guide, timeout: float) -> Reply:
        """Return the worker's reply.

        Raises WorkerTimeoutError, WorkerKilledError, and EngineFailure if the worker cannot be started.
        """
        await self.start()
        process = self._process
        assert process is not None
        try:
            async with asyncio.timeout(timeout):
                return await _ask(process, guide)
        except TimeoutError:
            await self.close()
            raise WorkerTimeoutError from None
        except (EOFError, ConnectionError):
            if await process.wait() in _CRASHES:
                return Reply(error="compiling it needs too much memory or nests too deeply")
            raise WorkerKilledError from None
        except BaseException:
            await self.close()
            raise

    def kill(self) -> None:
        """End the process at once; a compilation under way raises WorkerKilledError."""
        if self._process is not None:
            kill(self._process)

    async def close(self) -> None:
        """Kill the worker if it runs; it has no state."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)


async def _ask(process: asyncio.subprocess.Process, message: Guide | Setup) -> Reply:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(packed(message))
    await process.stdin.drain()
    return msgspec.msgpack.decode(await receive_payload(process.stdout.readexactly), type=Reply)


async def _end(process: asyncio.subprocess.Process) -> None:
    kill(process)
    await process.communicate()
