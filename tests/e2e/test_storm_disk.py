"""Disks that fill up while the server runs: temporary files, shared memory and the log."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from engine.process.sockets import free_port
from tests.support.servers import ROOT, metric, running
from tests.support.storm import SEEDS, TEXT, right
from tests.support.waiting import slowness

SECONDS = 1.5
PRIVATE = 'mount -t tmpfs -o size=8m tmpfs "$0" && mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@" 2>"$0/log"'
"""A shell's script: a view of the machine in which the folder $0 and shared memory are small disks."""
MAY_MOUNT = subprocess.run(
    ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
).returncode


def command(port: int) -> list[str]:
    return [sys.executable, "-m", "server", "--engine", "fake", "--port", str(port), "--api-processes", "2"]


@contextlib.contextmanager
def started(port: int, arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server with its temporary files in `folder` and its log on a device without room; it ends cleanly."""
    variables = {**os.environ, "TMPDIR": str(folder)}
    with (
        Path("/dev/full").open("wb") as full,
        subprocess.Popen(arguments, cwd=ROOT, stderr=full, env=variables) as process,
    ):
        try:
            deadline = time.monotonic() + 30 * slowness()
            while sum(map(accepts, listening(process))) < 2 or not ready(port):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(20 * slowness()) == 0
        finally:
            process.kill()


def listening(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return running(psutil.Process(process.pid), "server.process.child")


def accepts(process: psutil.Process) -> bool:
    """Whether the process listens: the first that does gets all connections."""
    return any(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("tcp"))


def ready(port: int) -> bool:
    """Whether all processes take requests, whichever of them is asked."""
    url = f"http://127.0.0.1:{port}"
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health/ready").status_code == 200 and metric(url, "trellis_ready") == 1
    return False


async def storm(port: int, rng: random.Random, fill: Path | None) -> None:
    """Ask for all kinds of things, each with a series of metrics of its own, while `fill` takes all room at times."""
    end = time.monotonic() + SECONDS

    async def ask() -> None:
        while time.monotonic() < end:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                assert await right(client)
                assert (await client.post("/tokenize", json={"model": "fake", "prompt": TEXT})).status_code == 200
                assert (await client.get(f"/v1/models/none-{rng.random()}")).status_code == 404
                assert (await client.post("/v1/chat/completions", json={"messages": 1})).status_code == 400
                body = {"model": "fake", "prompt": TEXT, "max_tokens": 40, "stream": True, "ignore_eos": True}
                assert (await client.post("/v1/completions", json=body)).text.endswith("data: [DONE]\n\n")
                page = await client.get("/metrics")
                assert page.status_code == 200, page.text

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(ask())
        while fill is not None and time.monotonic() < end:
            await asyncio.sleep(rng.random() * 0.5)
            with contextlib.suppress(OSError), fill.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            await asyncio.sleep(rng.random())
            await asyncio.to_thread(fill.unlink)


@pytest.mark.skipif(MAY_MOUNT != 0, reason="only root can make a small disk")
def test_full_disks_cost_no_answer(short_path: Path) -> None:
    port = free_port()
    wrapped = ["unshare", "-m", "sh", "-c", PRIVATE, str(short_path), *command(port)]
    with started(port, wrapped, short_path) as process:
        pids = [child.pid for child in listening(process)]
        inside = Path(f"/proc/{process.pid}/root")
        shared = inside / "dev/shm/fill"
        with contextlib.suppress(OSError), shared.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        disk = inside / short_path.relative_to("/")
        for seed in SEEDS:
            asyncio.run(storm(port, random.Random(seed), disk / "fill"))
        assert [child.pid for child in listening(process)] == pids
        files = [file.stat() for file in disk.glob("trellis-*/metrics/*.db")]
        assert len(files) >= 12 and all(file.st_blocks * 512 >= file.st_size for file in files), "no page is missing"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has this device")
def test_a_log_that_cannot_be_written_costs_no_answer(tmp_path: Path) -> None:
    port = free_port()
    with started(port, command(port), tmp_path) as process:
        pids = [child.pid for child in listening(process)]
        asyncio.run(storm(port, random.Random(0), None))
        engine = next(child for child in psutil.Process(process.pid).children() if child.pid not in pids)
        engine.kill()
        deadline = time.monotonic() + 20 * slowness()
        while not ready(port):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert [child.pid for child in listening(process)] == pids
