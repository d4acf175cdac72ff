"""What an API process does to itself before it serves."""

import platform
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from routers.state import ReplicaState
from server.process.serving import DrainingServer, LauncherLink
from server.settings import Settings
from tests.support.environment import bare

THREADS = """
import ctypes, sys, threading
from server.process.serving import limit_arenas
libc = ctypes.CDLL(None)
libc.fopen.restype = libc.malloc.restype = ctypes.c_void_p
if sys.argv[2] == "limited":
    limit_arenas()
together = threading.Barrier(12)
def allocate():
    together.wait()
    libc.malloc(3000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_memory_does_not_grow_with_threads(tmp_path: Path) -> None:
    """As many arenas as threads at first, where the number of cores allows it."""
    arenas = {}
    for how in ("usual", "limited"):
        command = [sys.executable, "-c", THREADS, str(tmp_path / how), how]
        subprocess.run(command, check=True, env=bare(GLIBC_TUNABLES="glibc.malloc.arena_max=12"))
        arenas[how] = (tmp_path / how).read_text().count("<heap ")
    assert arenas == {"usual": 12, "limited": 2}


async def test_a_drain_waits_until_the_replica_has_left_its_registry() -> None:
    """Others send requests to what they find there."""

    async def nothing(*_: Any) -> None: ...

    replica = ReplicaState("model", registered=True)
    server = DrainingServer(uvicorn.Config(nothing), Settings(), 0.0)
    server.lifespan = SimpleNamespace(state={"replica": replica})  # type: ignore[assignment]
    server._drain()
    assert not await server.on_tick(1) and replica.stopping.is_set()
    replica.registered = False
    assert await server.on_tick(2)


@pytest.mark.parametrize("unread", [b"", b"ready\n"])
def test_a_process_drains_when_its_launcher_is_lost(unread: bytes) -> None:
    """With a report that the launcher has not read, the socket is reset."""

    async def nothing(*_: Any) -> None: ...

    drains = []

    class Server(DrainingServer):
        def _drain(self) -> None:
            drains.append(self)

    server = Server(uvicorn.Config(nothing), Settings(), 0.0)
    launcher, own = socket.socketpair()
    with own:
        own.sendall(unread)
        launcher.close()
        server.obey(LauncherLink(own.fileno(), speaks=True, joins=False))
    assert drains == [server]
