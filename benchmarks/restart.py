"""Measure what a dead engine costs: `python -m benchmarks.restart`.

The engine's process is killed at random times while clients stream: with nothing beside it, as the server is by
default, with the memory service (`trellis memory`), and with a standby process as well, which has imported the
engine's code or loaded the model. It prints the seconds from a kill to the next first token, of a request that was
sent after the kill, and the memory of one and of two replicas, before and after the kills.
"""

import argparse
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import psutil

from benchmarks.servers import ROOT, Server, Spec, serving
from engine.memory.client import status
from engine.memory.wire import MemoryServiceError

SETUPS = {"nothing": "false", "default": "auto", "memory service": "false", "imports": "imports", "standby": "true"}
"""ENGINE_STANDBY of each."""
_ALONE = ("nothing", "default")
"""Those without a memory service."""
_HOST = "engine.process.host"
_PAUSE = 0.01
_LONGEST = 120.0
_SETTLED = 15.0
"""Seconds after which processes for guides, which start last, are there."""


class Clients:
    """Threads that stream one chat after the other. A refused or broken one is asked again at once."""

    def __init__(self, server: Server, count: int) -> None:
        self._url = urlsplit(server.url)
        self._body = json.dumps(
            {
                "model": server.target.model,
                "messages": [{"role": "user", "content": "Tell a long story."}],
                "max_tokens": 400,
                "stream": True,
                "ignore_eos": True,
            }
        )
        self._stop = threading.Event()
        self._firsts: list[tuple[float, float]] = []
        """Times at which a request was sent and its first token came."""
        self.failed = 0
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def first_after(self, moment: float) -> float:
        """Return when the first token came of those requests that were sent after a moment."""
        deadline = time.perf_counter() + _LONGEST
        while time.perf_counter() < deadline:
            if found := [first for sent, first in self._firsts if sent >= moment]:
                return min(found)
            time.sleep(_PAUSE / 10)
        raise RuntimeError(f"no token for {_LONGEST:g} s after a kill")

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                self._stream()
            except (OSError, http.client.HTTPException):
                self.failed += 1
                time.sleep(_PAUSE)

    def _stream(self) -> None:
        connection = http.client.HTTPConnection(str(self._url.hostname), self._url.port, timeout=_LONGEST)
        try:
            sent = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", self._body, {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                if answer.status != http.client.OK:
                    raise http.client.HTTPException(answer.status)
                asked = False
                for line in answer:
                    if self._stop.is_set():
                        return
                    if not asked and b'"content":"' in line and b'"content":""' not in line:
                        self._firsts.append((sent, time.perf_counter()))
                        asked = True
                    if line.startswith(b'data: {"error"'):
                        raise http.client.HTTPException(line)
        finally:
            connection.close()


def spec(options: argparse.Namespace, setup: str, socket: Path) -> Spec:
    """Return a server; one without other models, whose processes would count."""
    # One API process: only then /metrics tells of a standby.
    flags = [
        "--api-processes",
        "1",
        "--model",
        options.model,
        "--device",
        options.device,
        "--load-format",
        options.load_format,
        *options.more,
    ]
    if setup not in _ALONE:
        flags += ["--memory-service", str(socket)]
    flags += ["--engine-standby", SETUPS[setup]]
    return Spec("trellis", (sys.executable, "-m", "server", "--port", "{port}", *flags), "/health/ready")


@contextmanager
def memory_service(socket: Path) -> Iterator[psutil.Process]:
    process = psutil.Popen([sys.executable, "-m", "server", "memory", "--memory-service", str(socket)], cwd=ROOT)
    try:
        while True:
            try:
                status(socket)
                break
            except MemoryServiceError:
                time.sleep(_PAUSE)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def hosts(server: Server) -> list[psutil.Process]:
    """Return the engine's processes, the one that serves first."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    found = [child for child in children if _HOST in _command(child) and "engine_service:ENGINE" in _command(child)]
    return sorted(found, key=lambda process: process.create_time())


def kill(server: Server, clients: Clients) -> float:
    """Kill the engine; return the seconds to the next first token."""
    victim = hosts(server)[0]
    killed = time.perf_counter()
    victim.kill()
    return clients.first_after(killed) - killed


def wait_for_standby(server: Server) -> None:
    while (
        "trellis_engine_standby{" not in (page := server.get("/metrics")) or _value(page, "trellis_engine_standby") < 1
    ):
        time.sleep(0.05)


def memory_mb(servers: list[Server], service: psutil.Process | None, device: str) -> str:
    """Return the memory of all processes: of the host in proportion to how many share it, and of the GPU."""
    processes = [service] if service is not None else []
    for server in servers:
        root = psutil.Process(server.process.pid)
        processes += [root, *root.children(recursive=True)]
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    used = f"{total >> 20} MiB of the host"
    if device == "cuda":
        used += f", {gpu_mb()} MiB of the GPU"
    return used


def gpu_mb() -> int:
    import torch  # noqa: PLC0415 - not on a CPU

    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def measure(options: argparse.Namespace, setup: str) -> None:
    print(f"## {setup}", flush=True)
    with tempfile.TemporaryDirectory(prefix="trellis-bench-") as folder, ExitStack() as stack:
        socket = Path(folder) / "memory.sock"
        service = stack.enter_context(memory_service(socket)) if setup not in _ALONE else None
        waits = setup in ("imports", "standby") or (setup == "default" and options.device == "cpu")
        first = stack.enter_context(serving(spec(options, setup, socket), log=options.log))
        if waits:
            wait_for_standby(first)
        print(f"ready after {first.ready_seconds:.2f} s")
        print(f"one replica: {memory_mb([first], service, options.device)}")
        if options.second:
            with serving(spec(options, setup, socket)) as second:
                if waits:
                    wait_for_standby(second)
                print(f"two replicas: {memory_mb([first, second], service, options.device)}", flush=True)
        clients = Clients(first, options.clients)
        stack.callback(clients.close)
        clients.first_after(0.0)
        time.sleep(options.settle)
        before = memory_mb([first], service, options.device)
        seconds = []
        for number in range(options.kills):
            time.sleep(random.uniform(*options.between))
            if waits:
                wait_for_standby(first)
            seconds.append(kill(first, clients))
            print(f"kill {number + 1}: first token after {seconds[-1]:.2f} s", flush=True)
        if waits:
            wait_for_standby(first)
        time.sleep(options.settle)
        print(f"under load, before the kills: {before}")
        print(f"under load, after {options.kills}: {memory_mb([first], service, options.device)}")
        print(
            f"first token after a kill: median {median(seconds):.2f} s, worst {max(seconds):.2f} s; "
            f"{clients.failed} refused or broken streams"
        )
        if service is not None:
            found = status(socket)
            leases = sum(owned.leases for owned in found.owned)
            print(f"memory service: {len(found.owned)} weights, {leases} leases, filled {found.filled} time(s)")
        print(flush=True)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _value(page: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name + "{"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--between", type=float, nargs=2, default=(11.0, 15.0), help="seconds between two kills")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--settle", type=float, default=_SETTLED, help="seconds before memory is measured")
    parser.add_argument("--second", action="store_true", help="also start a second replica, to measure its memory")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    options, options.more = parser.parse_known_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the run; {' '.join(sys.argv[1:])}", flush=True)
    for setup in options.setups:
        measure(options, setup)


if __name__ == "__main__":
    main()
