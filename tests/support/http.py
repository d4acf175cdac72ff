"""An application in this process, and a server in a process of its own, for the tests of HTTP."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from server.app import create_app
from server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
READY = re.compile(r"ready: (http://\S+)/(?:v1|prefill|encode) serves")
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


@asynccontextmanager
async def application(wait: bool = True, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, Any]]]:
    """A client of the application on a fake engine in this process, and the lifespan's state."""
    app = create_app(Settings(engine="fake", engine_process=False, **settings))
    async with app.router.lifespan_context(app) as state:
        assert state is not None

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://test") as client:
            while wait and not state["replica"].ready:
                assert state["replica"].failure is None, state["replica"].failure
                await asyncio.sleep(0.005)
            yield client, dict(state)


class ServerProcess:
    """`python -m server` with its log; `url` once it is ready."""

    def __init__(self, *flags: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "server", "--port", "0", "--engine", "fake", *flags]
        variables = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=variables)
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                self.lines.append(line)
                if match := READY.search(line):
                    self.url = match[1]
                    self._ready.set()
        self._ready.set()

    def wait_ready(self, seconds: float = 60) -> None:
        assert self._ready.wait(seconds), self.log
        assert self.url, self.log

    def wait(self, timeout: float = 20) -> int:
        """The exit code, once the log is read to its end."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        return next(child for child in self.children() if module in child.cmdline())

    def metric(self, name: str) -> float:
        """Sum of the samples of a metric."""
        page = httpx.get(f"{self.url}/metrics").text
        return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if re.match(rf"{name}(\{{|\s)", line))

    def wait_metric(self, name: str, value: float, timeout: float = 20) -> None:
        deadline = time.monotonic() + timeout
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}"
            time.sleep(0.05)


@contextmanager
def serving(*flags: str, environment: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """A ready server, ended afterwards if it still runs; it leaves no process behind."""
    server = ServerProcess(*flags, environment=environment)
    children: list[psutil.Process] = []
    try:
        server.wait_ready()
        children = server.children()
        yield server
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):  # the second ends what still runs
            if server.process.poll() is None:
                server.process.send_signal(signum)
                time.sleep(0.2)
        server.wait()
        _, left = psutil.wait_procs(children, timeout=20)
        for child in left:
            child.kill()
    assert not left, f"left behind: {left}"
