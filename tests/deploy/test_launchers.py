"""`deploy/routed.py` and `deploy/disaggregated.py`: dead replicas are restarted; a replica that cannot start, or a
signal, ends the launcher.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.disaggregated import MAX_FAILED_STARTS, Group, StartFailed
from engine.process import supervisor
from engine.process.sockets import free_port
from tests.deploy.test_nginx import needs_nginx
from tests.support.servers import CHAT, ROOT
from tests.support.waiting import slowness

WITHOUT_NGINX = "import shutil, runpy, sys; shutil.which = lambda *_, **__: None; sys.argv = sys.argv[1:]; "
WITHOUT_NGINX += "sys.path.insert(0, 'deploy'); runpy.run_path(sys.argv[0], run_name='__main__')"


class Launch:
    """A launcher that is ready, and its log."""

    def __init__(self, command: Sequence[str]) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        environment = {**os.environ, "PORT": str(port), "PYTHONPATH": str(ROOT), "API_KEYS": "secret"}
        self.process = subprocess.Popen(
            [sys.executable, *command, "--engine", "fake"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def close(self) -> None:
        self._reader.join(5)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"ready: {self.url}/v1\n", self.log

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def member(self, module: str, *variables: str) -> psutil.Process:
        """The process started from here with this in its command line, and these variables."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # one that ended meanwhile
                if any(module in part for part in child.cmdline()):
                    found.append((child, {f"{name}={value}" for name, value in child.environ().items()}))
        (one,) = (child for child, environment in found if set(variables) <= environment)
        return one

    def kill(self, name: str, victim: psutil.Process) -> None:
        """Kill a process, and return once the launcher has it back."""
        victim.kill()
        self.wait_for(f"launcher: {name} is ready again")

    def wait_for(self, line: str) -> None:
        deadline = time.monotonic() + 20 * slowness()
        while line not in self.log:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def chat(self) -> int:
        key = {"authorization": "Bearer secret"}
        body = {**CHAT, "model": "fake"}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=key, timeout=20).status_code


@contextmanager
def launched(*command: str, stop: signal.Signals) -> Iterator[Launch]:
    """A ready launcher, which `stop` ends cleanly; it leaves no process behind."""
    launch = Launch(command)
    try:
        launch.wait_ready()
        yield launch
        children = psutil.Process(launch.process.pid).children(recursive=True)
        launch.process.send_signal(stop)
        assert launch.process.wait(20 * slowness()) == 0, launch.log
        assert psutil.wait_procs(children, timeout=5)[1] == []
    finally:
        if launch.process.poll() is None:
            launch.process.terminate()
            launch.process.wait(60)
        launch.close()


def test_a_router_and_its_replica_that_die_are_restarted() -> None:
    with launched("deploy/routed.py", "--replicas", "1", stop=signal.SIGHUP) as launch:
        launch.kill("aggregated-1", launch.member("server", "DISAGGREGATION_MODE=aggregated"))
        launch.wait_for("replica 0 at http://127.0.0.1:")
        deadline = time.monotonic() + 10 * slowness()
        while launch.chat() != 200:
            assert time.monotonic() < deadline, launch.log
            time.sleep(0.1)
        launch.kill("router", launch.member("server", "DISAGGREGATION_MODE=router"))
        assert launch.chat() == 200
        assert launch.log.count("launcher: restarting in 0.5 s: ") == 2
        assert "aggregated-1 ended with signal SIGKILL" in launch.log
        assert launch.log.count("is ready again\n") >= 2


def test_without_nginx_a_router_answers_at_the_port() -> None:
    command = ("-c", WITHOUT_NGINX, "deploy/disaggregated.py", "--prefill", "1", "--decode", "1")
    with launched(*command, "--prefill-min-tokens", "0", stop=signal.SIGTERM) as launch:
        assert launch.chat() == 200
        launch.kill("prefill-1", launch.member("server", "DISAGGREGATION_MODE=prefill"))
        assert launch.chat() == 200


@needs_nginx
def test_nginx_that_dies_gets_its_port_back_from_its_workers() -> None:
    command = ("deploy/disaggregated.py", "--prefill", "1", "--decode", "1")
    with launched(*command, stop=signal.SIGINT) as launch:
        nginx = launch.member("nginx")
        workers = nginx.children()
        launch.kill("nginx", nginx)
        assert launch.chat() == 200
        left = [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
        assert not left


def test_wrong_settings_end_the_launch_with_their_reason() -> None:
    command = [sys.executable, "deploy/routed.py", "--engine", "fake", "--max-queue-size", "many"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1 and ended.stdout == ""
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("launcher: stopping everything: aggregated-")
    assert "ended with exit code 2: error: --max-queue-size (MAX_QUEUE_SIZE):" in last
    assert "Traceback" not in ended.stderr and "restarting" not in ended.stderr


@pytest.mark.parametrize(
    ("script", "starts", "reason"),
    [
        ("echo it lacks a file; exit 3", 1, "one ended with exit code 3: it lacks a file"),
        ("kill -9 $$", MAX_FAILED_STARTS, "one ended with signal SIGKILL"),
    ],
)
async def test_a_replica_that_never_starts_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, starts: int, reason: str
) -> None:
    """At once if it reports that itself, after some attempts if it was killed."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.001)
    group = Group((), 1)
    member = group.start("one", f"http://127.0.0.1:{free_port()}", ["sh", "-c", f"echo >> {tmp_path}/starts; {script}"])
    with pytest.raises(StartFailed) as caught:
        await asyncio.wait_for(group.ready(member), 20 * slowness())
    assert str(caught.value) == reason
    assert (tmp_path / "starts").read_text() == "\n" * starts
    await group.stop()
