"""Reader's side of the transfer tests: an owner in a process of its own, and regions of ours."""

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from engine.transfer.base import Offer, Region, Transfer
from engine.transfer.shared_memory import shared_memory
from tests.support import fake_cuda
from tests.support.environment import python_path
from tests.support.waiting import slowness

NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
)
ON_HOST = ["shared_memory", "tcp", NIXL, "cuda_ipc"]
"""Methods that run on this machine: CUDA IPC by a stand-in for the driver (`fake_cuda.py`)."""


class Owner:
    def __init__(self, method: str, *sizes: int, program: str = "transfer_owner", **environment: str) -> None:
        command = [sys.executable, "-m", f"tests.support.{program}", method, *map(str, sizes)]
        env = {**os.environ, "PYTHONPATH": python_path(), **environment}
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.offers = msgspec.msgpack.decode(bytes.fromhex(self.line()), type=tuple[Offer, ...])

    def line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline().decode().strip()
        assert line, "the owner ended"
        return line

    def say(self, command: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def owning(method: str, *sizes: int, **options: str) -> Iterator[Owner]:
    owner = Owner(method, *sizes, **options)
    try:
        yield owner
    finally:
        owner.kill()
        for pipe in (owner.process.stdin, owner.process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Memory:
    """Regions of zeros in memory that `method` can share, and a look at what is in them."""

    def __init__(self, *sizes: int, method: str = "shared_memory") -> None:
        on_gpu = method == "cuda_ipc"
        self.maps = [(fake_cuda.allocate if on_gpu else shared_memory)(size) for size in sizes]
        self.regions = [
            Region(ctypes.addressof(ctypes.c_char.from_buffer(held)), len(held), 0 if on_gpu else -1)
            for held in self.maps
        ]

    def bytes(self, region: int, end: int | None = None) -> bytes:
        return self.maps[region][:end]

    def digest(self, region: int) -> str:
        """Return a digest of a region's bytes. Copying a large region would take most of a test's time."""
        return blake3(self.maps[region]).hexdigest()

    def touched(self) -> bool:
        return any(self.bytes(region).strip(b"\0") for region in range(len(self.maps)))


def ended(transfer: Transfer, seconds: float = 20) -> None:
    """Wait until it is done; fails if that takes longer on a quiet machine. Raises what the transfer raises."""
    start = time.monotonic()
    while not transfer.done():
        waited = time.monotonic() - start
        assert waited < seconds or waited < seconds * slowness(), "the transfer does not end"
        time.sleep(0.001)


def held() -> dict[str, int]:
    """What this process holds of the things that transfers take."""
    maps = Path("/proc/self/maps").read_text()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "memories": maps.count("/memfd:trellis"),
        "threads": threading.active_count(),
    }
