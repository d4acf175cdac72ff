"""Several API processes on one port and one engine."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from engine.process.folder import PrivateFolder
from server.metrics.page import ServerMetrics
from server.process.child import SPEAKS, reserve
from server.process.launch import Launcher
from server.process.serving import listen
from server.settings import Settings
from tests.support.environment import bare
from tests.support.servers import CHAT, READY, ROOT, ServerProcess, serving
from tests.support.waiting import slowness, until


@contextmanager
def two_processes(folder: Path) -> Iterator[ServerProcess]:
    with serving("--api-processes", "2", "--fake-token-delay-ms", "5", environment={"TMPDIR": str(folder)}) as server:
        yield server
    assert list(folder.iterdir()) == [] or server.process.returncode == -signal.SIGKILL


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with two_processes(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for the tests that do not end it."""
    with two_processes(tmp_path_factory.mktemp("shared")) as server:
        yield server


def api_processes(server: ServerProcess) -> list[psutil.Process]:
    return server.running("server.process.child")


async def half_are_refused(url: str) -> None:
    """Return once 4 of 8 requests that never end have been refused, each sent by a connection of its own."""
    endless = {**CHAT, "max_tokens": 20_000, "ignore_eos": True}

    async def status() -> int:
        async with httpx.AsyncClient(timeout=None) as client:
            return (await client.post(f"{url}/v1/chat/completions", json=endless)).status_code

    requests = [asyncio.create_task(status()) for _ in range(8)]
    await until(lambda: sum(request.done() for request in requests) >= 4, 20 * slowness())
    assert {request.result() for request in requests if request.done()} == {429}
    for request in requests:
        request.cancel()


def handled(server: ServerProcess) -> set[int]:
    """Which processes accepted connections: each connection is a new one."""
    pids = set()
    for _ in range(40):
        with httpx.Client() as client:
            client.get(f"{server.url}/health/live")
            port = int(server.url.rpartition(":")[2])
            for process in api_processes(server):
                if [
                    c
                    for c in process.net_connections("tcp")
                    if c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED
                ]:
                    pids.add(process.pid)
        if len(pids) == 2:
            break
    return pids


