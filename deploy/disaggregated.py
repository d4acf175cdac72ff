"""Run prefill and decode replicas on this machine, behind nginx, or a router without it: `make serve-disaggregated`.

--encode, --prefill and --decode set the number of replicas of each role; the defaults are 0, 2 and 2. All other
arguments are settings of every replica (--engine fake, --model FOLDER). Clients connect to PORT (8000 by default).
A process that dies is restarted. Ctrl-C stops everything.
"""

import argparse
import asyncio
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx

from engine.embedded.threads import compute_threads
from engine.process.sockets import free_port
from engine.process.supervisor import End, Supervisor

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 900.0
"""Time for a replica to become ready; it may have to download its model."""
STOP_SECONDS = 40.0
MAX_FAILED_STARTS = 5
"""Starts in a row that a process may fail before everything is stopped."""
_LOOK_SECONDS = 0.1
_LONGEST_LINE = 1 << 20

log = logging.getLogger("launcher")


class StartFailed(Exception):
    """A process cannot be started, and another attempt would not help."""


class Member:
    """A process that is restarted when it dies, and ended by `stop_signal`. It is ready when the server at `url` is.

    `fail` is called with the reason if it ends by itself before it has ever been ready, or again and again.
    """

    def __init__(
        self,
        name: str,
        url: str,
        command: Sequence[str],
        environment: dict[str, str] | None,
        fail: Callable[[str], object],
        stop_signal: signal.Signals,
    ) -> None:
        self.name = name
        self.ready = asyncio.Event()
        """Set once it has been ready."""
        self.url = url
        self._command = command
        self._environment = environment
        self._fail = fail
        self._stop_signal = stop_signal
        self._process: Process | None = None
        self._ready_at: float | None = None
        self._failed_starts = 0
        self._last_line = ""
        self._stopping = False
        self._supervisor = Supervisor(self._live)
        self._supervision = asyncio.create_task(self._supervisor.run(), name=name)

    async def stop(self) -> None:
        """End the process, by SIGKILL if it takes longer than STOP_SECONDS."""
        self._stopping = True
        self._supervisor.stop()
        self._signal(self._stop_signal)
        done, _ = await asyncio.wait({self._supervision}, timeout=STOP_SECONDS)
        if not done:
            self._signal(signal.SIGKILL)
            await asyncio.wait({self._supervision})

    def _signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended. asyncio's own methods may take its exit code away."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signum)

    async def _live(self) -> End:
        """Run one process to its end."""
        self._ready_at = None
        output, written = os.pipe()  # our own: asyncio would wait for all who have it open, nginx's workers among them
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command,
                cwd=ROOT,
                env=self._environment,
                stdout=written,
                stderr=written,
                stdin=DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            os.close(output)
            return self._ended(f"{self.name} cannot be started: {error}", by_itself=True)
        finally:
            os.close(written)
        if self._stopping:  # stopped while it was being started
            self._signal(self._stop_signal)
        passing = asyncio.create_task(self._pass_on(output))
        watching = asyncio.create_task(self._watch())
        code = await process.wait()
        with suppress(ProcessLookupError):  # nginx's workers outlive their master, and keep its port
            os.killpg(process.pid, signal.SIGKILL)
        watching.cancel()
        await asyncio.wait({passing}, timeout=1)
        passing.cancel()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return self._ended(f"{self.name} ended with {how}", by_itself=code >= 0)

    def _ended(self, reason: str, by_itself: bool) -> End:
        """Decide whether another process would help."""
        if self._stopping:
            return End(reason)
        if self._ready_at is not None:
            return End(reason, time.monotonic() - self._ready_at)
        self._failed_starts += 1
        final = (by_itself and not self.ready.is_set()) or self._failed_starts >= MAX_FAILED_STARTS
        if final:
            self._fail(f"{reason}: {self._last_line}" if self._last_line else reason)
        return End(reason, final=final)

    async def _watch(self) -> None:
        """Wait until the server is ready."""
        async with httpx.AsyncClient() as client:
            while self._ready_at is None:
                with suppress(httpx.TransportError):
                    status = (await client.get(f"{self.url}/health/ready", headers=_key())).status_code
                    if status == httpx.codes.UNAUTHORIZED:
                        self._fail("the replicas require an API key: set API_KEYS in the environment")
                        return
                    if status == httpx.codes.OK:
                        break
                await asyncio.sleep(_LOOK_SECONDS)
        self._ready_at = time.monotonic()
        self._failed_starts = 0
        if self.ready.is_set():
            log.info("%s is ready again", self.name)
        self.ready.set()

    async def _pass_on(self, output: int) -> None:
        """Write what comes from a pipe to standard error, line by line."""
        reader = asyncio.StreamReader(_LONGEST_LINE)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb")
        )
        with closing(pipe):
            async for line in reader:
                text = line.decode(errors="replace")
                self._last_line = text.strip() or self._last_line
                with suppress(OSError):  # the terminal is closed, or a disk full: read on, for the process to go on
                    sys.stderr.write(f"{self.name}: {text}")


