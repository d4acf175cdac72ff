"""The end of a process: its exit code is kept, whenever it dies."""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Iterator

import pytest

from engine.embedded.vision.process import EncoderProcess
from engine.process.command import kill


@pytest.fixture
def watched_by_the_loop() -> Iterator[None]:
    """Have the event loop wait for children, as from Python 3.12 on, instead of a thread for each."""
    if sys.version_info >= (3, 12):
        yield
        return
    before = asyncio.get_child_watcher()
    asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
    yield
    asyncio.set_child_watcher(before)


def kill_encoder(process: Process) -> None:
    with socket.socket() as channel:
        EncoderProcess(process, channel).kill()


@pytest.mark.parametrize("end", [kill, kill_encoder])
@pytest.mark.usefixtures("watched_by_the_loop")
async def test_the_exit_code_of_a_process_that_has_just_died_is_kept(end: Callable[[Process], None]) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    os.kill(process.pid, signal.SIGTERM)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - the loop must not learn of it
    end(process)
    assert await process.wait() == -signal.SIGTERM
    end(process)


async def test_a_process_that_runs_is_killed() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    kill(process)
    assert await process.wait() == -signal.SIGKILL
