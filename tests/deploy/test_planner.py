"""`trellis plan` and processes of this machine: they are started, adopted, replaced, drained and stopped."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.sweep.planner import LocalReplicas, ScaleError
from tests.support.servers import CHAT, ROOT, serving
from tests.support.waiting import slowness

WAITING = "trtllm_num_requests_waiting"
STUB = """
import http.server, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(pathlib.Path(sys.argv[2]).read_bytes())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@contextmanager
def local(folder: Path, **options: Any) -> Iterator[LocalReplicas]:
    """Replicas that report what is in a file, ended afterwards."""
    metrics = folder / "metrics"
    if not metrics.exists():
        metrics.write_text(f'{WAITING}{{rank="0"}} 1\n{WAITING}{{rank="1"}} 2\nother 9\n')

    def command(port: int) -> list[str]:
        return [sys.executable, "-S", "-c", STUB, str(port), str(metrics)]

    replicas = LocalReplicas(folder, "decode", command, dict(os.environ), notice_seconds=0.0, **options)
    with closing(replicas):
        yield replicas


def settled(replicas: LocalReplicas, count: int) -> list[str]:
    """Wait until so many replicas are listed, and no others run; return their URLs."""
    deadline = time.monotonic() + 20 * slowness()
    while True:
        replicas.settle()
        urls = replicas.urls.read_text().split()
        if len(urls) == count == len(replicas.replicas):
            return urls
        assert time.monotonic() < deadline, (urls, replicas.replicas)
        time.sleep(0.02)


def test_local_replicas_are_started_adopted_replaced_drained_and_stopped(tmp_path: Path) -> None:
    with local(tmp_path) as replicas:
        assert replicas.count() == 0 and replicas.loads([WAITING]) == []
        replicas.scale(2)
        first = settled(replicas, 2)
        assert replicas.loads([WAITING, "none"]) == [{WAITING: 3.0}] * 2, "labels are added up"
        with pytest.raises(ScaleError, match="another planner"), local(tmp_path):
            pass
    with local(tmp_path) as replicas:
        assert replicas.count() == 2 and settled(replicas, 2) == first, "they went on, and are adopted"
        os.kill(replicas.replicas[0].pid, signal.SIGKILL)
        deadline = time.monotonic() + 20 * slowness()
        while (urls := replicas.urls.read_text().split()) == first or len(urls) < 2:
            replicas.settle()
            assert time.monotonic() < deadline, replicas.replicas
            time.sleep(0.02)
        assert urls[0] == first[1] and first[0] not in urls, "one that died is replaced"
        (tmp_path / "metrics").write_text("trtllm_num_requests_running 1\n")
        replicas.scale(1)
        replicas.settle()
        replicas.settle()
        (leaving,) = [replica for replica in replicas.replicas if replica.draining_since is not None]
        assert replicas.urls.read_text().split() == [first[1]] and not leaving.stopped, "its request runs"
        (tmp_path / "metrics").write_text("trtllm_num_requests_running 0\n")
        assert settled(replicas, 1) == [first[1]]
        replicas.scale(0)
        settled(replicas, 0)


def test_replicas_that_end_at_once_restart_after_growing_pauses(tmp_path: Path) -> None:
    now = 0.0
    options: dict[str, Any] = {"notice_seconds": 0.0, "clock": lambda: now}
    with closing(LocalReplicas(tmp_path, "decode", lambda port: ["false"], {}, **options)) as replicas:
        replicas.scale(1)
        starts = []
        for _ in range(240):
            before = {replica.pid for replica in replicas.replicas}
            replicas.settle()
            if {replica.pid for replica in replicas.replicas} - before:
                starts.append(now)
            for replica in replicas.replicas:
                wait_gone(replica.pid)
            now += 0.5
    pauses = [after - before for before, after in pairwise(starts)]
    assert pauses == sorted(pauses) and pauses[0] <= 2 and 30 <= pauses[-1] <= 61


def test_running_replicas_are_recorded_when_the_next_cannot_start(tmp_path: Path) -> None:
    commands = iter((["sleep", "60"], ["/missing"]))
    with closing(LocalReplicas(tmp_path, "decode", lambda _: next(commands), {}, notice_seconds=0.0)) as replicas:
        replicas.scale(2)
        with pytest.raises(ScaleError, match="cannot be started"):
            replicas.settle()
    with closing(LocalReplicas(tmp_path, "decode", lambda _: [], {}, notice_seconds=0.0)) as replicas:
        (left,) = replicas.replicas
        assert left.alive
        os.kill(left.pid, signal.SIGKILL)
        wait_gone(left.pid)
        assert not left.alive


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 20 * slowness()
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_router_follows_the_planner_and_no_request_is_lost(tmp_path: Path) -> None:
    """Load makes a second replica, its end takes it away, and --stop the first. The router reads the planner's file."""
    secret = {"INTERNAL_SECRET": "s", "MODEL_OPTIONAL": "true"}
    replicas = ["--", "--engine", "fake", "--engine-process", "false", "--fake-token-delay-ms", "5"]
    times = ["--interval", "0.1", "--up-seconds", "1", "--down-seconds", "1", "--notice-seconds", "4"]
    command = [
        sys.executable,
        str(ROOT / "trellis.py"),
        "plan",
        "--max",
        "2",
        "--metric",
        "trtllm_num_requests_running=2",
    ]
    command += ["--state", str(tmp_path), *times]
    environment = {**os.environ, **secret}
    planner = subprocess.Popen([*command, *replicas], env=environment, stdout=subprocess.PIPE, text=True)
    urls = tmp_path / "aggregated.urls"
    failed: list[object] = []
    loaded = threading.Event()

    def load(url: str) -> None:
        while not loaded.is_set():
            body = {**CHAT, "max_tokens": 40, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            if answer.status_code != 200:
                failed.append(answer.text)

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + 40 * slowness()
        while len(urls.read_text().split() if urls.exists() else []) != count:
            assert time.monotonic() < deadline and planner.poll() is None
            time.sleep(0.05)

    try:
        wait_for(1)
        flags = ["--disaggregation-mode", "router", "--route-urls", urls.as_uri(), "--route-policy", "least_loaded"]
        with serving(*flags, "--route-events-port", "0", environment=secret) as router:
            threads = [threading.Thread(target=load, args=(router.url,)) for _ in range(6)]
            for thread in threads:
                thread.start()
            wait_for(2)
            router.wait_metric("trtllm_router_replica_available", 2, 20 * slowness())
            loaded.set()
            wait_for(1)
            for thread in threads:
                thread.join()
        assert failed == []
    finally:
        loaded.set()
        planner.send_signal(signal.SIGTERM)
        said, _ = planner.communicate(timeout=20 * slowness())
        stopped = subprocess.run(
            [*command, "--stop", "--notice-seconds", "0"], env=environment, timeout=60 * slowness(), check=False
        )
    assert "1 to 2 replicas" in said and "2 to 1 replicas" in said and "replicas go on" in said
    assert stopped.returncode == 0 and urls.read_text() == ""