class Group:
    """The processes that belong together."""

    def __init__(self, arguments: Sequence[str], count: int) -> None:
        """Pass `arguments` to every replica; `count` replicas share the machine's cores."""
        self._arguments = arguments
        self._members: list[Member] = []
        given = {"INTERNAL_SECRET": secrets.token_hex(16), "THREADS": str(max(1, compute_threads() // count))}
        self._environment = {**given, **os.environ}
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def replicas(
        self, role: str, count: int, each: Callable[[], dict[str, str]] = dict, **variables: str
    ) -> list[str]:
        """Start `count` replicas and return their URLs once ready. `each` returns the variables of one replica."""
        ports = [free_port() for _ in range(count)]
        members = [
            self._server(f"{role}-{index}", role, port, variables | each()) for index, port in enumerate(ports, 1)
        ]
        for member in members:
            log.info("%s listens at %s", member.name, member.url)
        await self.ready(*members)
        return [f"http://127.0.0.1:{port}" for port in ports]

    async def router(self, port: int, **variables: str) -> None:
        """Start a router at `port` and wait until it is ready."""
        await self.ready(self._server("router", "router", port, variables))

    def start(
        self,
        name: str,
        url: str,
        command: Sequence[str],
        environment: dict[str, str] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> Member:
        """Start what answers at `url`."""
        member = Member(name, url, command, environment, self._fail, stop_signal)
        self._members.append(member)
        return member

    async def ready(self, *members: Member) -> None:
        """Wait until all have been ready. Raises StartFailed."""
        for member in members:
            waiting = asyncio.create_task(member.ready.wait())
            await asyncio.wait({waiting, self._failure}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if self._failure.done():
                raise StartFailed(self._failure.result())
            if not member.ready.is_set():
                raise StartFailed(f"{member.name} was not ready within {START_SECONDS:g} s")

    async def failed(self) -> str:
        """Return the reason once a process cannot be restarted."""
        return await asyncio.shield(self._failure)

    async def stop(self) -> None:
        """Stop all processes; first those that clients use, since they need the others to finish requests."""
        others = [member for member in self._members if member.name.startswith(("encode", "prefill", "aggregated"))]
        await asyncio.gather(*(member.stop() for member in self._members if member not in others))
        await asyncio.gather(*(member.stop() for member in others))

    def _server(self, name: str, role: str, port: int, variables: dict[str, str]) -> Member:
        given = {"DISAGGREGATION_MODE": role, "HOST": "127.0.0.1", "PORT": str(port)}
        command = [sys.executable, "-m", "server", *self._arguments]
        return self.start(name, f"http://127.0.0.1:{port}", command, self._environment | variables | given)

    def _fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_result(reason)


def _key() -> dict[str, str]:
    keys = os.environ.get("API_KEYS", "")
    return {"authorization": f"Bearer {keys.split(',')[0]}"} if keys else {}


def nginx_configuration(upstreams: Sequence[str], port: int, folder: Path) -> str:
    """Return nginx's shipped configuration with these upstreams."""
    text = (ROOT / "deploy/nginx/trellis.conf").read_text()
    (line,) = [line for line in text.splitlines() if line.strip().startswith("server server:8000")]
    servers = "\n".join(line.replace("server:8000", url.removeprefix("http://")) for url in upstreams)
    return text.replace(line, servers).replace("listen 8080", f"listen 127.0.0.1:{port}").replace("/tmp/", f"{folder}/")


async def serve(group: Group, start: Coroutine[Any, Any, str]) -> int:
    """Run `start`, print the URL that it returns, and go on until a signal or a failure; then stop everything."""
    logging.basicConfig(format="launcher: %(message)s")
    log.setLevel(logging.INFO)
    stopping = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    running = asyncio.create_task(_run(group, start))
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return 0
        log.error("stopping everything: %s", running.result())
        return 1
    finally:
        running.cancel()
        stop.cancel()
        await group.stop()


async def _run(group: Group, start: Coroutine[Any, Any, str]) -> str:
    """Return why it cannot go on."""
    try:
        sys.stdout.write(f"ready: {await start}/v1\n")
        sys.stdout.flush()
        return await group.failed()
    except StartFailed as error:
        return str(error)


async def run(counts: argparse.Namespace, arguments: Sequence[str], folder: Path) -> int:
    group = Group(arguments, counts.encode + counts.prefill + counts.decode)
    return await serve(group, _start(group, counts, folder))


async def _start(group: Group, counts: argparse.Namespace, folder: Path) -> str:
    """Start everything and return its URL."""
    encode, prefill = await asyncio.gather(
        group.replicas("encode", counts.encode), group.replicas("prefill", counts.prefill)
    )
    urls = {"PREFILL_URLS": ",".join(prefill)} | ({"ENCODE_URLS": ",".join(encode)} if encode else {})
    decode = await group.replicas("decode", counts.decode, **urls)
    port = int(os.environ.get("PORT", "8000"))
    url = f"http://127.0.0.1:{port}"
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if nginx is None:
        await group.router(port, ROUTE_URLS=",".join(decode), ROUTE_POLICY="least_loaded")
        return url
    (folder / "nginx.conf").write_text(nginx_configuration(decode, port, folder))
    directives = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
    command = [nginx, "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", directives]
    await group.ready(group.start("nginx", url, command, stop_signal=signal.SIGQUIT))  # it ends after its streams
    return url


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for role, count in (("encode", 0), ("prefill", 2), ("decode", 2)):
        parser.add_argument(
            f"--{role}", type=int, choices=range(0 if role == "encode" else 1, 65), default=count, metavar="N"
        )
    counts, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="trellis-") as folder:
        return asyncio.run(run(counts, arguments, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
