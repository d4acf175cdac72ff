"""Start and stop the servers to measure, and read their memory and CPU time."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError

import psutil

from server.bench.client import LoadRun, Target, run
from server.bench.prompts import PromptMaker
from server.settings.environment import child_environment

ROOT = Path(__file__).parent.parent
START_SECONDS = 600.0
STOP_SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Spec:
    """The command that starts a server, and facts about it.

    `argv` contains `{port}`. `model` is the name in requests; if empty, the first that the server lists. `port` is
    reserved by the caller, or 0. `answers` is false for a server that clients do not use.
    """

    name: str
    argv: tuple[str, ...]
    health: str
    model: str = ""
    extra: dict[str, object] = field(default_factory=lambda: {"ignore_eos": True})
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    answers: bool = True


def ours(model: str, quantization: str = "none") -> Spec:
    """Return our server with the embedded engine and otherwise default settings."""
    name = "trellis" if quantization == "none" else f"trellis-{quantization}"
    options = ("--port", "{port}", "--model", model, "--quantization", quantization)
    return Spec(name, (sys.executable, "-m", "server", *options), "/health/ready")


def fake(delay_ms: float, *, engine_process: bool) -> Spec:
    """Return our server without a model, to measure HTTP alone."""
    engine = (
        "--engine",
        "fake",
        "--fake-token-delay-ms",
        str(delay_ms),
        "--engine-process",
        str(engine_process).lower(),
    )
    return Spec("trellis-fake", (sys.executable, "-m", "server", "--port", "{port}", *engine), "/health/ready")


def transformers(model: str, dtype: str, *more: str) -> Spec:
    """Return `transformers serve` with continuous batching.

    It rejects `ignore_eos` but takes a generation config as a JSON string.
    """
    if find_spec("accelerate") is None:
        raise RuntimeError("transformers serve needs accelerate: pip install accelerate")
    command = str(Path(sys.executable).with_name("transformers"))
    options = (
        "--continuous-batching",
        "--device",
        "cpu",
        "--dtype",
        dtype,
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
        *more,
    )
    extra: dict[str, object] = {"generation_config": json.dumps({"eos_token_id": -1, "do_sample": False})}
    env = {"HF_HUB_OFFLINE": "1"}
    return Spec(f"transformers-{dtype}", (command, "serve", model, *options), "/health", model, extra, env)


def llama_cpp(binary: str, gguf: str, streams: int = 32, tokens: int = 640) -> Spec:
    """Return llama.cpp's server for `streams` sequences of up to `tokens` tokens, with a thread per core."""
    threads = str(len(os.sched_getaffinity(0)))
    room = (
        "--parallel",
        str(streams),
        "--ctx-size",
        str(streams * tokens),
        "--threads",
        threads,
        "--threads-batch",
        threads,
    )
    return Spec("llama.cpp", (binary, "--model", gguf, "--host", "127.0.0.1", "--port", "{port}", *room), "/health")


def vllm(command: str, model: str, dtype: str = "bfloat16") -> Spec:
    """Return vLLM's CPU build, with an OpenMP thread per core and none reserved for the API."""
    options = (
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
        "--dtype",
        dtype,
        "--max-num-seqs",
        "32",
        "--max-model-len",
        "2048",
    )
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Spec(f"vllm-{dtype}", (command, "serve", model, *options), "/health", model, env=env)


class Server:
    """A running server. `ready_seconds` is the time until it was ready, `answer_seconds` until its first token."""

    def __init__(self, spec: Spec, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.spec = spec
        self.process = process
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self.ready_seconds = self.answer_seconds = self.memory_mb = 0.0

    @property
    def target(self) -> Target:
        model = self.spec.model or json.loads(self.get("/v1/models"))["data"][0]["id"]
        return Target(f"{self.url}/v1", model, extra=self.spec.extra)

    def get(self, path: str) -> str:
        """Return the body of a GET request. Raises URLError, HTTPError included."""
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return str(response.read().decode())

    def wait(self, started: float) -> None:
        """Wait until the server is ready and, if `answers`, has answered a request.

        Raises RuntimeError with the end of the log.
        """
        while True:
            if self.process.poll() is not None or time.perf_counter() - started > START_SECONDS:
                raise RuntimeError(f"{self.spec.name} did not start:\n{tail(self.log)}")
            try:
                self.get(self.spec.health)
                break
            except (URLError, OSError):
                time.sleep(0.05)
        self.ready_seconds = time.perf_counter() - started
        if not self.spec.answers:
            return
        first = run(self.target, LoadRun(1, 1, 8, 1), PromptMaker(), "first")
        if first.errors:
            raise RuntimeError(f"{self.spec.name} does not answer: {first.first_error}")
        self.answer_seconds = time.perf_counter() - started

    def note_memory(self) -> None:
        """Update the peak of resident memory over all its processes."""
        self.memory_mb = max(self.memory_mb, sum(process.memory_info().rss for process in self._tree()) / 2**20)

    def cpu_seconds(self) -> float:
        """Return the CPU time of its processes so far."""
        times = [process.cpu_times() for process in self._tree()]
        return float(sum(spent.user + spent.system for spent in times))

    def _tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def stop(self) -> None:
        """Stop its process group: SIGTERM first, then SIGKILL."""
        children = self._tree()[1:] if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{self.spec.name} did not stop within {STOP_SECONDS:g} s of SIGTERM; killed")
        _, left = psutil.wait_procs(children, timeout=1)
        if self.process.poll() is None or left:
            with suppress(ProcessLookupError):  # they may have ended meanwhile
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def serving(spec: Spec, core: int | None = None, log: Path | None = None) -> Iterator[Server]:
    """Start a server, pinned to `core` if given, and stop it afterwards. Raises RuntimeError if it does not start.

    Its output goes to the file `log`, or to a temporary one.
    """
    with tempfile.TemporaryDirectory(prefix="trellis-bench-") as folder, ExitStack() as stack:
        port = spec.port or stack.enter_context(reserved_port())
        log = log or Path(folder) / f"{spec.name}.log"
        argv = [part.format(port=port) for part in spec.argv]
        with pinned(core), log.open("wb") as output:
            started = time.perf_counter()
            process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=child_environment(**spec.env),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            server = Server(spec, process, port, log)
            stack.callback(server.stop)
        server.wait(started)
        yield server


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free port. It stays bound but not listened on, so that only a server that names it can use it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # for servers that set only this option
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-3000:]


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Run on one core, which child processes inherit. None changes nothing."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
