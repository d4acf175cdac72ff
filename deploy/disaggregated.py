"""Run prefill and decode replicas on this machine, behind nginx if it is installed: `make serve-disaggregated`.

--encode, --prefill and --decode set the number of replicas of each role; the defaults are 0, 2 and 2. All other
arguments are settings of every replica (--engine fake, --model FOLDER). Clients connect to PORT (8000 by default).
Ctrl-C stops everything.
"""

import argparse
import asyncio
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx

from engine.embedded.threads import compute_threads

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 900.0
"""Time for a replica to become ready; it may have to download its model."""
STOP_SECONDS = 40.0


class Group:
    """Processes, and the tasks that forward their logs."""

    def __init__(self, arguments: Sequence[str], count: int) -> None:
        """Pass `arguments` to every replica; `count` replicas share the machine's cores."""
        self._arguments = arguments
        self._processes: dict[str, Process] = {}
        self._logs: set[asyncio.Task[None]] = set()
        given = {"INTERNAL_SECRET": secrets.token_hex(16), "THREADS": str(max(1, compute_threads() // count))}
        self._environment = {**given, **os.environ}

    async def replicas(
        self, role: str, count: int, each: Callable[[], dict[str, str]] = dict, **variables: str
    ) -> list[str]:
        """Start `count` replicas and return their URLs once ready. `each` returns the variables of one replica."""
        urls = []
        for index in range(1, count + 1):
            port = free_port()
            environment = {
                **self._environment,
                **variables,
                **each(),
                "DISAGGREGATION_MODE": role,
                "HOST": "127.0.0.1",
                "PORT": str(port),
            }
            await self.start(f"{role}-{index}", [sys.executable, "-m", "server", *self._arguments], environment)
            urls.append(f"http://127.0.0.1:{port}")
        for url in urls:
            await self.ready(url)
        return urls

    async def router(self, port: int, **variables: str) -> None:
        """Start a router at `port` and wait until it is ready."""
        environment = {
            **self._environment,
            **variables,
            "DISAGGREGATION_MODE": "router",
            "HOST": "127.0.0.1",
            "PORT": str(port),
        }
        await self.start("router", [sys.executable, "-m", "server", *self._arguments], environment)
        await self.ready(f"http://127.0.0.1:{port}")

    async def start(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=environment, stdout=PIPE, stderr=STDOUT, stdin=DEVNULL, start_new_session=True
        )
        self._processes[name] = process
        self._logs.add(asyncio.create_task(_pass_on(name, process)))

    async def first_end(self) -> str:
        """Wait for the first process that ends, and return its name."""
        waits = {asyncio.create_task(process.wait()): name for name, process in self._processes.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()]
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self) -> None:
        """Stop all processes; first those that clients use, since they need the others to finish requests."""
        others = [
            process for name, process in self._processes.items() if name.startswith(("encode", "prefill", "aggregated"))
        ]
        await asyncio.gather(*(_end(process) for process in self._processes.values() if process not in others))
        await asyncio.gather(*map(_end, others))
        if self._logs:
            await asyncio.wait(self._logs, timeout=1)

    async def ready(self, url: str) -> None:
        """Wait until the server at `url` is ready. Raises SystemExit if a process ends meanwhile."""
        async with asyncio.timeout(START_SECONDS), httpx.AsyncClient() as client:
            while True:
                for name, process in self._processes.items():
                    if process.returncode is not None:
                        raise SystemExit(f"{name} ended with exit code {process.returncode}")
                try:
                    status = (await client.get(f"{url}/health/ready", headers=_key())).status_code
                    if status == httpx.codes.OK:
                        return
                    if status == httpx.codes.UNAUTHORIZED:
                        raise SystemExit("the replicas require an API key: set API_KEYS in the environment")
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        process.kill()


def _key() -> dict[str, str]:
    keys = os.environ.get("API_KEYS", "")
    return {"authorization": f"Bearer {keys.split(',')[0]}"} if keys else {}


async def _pass_on(name: str, process: Process) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        sys.stderr.write(f"{name}: {line.decode(errors='replace')}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def nginx_configuration(upstreams: Sequence[str], port: int, folder: Path) -> str:
    """Return nginx's shipped configuration with these upstreams."""
    text = (ROOT / "deploy/nginx/trellis.conf").read_text()
    (line,) = [line for line in text.splitlines() if line.strip().startswith("server server:8000")]
    servers = "\n".join(line.replace("server:8000", url.removeprefix("http://")) for url in upstreams)
    return text.replace(line, servers).replace("listen 8080", f"listen 127.0.0.1:{port}").replace("/tmp/", f"{folder}/")


async def serve(group: Group, work: Coroutine[Any, Any, str]) -> int:
    """Run `work` until a signal or until it returns the name of a process that has ended; then stop everything."""
    stopping = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    running = asyncio.create_task(work)
    try:
        await asyncio.wait({running, stop := asyncio.create_task(stopping.wait())}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not running.done():
            return 0
        sys.stderr.write(f"{running.result()} has ended; stopping everything\n")
        return 1
    finally:
        running.cancel()
        await group.stop()


async def run(counts: argparse.Namespace, arguments: Sequence[str], folder: Path) -> int:
    group = Group(arguments, counts.encode + counts.prefill + counts.decode)
    return await serve(group, _serve(group, counts, folder))


async def _serve(group: Group, counts: argparse.Namespace, folder: Path) -> str:
    """Start everything, print the URL, and return the name of the first process that ends."""
    encode, prefill = await asyncio.gather(
        group.replicas("encode", counts.encode), group.replicas("prefill", counts.prefill)
    )
    urls = {"PREFILL_URLS": ",".join(prefill)} | ({"ENCODE_URLS": ",".join(encode)} if encode else {})
    decode = await group.replicas("decode", counts.decode, **urls)
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if nginx is None:
        sys.stdout.write(f"ready, without nginx: {' and '.join(f'{url}/v1' for url in decode)}\n")
    else:
        port = int(os.environ.get("PORT", "8000"))
        (folder / "nginx.conf").write_text(nginx_configuration(decode, port, folder))
        directives = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
        await group.start(
            "nginx", [nginx, "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", directives]
        )
        await group.ready(f"http://127.0.0.1:{port}")
        sys.stdout.write(f"ready: http://127.0.0.1:{port}/v1\n")
    sys.stdout.flush()
    return await group.first_end()


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
