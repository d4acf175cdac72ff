"""Sleep with several API processes and an engine process: all know of it, and neither a kill nor a signal hangs."""

import contextlib
import os
import signal
import threading
import time

import httpx

from tests.support.servers import CHAT, ServerProcess, serving

BOSS = {"authorization": "Bearer boss"}


def everywhere(server: ServerProcess, path: str, status: int, said: str) -> None:
    """Every one of many connections, which both processes take, gets this answer, after a moment."""
    deadline = time.monotonic() + 60
    while True:
        answers = [httpx.get(f"{server.url}{path}", headers=BOSS) for _ in range(16)]
        if all(answer.status_code == status and said in answer.text for answer in answers):
            return
        assert time.monotonic() < deadline, [answer.text for answer in answers]


def test_api_processes_share_sleep_and_an_engine_killed_asleep_restarts_awake() -> None:
    flags = ("--api-processes", "2", "--admin-key", "boss", "--fake-token-delay-ms", "5")
    with serving(*flags) as server, httpx.Client(base_url=server.url, headers=BOSS, timeout=60) as client:
        assert client.post("/sleep?level=2").status_code == 200
        everywhere(server, "/is_sleeping", 200, "true")
        everywhere(server, "/health/ready", 503, "sleep")
        assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).json()["error"]["code"] == "asleep"
        server.child("engine.process.host").kill()
        everywhere(server, "/health/ready", 200, "ready")
        everywhere(server, "/is_sleeping", 200, "false")
        assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60).status_code == 200
        # Signals end a server that is about to sleep.
        body = {**CHAT, "max_tokens": 30000, "ignore_eos": True}
        running = threading.Thread(target=lambda: _quietly("POST", f"{server.url}/v1/chat/completions", json=body))
        running.start()
        while b"trtllm_num_requests_running{" not in client.get("/metrics").content or not _running(client):
            time.sleep(0.05)
        waiting = threading.Thread(target=lambda: _quietly("POST", f"{server.url}/sleep?mode=wait", headers=BOSS))
        waiting.start()
        everywhere(server, "/health/ready", 503, "falling asleep")
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        os.kill(server.process.pid, signal.SIGTERM)  # the second ends what still runs
        assert server.wait(60) == 0
        running.join(60)
        waiting.join(60)


def _running(client: httpx.Client) -> bool:
    lines = client.get("/metrics").text.splitlines()
    return any(line.startswith("trtllm_num_requests_running{") and not line.endswith(" 0.0") for line in lines)


def _quietly(method: str, url: str, **options: object) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.request(method, url, timeout=60, **options)  # type: ignore[arg-type]
