"""How a server starts, drains and ends."""

import asyncio
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from multimodal.text.tokenizer import byte_tokenizer
from tests.support.servers import CHAT, READY, ROOT, ServerProcess, serving, wait_metric
from tests.support.waiting import slowness

LONG = {**CHAT, "ignore_eos": True, "stream": True}
SLOW = ("--fake-token-delay-ms", "50")


def stream_all(url: str, count: int) -> list[threading.Thread]:
    """Begin `count` streams; their last events are in `last` of the threads once they have ended."""
    body = {**LONG, "max_tokens": int(40 * slowness())}  # two seconds or more
    threads = [StreamThread(url, body) for _ in range(count)]
    for thread in threads:
        thread.start()
    wait_metric(url, "trtllm_num_requests_running", count)
    return list(threads)


class StreamThread(threading.Thread):
    """A streaming request, and the last two events of its answer."""

    def __init__(self, url: str, body: dict[str, object]) -> None:
        super().__init__()
        self._url = url
        self._body = body
        self.last: list[str] = []

    def run(self) -> None:
        answer = httpx.post(f"{self._url}/v1/chat/completions", json=self._body, timeout=60)
        self.last = [event.removeprefix("data: ") for event in answer.text.split("\n\n")][-3:-1]


@pytest.mark.parametrize(
    ("process", "signum"),
    [("true", signal.SIGTERM), ("false", signal.SIGTERM), ("true", signal.SIGINT), ("true", signal.SIGHUP)],
)
def test_signal_lets_running_streams_finish(process: str, signum: signal.Signals) -> None:
    with serving(*SLOW, "--engine-process", process) as server:
        children = server.children()
        threads = stream_all(server.url, 20)
        server.process.send_signal(signum)
        _wait_for_status(f"{server.url}/health/ready", 503)
        for path in ("/health/ready", "/health", "/v1/models"):
            answer = httpx.get(server.url + path)
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        for thread in threads:
            thread.join()
            assert isinstance(thread, StreamThread)
            assert json.loads(thread.last[0])["choices"][0]["finish_reason"] == "length"
            assert thread.last[1] == "[DONE]"
        assert server.wait() == 0
        assert not [child for child in children if child.is_running()]
    assert "Traceback" not in server.log


def test_signal_to_every_process_lets_running_streams_finish() -> None:
    """As systemd and supervisors do by default; SIGHUP too, where SendSIGHUP is set."""
    with serving(*SLOW) as server:
        threads = stream_all(server.url, 5)
        for process in (server.process, *server.children()):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGHUP)
        for thread in threads:
            thread.join()
            assert isinstance(thread, StreamThread)
            assert thread.last[1] == "[DONE]"
        assert server.wait() == 0


@pytest.mark.parametrize("processes", ["1", "2"])
def test_closed_terminal_lets_running_streams_finish(processes: str) -> None:
    """The terminal is gone for the log, too, and the signal comes twice: from the kernel and from the shell."""
    ours, theirs = os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    flags = ("--port", "0", "--engine", "fake", *SLOW, "--api-processes", processes, "--log-format", "json")
    command = [sys.executable, "-m", "server", *flags]
    server = subprocess.Popen(
        command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=take_terminal
    )
    os.close(theirs)
    try:
        shown = ""
        while "ready: " not in shown:
            shown += os.read(ours, 65536).decode()
        match = READY.search(shown)
        assert match is not None
        children = psutil.Process(server.pid).children(recursive=True)
        threads = stream_all(match[1], 4)
        os.close(ours)
        server.send_signal(signal.SIGHUP)
        for thread in threads:
            thread.join()
            assert isinstance(thread, StreamThread)
            assert thread.last[1] == "[DONE]"
        assert server.wait(20) == 0
        assert not psutil.wait_procs(children, timeout=5)[1]
    finally:
        server.kill()
        server.wait()


def test_nohup_is_respected() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    server = ServerProcess(preexec_fn=ignore)
    try:
        server.wait_ready()
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 200
    finally:
        server.process.terminate()
        assert server.wait() == 0


def test_new_requests_do_not_hold_up_the_drain() -> None:
    """Clients that try again and again get 503 and nothing else; the server ends all the same."""
    with serving(*SLOW) as server:
        threads = stream_all(server.url, 3)
        server.process.send_signal(signal.SIGTERM)
        _wait_for_status(f"{server.url}/health/ready", 503)

        async def insist() -> set[int]:
            statuses = set()
            async with httpx.AsyncClient() as client:
                try:
                    while True:
                        statuses.add((await client.post(f"{server.url}/v1/chat/completions", json=CHAT)).status_code)
                except httpx.TransportError:
                    return statuses

        assert asyncio.run(insist()) == {503}
        for thread in threads:
            thread.join()
        assert server.wait() == 0


def test_end_of_the_grace_period_is_an_error_event() -> None:
    with serving(*SLOW, "--shutdown-grace-seconds", "0.5") as server:
        threads = stream_all(server.url, 5)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
            assert isinstance(thread, StreamThread)
            assert json.loads(thread.last[1])["error"]["code"] == "not_ready"
        assert time.monotonic() - began > 0.4
        assert server.wait() == 0


