"""The planner: what it decides, and Kubernetes' scale subresource. `tests/deploy/test_planner.py` has processes."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest

from server.cli import main
from server.sweep.planner import Decider, KubernetesReplicas, ScaleError, ScalingPolicy, plan, read_metrics

WAITING = "trtllm_waiting"
POLICY = ScalingPolicy({WAITING: 4.0}, least=1, most=8, up_seconds=10, down_seconds=60)


@pytest.mark.parametrize(
    ("current", "values", "needed"),
    [
        (2, [4, 4], 2), (2, [4.3, 4.4], 2), (2, [3.7, 3.7], 2),  # within the tolerance
        (2, [8, 8], 4), (2, [8, 2], 3), (2, [100, 0], 8), (4, [1, 1, 1, 1], 1), (4, [2, 2, 2, 1], 2), (2, [0, 0], 1),
        (2, [6], 2), (4, [8, 8], 4), (4, [1, 1], 3),  # those that do not report
        (3, [], 3), (0, [], 1), (12, [], 8),
    ],
)  # fmt: skip
def test_replicas_are_needed_for_the_mean_load(current: int, values: list[float], needed: int) -> None:
    assert POLICY.needed(current, [{WAITING: value} for value in values]) == needed


def test_the_metric_that_needs_most_decides_and_one_that_is_missing_does_not() -> None:
    policy = ScalingPolicy({"a": 1.0, "b": 10.0, "c": 1.0}, most=9)
    assert policy.needed(1, [{"a": 2.0, "b": 50.0}]) == 5


def test_load_that_swings_does_not_make_the_number_of_replicas_swing() -> None:
    """It follows a rise at once, and a fall one by one after a minute without a higher need."""
    decider = Decider(POLICY)
    count, counts = 2, []
    for second in range(0, 600, 5):
        total = 16 if second < 300 and second // 20 % 2 == 0 else 8 if second < 300 else 1
        count = decider.decide(float(second), count, [{WAITING: total / count}] * count)
        counts.append(count)
    changes = [now for before, now in pairwise(counts) if now != before]
    assert counts[0] == 4 and set(counts[:60]) == {4}, "twenty seconds of less load remove nothing"
    assert changes == [3, 2, 1] and counts[-1] == 1


def test_a_rise_waits_until_new_replicas_can_take_load() -> None:
    decider = Decider(POLICY)
    assert decider.decide(0.0, 1, [{WAITING: 8.0}]) == 2
    assert decider.decide(5.0, 2, [{WAITING: 30.0}] * 2) == 2
    assert decider.decide(10.0, 2, [{WAITING: 8.0}] * 2) == 4


class Cluster(BaseHTTPRequestHandler):
    """The parts of Kubernetes' API that scaling needs, as recorded, and a pod at its own address."""

    replicas = 1
    asked: list[tuple[str, str]] = []
    load = 12.0

    def do_GET(self) -> None:
        if self.path in ("/health/ready", "/metrics"):
            self._send(f"{WAITING} {self.load}\n".encode())
            return
        self.asked.append(("GET", self.path))
        if self.headers["Authorization"] != "Bearer token":
            self._send(b'{"kind": "Status", "reason": "Unauthorized"}', 401)
        elif self.path == "/apis/apps/v1/namespaces/ns/deployments/decode/scale":
            self._send(self._scale())
        elif self.path == "/api/v1/namespaces/ns/pods?labelSelector=app%3Ddecode":
            self._send(json.dumps({"kind": "PodList", "items": self._pods()}).encode())
        else:
            self._send(b'{"kind": "Status", "reason": "NotFound"}', 404)

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        self.asked.append(("PATCH", self.path))
        type(self).replicas = body["spec"]["replicas"]
        self._send(self._scale())

    def _scale(self) -> bytes:
        return json.dumps(
            {
                "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": {"name": "decode", "namespace": "ns"},
                "spec": {"replicas": self.replicas}, "status": {"replicas": self.replicas, "selector": "app=decode"},
            }
        ).encode()  # fmt: skip

    def _pods(self) -> list[dict[str, Any]]:
        def pod(ready: bool, **metadata: str) -> dict[str, Any]:
            conditions = [{"type": "Ready", "status": str(ready)}]
            return {"metadata": metadata, "status": {"podIP": "127.0.0.1", "conditions": conditions}}

        return [*[pod(True)] * self.replicas, pod(False), pod(True, deletionTimestamp="2026-01-01T00:00:00Z")]

    def _send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_kubernetes_is_scaled_by_the_load_of_its_ready_pods() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Cluster) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        port = int(server.server_address[1])
        api = f"http://127.0.0.1:{port}"
        said: list[str] = []
        tokens = ["token"]
        scaled = KubernetesReplicas(api, "ns", "deployments/decode", token=lambda: tokens[-1], port=port)
        decider = Decider(POLICY)
        for now in (0.0, 5.0):
            plan(scaled, decider, said.append, now)
        assert (Cluster.replicas, said) == (3, ["1 to 3 replicas (trtllm_waiting 12)"]), "then the new ones get time"
        assert [method for method, _ in Cluster.asked].count("PATCH") == 1
        Cluster.load = 0.0
        for now in (20.0, 90.0, 110.0, 130.0, 150.0):
            plan(scaled, decider, said.append, now)
        assert Cluster.replicas == 1 and len(said) == 3
        with pytest.raises(ScaleError, match="HTTP 401"):
            KubernetesReplicas(api, "ns", "deployments/decode").count()
        tokens.append("the next")
        with pytest.raises(ScaleError, match="HTTP 401"):
            scaled.count()
        with pytest.raises(ScaleError, match="HTTP 404"):
            KubernetesReplicas(api, "other", "deployments/decode", token=lambda: "token").count()
        server.shutdown()
        thread.join()
    with pytest.raises(ScaleError, match="write deployments/NAME"):
        KubernetesReplicas(api, "ns", "pods/decode")


def test_a_replica_that_ends_while_it_answers_reports_nothing() -> None:
    class Cut(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ncut")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Cut) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        assert read_metrics(f"http://127.0.0.1:{server.server_address[1]}", [WAITING]) is None
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--min", "3", "--max", "2"], "--min must be at most --max"), (["--metric", "x=0"], "write NAME=TARGET"),
        (["--kubernetes", "deployments/x"], "--namespace"), (["--roles", "decode"], "did you mean --role"),
    ],
)  # fmt: skip
def test_wrong_flags_are_explained(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 2
    assert said in capsys.readouterr().err
