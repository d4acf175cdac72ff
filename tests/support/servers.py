"""An application in this process, and a server in a process of its own, for the tests of HTTP."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvicorn

from routers.state import ReplicaState
from server.app import create_app
from server.process.serving import listen, url_of, uvicorn_config
from server.settings import Settings
from tests.support.forks import Forked, fork
from tests.support.waiting import slowness

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


async def page_with_stats(client: httpx.AsyncClient, path: str = "/metrics") -> str:
    """The page of metrics, once the engine's statistics, taken ten times a second, say that it has nothing to do."""
    idle = re.compile(r"^trtllm_num_requests_running\{.* 0\.0$", re.MULTILINE)
    async with asyncio.timeout(60):
        while not idle.search(page := (await client.get(path)).text):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return page


class ServerThread:
    """A ready server, on the fake engine by default, in a thread of this process, for tests that need its connections
    alone.
    """

    def __init__(self, **settings: Any) -> None:
        settings = {"engine": "fake", "engine_process": False} | settings
        self._server = uvicorn.Server(uvicorn_config(Settings(**settings)))
        self._listener = listen("127.0.0.1", 0)
        self.url = url_of(self._listener)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)

    @property
    def replica(self) -> ReplicaState:
        replica: ReplicaState = self._server.lifespan.state["replica"]
        return replica

    def __enter__(self) -> "ServerThread":
        self._thread.start()
        while not (self._server.started and self.replica.ready):
            assert self._thread.is_alive()
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


class ServerProcess:
    """`python -m server` with its log; `url` once it is ready. It is forked, unless something has to come before it."""

    def __init__(
        self, *flags: str, environment: dict[str, str] | None = None, preexec_fn: Callable[[], None] | None = None
    ) -> None:
        arguments = ["--port", "0", "--engine", "fake", *flags]
        variables = {**os.environ, **(environment or {})}
        read, write = os.pipe()
        self.process: Forked | subprocess.Popen[bytes]
        if preexec_fn is None and "LD_PRELOAD" not in variables:
            self.process = fork(arguments, variables, write)
        else:
            command = [sys.executable, "-m", "server", *arguments]
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=write, env=variables, preexec_fn=preexec_fn)
        os.close(write)
        self._stderr = os.fdopen(read)
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._stderr as stderr:
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
        """The exit code, once the log is read to its end. A busy machine gets longer than `timeout`."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        try:
            code = self.process.wait(0 if self.process.poll() is not None else timeout * (slowness() - 1))
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(5)
        self._stderr.close()
        return code

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def running(self, module: str) -> list[psutil.Process]:
        return running(psutil.Process(self.process.pid), module)

    def child(self, module: str) -> psutil.Process:
        return self.running(module)[0]

    def metric(self, name: str) -> float:
        return metric(self.url, name)

    def wait_metric(self, name: str, value: float, timeout: float = 60) -> None:
        wait_metric(self.url, name, value, timeout)


def running(parent: psutil.Process, module: str) -> list[psutil.Process]:
    """The processes below `parent` that run a module. Others may end while they are looked at."""
    found = []
    for child in parent.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if module in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def metric(url: str, name: str) -> float:
    """Sum of the samples of a metric."""
    page = httpx.get(f"{url}/metrics").text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if re.match(rf"{name}(\{{|\s)", line))


def wait_metric(url: str, name: str, value: float, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while (now := metric(url, name)) != value:
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
                with suppress(subprocess.TimeoutExpired):
                    server.process.wait(0.2)
        server.wait()
        _, left = psutil.wait_procs(children, timeout=20)
        for child in left:
            child.kill()
    assert not left, f"left behind: {left}"