def test_a_pending_image_does_not_delay_the_shutdown() -> None:
    flags = ("--media-allow-private", "true", "--shutdown-grace-seconds", "0.5")
    with serving(*flags) as server, socket.create_server(("127.0.0.1", 0)) as images:
        image = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{images.getsockname()[1]}/"}}
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(
                httpx.post,
                f"{server.url}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": [image]}]},
            )
            with images.accept()[0]:
                began = time.monotonic()
                server.process.send_signal(signal.SIGTERM)
                answer = asked.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert time.monotonic() - began > 0.4
        assert server.wait() == 0


def test_client_that_does_not_read_cannot_stop_the_end() -> None:
    with serving("--shutdown-grace-seconds", "0.2") as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        content = json.dumps({**LONG, "max_tokens": 30000}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        time.sleep(1)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_second_signal_ends_at_once() -> None:
    with serving(*SLOW) as server:
        threads = stream_all(server.url, 3)
        server.process.send_signal(signal.SIGINT)
        _wait_for_status(f"{server.url}/health/ready", 503)
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT
        for thread in threads:
            thread.join()


def test_killed_server_leaves_no_engine(short_path: Path) -> None:
    with serving(*SLOW, environment={"TMPDIR": str(short_path)}) as server:
        children = server.children()
        assert len(children) == 1
        server.process.kill()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
    left = set(short_path.iterdir())
    assert left
    with serving(environment={"TMPDIR": str(short_path)}):
        assert not left & set(short_path.iterdir())
    assert list(short_path.iterdir()) == []


def test_port_answers_before_the_model_is_there(tmp_path: Path) -> None:
    """An engine address where nobody is: the server waits, alive and not ready, and still obeys."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = ServerProcess("--engine-address", f"ipc://{tmp_path}/nobody.sock", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for_status(f"{url}/health/live", 200)
        for path in ("/health/ready", "/health", "/v1/models"):
            answer = httpx.get(url + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            assert answer.headers["retry-after"]
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.process.kill()
        server.wait()


def _wait_for_status(url: str, status: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(url).status_code == status:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_api_processes_that_cannot_serve_end_the_launcher(tmp_path: Path) -> None:
    server = ServerProcess("--api-processes", "2", "--chat-template", str(tmp_path / "missing.jinja"))
    assert server.wait(60) == 1
    assert "the server ends: " in server.log and "missing.jinja" in server.log
    assert len(server.lines) == 1, "said once"


@pytest.mark.parametrize("flags", [(), ("--engine-process", "false"), ("--api-processes", "2")])
def test_failed_start_is_one_line_and_not_zero(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "model").mkdir()
    server = ServerProcess(
        "--engine", "embedded", "--model", str(tmp_path / "model"), "--cache-dir", str(tmp_path), *flags
    )
    assert server.wait(60) == 1
    assert len([line for line in server.lines if "the server ends: " in line]) == 1
    assert "Traceback" not in server.log and "stopping" not in server.log


def test_a_damaged_model_ends_the_start_with_its_name_and_no_traceback(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    server = ServerProcess("--engine", "embedded", "--device", "cpu", "--model", str(tmp_path))
    assert server.wait(60 * slowness()) == 1
    [end] = [line for line in server.lines if "the server ends: " in line]
    assert f"{file} is damaged or not a safetensors file" in end
    assert server.log.count("is damaged") == 1, "and said once"
    assert "Traceback" not in server.log


def test_engine_death_ends_the_server_if_so_set() -> None:
    with serving("--engine-on-death", "exit") as server:
        server.child("engine.process.host").kill()
        assert server.wait() == 1
    assert "the server ends: the engine process died (signal SIGKILL)" in server.log


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = ServerProcess("--port", str(taken.getsockname()[1]))
        assert server.wait() == 1
    assert len(server.lines) == 1
    assert "cannot listen on 127.0.0.1" in server.lines[0] and "--port" in server.lines[0]


def test_banner_and_logs() -> None:
    with serving("--log-format", "json", "--access-log", "true") as server:
        httpx.get(f"{server.url}/a%0Ab", headers={"x-request-id": "mine"})
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    entries = [json.loads(line) for line in server.lines]
    banner = entries[0]["message"]
    for part in (f"ready: {server.url}/v1 serves fake", "context 32768 tokens", "KV cache 2097152 tokens", " s"):
        assert part in banner
    access = next(entry for entry in entries if entry["logger"] == "access")
    assert (access["request_id"], access["path"], access["status"]) == ("mine", "/a b", 404)


def test_responses_on_a_websocket_get_their_last_event_at_shutdown() -> None:
    """Also where the grace period is over at once."""
    create = {"type": "response.create", "model": "fake", "input": "hi", "max_output_tokens": 20000, "ignore_eos": True}
    with serving("--fake-token-delay-ms", "5", "--shutdown-grace-seconds", "0") as server:
        with connect(f"{server.url.replace('http', 'ws', 1)}/v1/responses", compression=None, max_queue=None) as client:
            client.send(json.dumps(create))
            events = [json.loads(client.recv(timeout=20 * slowness()))]
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    events.append(json.loads(client.recv(timeout=20 * slowness())))
        assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.failed")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        assert server.wait() == 0