def waited_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60 * slowness()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_page_is_whole_while_a_process_has_no_room_for_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = ServerMetrics("m", tmp_path)
    calls = 0

    def allocate(_file: int, _offset: int, _size: int) -> None:
        nonlocal calls
        calls += 1
        assert b"trellis" not in metrics.render()
        if calls == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(OSError, match="No space"):
        reserve(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    reserve(tmp_path)
    assert metrics.render() == b""


def test_a_restarted_child_still_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    voices = []

    def dies(module: str, descriptor: str, link: str, folder: str, voice: str, *flags: str) -> tuple[str, ...]:
        voices.append(voice)
        if len(voices) == 4:
            launcher._stop()
        return (sys.executable, "-S", "-c", "raise SystemExit(9)")

    monkeypatch.setattr("engine.process.supervisor.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("server.process.launch.module_command", dies)
    settings = Settings(engine="fake", api_processes=2, engine_address="ipc:///elsewhere")
    with closing(PrivateFolder()) as folder, listen("127.0.0.1", 0, share=True) as listener:
        launcher = Launcher(settings, [], listener, folder)
        del launcher._supervisors[1:]
        assert asyncio.run(launcher.run()) == 0
    assert voices == 4 * [SPEAKS]


def test_api_processes_share_an_engine_and_each_shows_all_metrics(shared: ServerProcess) -> None:
    assert len(api_processes(shared)) == 2
    assert len(shared.running("engine.process.host")) == 1
    assert len(handled(shared)) == 2
    requests = 'http_requests_total\\{handler="/v1/chat/completions",method="POST",status="2xx"\\}'
    before = shared.metric(requests), shared.metric("trtllm_generation_tokens_total")
    for _ in range(20):
        assert httpx.post(f"{shared.url}/v1/chat/completions", json=CHAT).status_code == 200
    for _ in range(6):
        assert (shared.metric(requests), shared.metric("trtllm_generation_tokens_total")) == (
            before[0] + 20,
            before[1] + 160,
        )
        page = httpx.get(f"{shared.url}/metrics").text
        assert page.count("\ntrtllm_num_requests_waiting{") == 1
    shared.wait_metric("trtllm_num_requests_completed_total", before[0] + 20)


def test_the_server_is_ready_when_all_processes_are_and_limits_are_shared() -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    limits = ("--max-batch-size", "1", "--max-queue-size", "2", "--fake-token-delay-ms", "20")
    server = ServerProcess("--api-processes", "2", "--port", str(port), *limits)
    health = f"http://127.0.0.1:{port}/health/ready"

    def missing() -> list[str]:
        """What is missing, "nothing" if the server is ready; empty while nothing answers."""
        try:
            error = httpx.get(health).json().get("error")
            return ["nothing"] if error is None else [entry["name"] for entry in error["missing"]]
        except httpx.TransportError:
            return []

    try:
        waited_for(lambda: len(api_processes(server)) == 2)
        slow = api_processes(server)[1]
        slow.suspend()  # long before it listens
        seen = set()
        waited_for(lambda: seen.update(missing()) or "api_processes" in seen)
        assert "nothing" not in seen and "ready: " not in server.log
        slow.resume()
        server.wait_ready()
        assert {*missing(), *missing(), *missing(), *missing()} == {"nothing"}
        asyncio.run(half_are_refused(server.url))  # at most one runs and one waits in each process
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert server.log.count("ready: ") == 1, "once for all"


def test_dead_child_is_replaced_while_others_serve(shared: ServerProcess) -> None:
    server, first = shared, api_processes(shared)[0]
    httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
    tokens = server.metric("trtllm_generation_tokens_total")
    already = server.log.count("an API process is ready again")
    first.kill()
    first.wait()
    answers = set()

    def back() -> bool:
        answers.add(httpx.get(f"{server.url}/health/ready").status_code)
        return server.log.count("an API process is ready again") > already

    waited_for(back)
    assert answers == {200}, "nobody meets the new one before it is ready"
    assert first.pid not in [child.pid for child in api_processes(server)]
    assert len(handled(server)) == 2
    assert server.metric("trtllm_generation_tokens_total") == tokens, "counters outlive the process that counted"
    assert "an API process ended with exit code -9" in server.log and server.log.count("ready: ") == 1


@pytest.mark.parametrize(
    ("everyone", "signum"), [(False, signal.SIGTERM), (True, signal.SIGTERM), (True, signal.SIGHUP)]
)
def test_drain_and_no_child_left(server: ServerProcess, everyone: bool, signum: signal.Signals) -> None:
    children = server.children()
    assert len(children) == 3
    with httpx.stream(
        "POST",
        f"{server.url}/v1/chat/completions",
        json={**CHAT, "max_tokens": 200, "stream": True, "ignore_eos": True},
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        for process in (server.process, *(children if everyone else [])):
            process.send_signal(signum)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.wait() == 0
    assert not [child for child in children if child.is_running()]


def test_children_end_with_a_killed_launcher(server: ServerProcess) -> None:
    children = server.children()
    server.process.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def test_a_users_modules_of_the_same_names_do_not_replace_ours(tmp_path: Path) -> None:
    """The user's folder has a server.py and packages that FastAPI projects have; it is also in PYTHONPATH."""
    for name in ("server.py", "engine.py", "protocol.py", "routers/__init__.py", "multimodal/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('the module of the user')")
    environment = bare()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    flags = ("serve", "--engine", "fake", "--port", "0", "--api-processes", "2")
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "trellis.py"), *flags],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    with server.stderr as log:
        lines = []
        while not (found := READY.search(line := log.readline())):
            assert line, f"it ended: {''.join(lines)}"
            lines.append(line)
        answer = httpx.post(f"{found[1]}/v1/completions", json={"model": "fake", "prompt": "a", "max_tokens": 2})
        server.send_signal(signal.SIGTERM)
        lines += log.readlines()
    assert server.wait(60 * slowness()) == 0 and answer.status_code == 200
    assert "the module of the user" not in "".join(lines)
