"""Scale the replicas of a role by metrics: processes of this machine, or Kubernetes' scale subresource.

A policy computes the number of replicas from their metrics. It changes nothing within a tolerance, adds replicas at
once, and removes one at a time after the load has been lower for a while, so that the number does not swing. Replicas
that report nothing count against a change in either direction.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import signal
import ssl
import subprocess
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.parse import quote

from engine.process import tree
from engine.process.sockets import free_port
from server.sweep.results import write_whole

METRICS = {
    "aggregated": {"trtllm_num_requests_waiting": 4.0, "trtllm_kv_cache_utilization": 0.8},
    "decode": {"trtllm_num_requests_waiting": 4.0, "trtllm_kv_cache_utilization": 0.8},
    "prefill": {"trtllm_prefill_tokens_waiting": 16384.0},
    "encode": {"trtllm_encode_requests_waiting": 4.0},
}
"""Metrics of each role, with the value of each at which a replica has enough work."""
_BUSY = ("trtllm_num_requests_running", "trtllm_num_requests_waiting")
_TIMEOUT_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 60.0
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)")

Load = Mapping[str, float]
"""Metrics of a replica, by name; labels are added up."""


class ScaleError(Exception):
    """Kubernetes, or the folder of local replicas, does not answer or refuses."""


@dataclass(frozen=True)
class ScalingPolicy:
    """Policy for the number of replicas that a load needs."""

    targets: Mapping[str, float]
    """Target of each metric for one replica; the metric that needs most replicas decides."""
    least: int = 1
    most: int = 4
    tolerance: float = 0.1
    """Fraction by which the mean may differ from the target without a change."""
    up_seconds: float = 15.0
    """Pause after a change before replicas are added: new ones need time to take load."""
    down_seconds: float = 300.0
    """Seconds for which fewer replicas must have been enough before one is removed."""

    def needed(self, current: int, loads: Sequence[Load]) -> int:
        """Return how many replicas these loads need, within the bounds and without cooldowns. Some may report no load.

        Those that do not report count as idle when there would be more, and as busy when there would be fewer.
        """
        if not loads or not current:
            return self._bounded(current)
        return self._bounded(max(self._for(metric, target, current, loads) for metric, target in self.targets.items()))

    def _for(self, metric: str, target: float, current: int, loads: Sequence[Load]) -> int:
        values = [load[metric] for load in loads if metric in load]
        if not values:
            return current
        silent = max(0, current - len(values))
        for assumed in (0.0, target):
            ratio = (sum(values) + silent * assumed) / current / target
            if assumed == 0.0 and ratio > 1 + self.tolerance:
                return math.ceil(current * ratio - 1e-9)
            if assumed and ratio < 1 - self.tolerance:
                return math.ceil(current * ratio - 1e-9)
        return current

    def _bounded(self, count: int) -> int:
        return min(self.most, max(self.least, count))


@dataclass
class Decider:
    """Applies a policy over time."""

    policy: ScalingPolicy
    _history: deque[tuple[float, int]] = field(default_factory=deque)
    _changed: float = -math.inf
    _began: float | None = None

    def decide(self, now: float, current: int, loads: Sequence[Load]) -> int:
        """Return how many replicas there should be from now on."""
        policy = self.policy
        self._began = now if self._began is None else self._began
        needed = policy.needed(current, loads)
        self._history.append((now, needed))
        while self._history[0][0] < now - policy.down_seconds:
            self._history.popleft()
        if not policy.least <= current <= policy.most:
            return self._change(now, min(policy.most, max(policy.least, current)))
        if needed > current and now - self._changed >= policy.up_seconds:
            return self._change(now, needed)
        quiet = now - self._began >= policy.down_seconds and now - self._changed >= policy.up_seconds
        if quiet and max(count for _, count in self._history) < current:
            return self._change(now, current - 1)
        return current

    def _change(self, now: float, count: int) -> int:
        self._changed = now
        return count


class Scaled(Protocol):
    """Replicas of one role. Methods raise ScaleError."""

    def count(self) -> int:
        """Return the number of replicas that `scale` was last called with."""
        ...

    def loads(self, names: Sequence[str]) -> list[Load]:
        """Return these metrics of all replicas that are ready."""
        ...

    def scale(self, count: int) -> None:
        """Set the number of replicas."""
        ...

    def settle(self) -> None:
        """Start, drain and stop replicas as needed."""
        ...


def plan(scaled: Scaled, decider: Decider, say: Callable[[str], object], now: float) -> None:
    """Read the metrics once, and change the number of replicas if needed."""
    scaled.settle()
    current = scaled.count()
    loads = scaled.loads(list(decider.policy.targets))
    wanted = decider.decide(now, current, loads)
    if wanted != current:
        shown = "; ".join(", ".join(f"{name} {value:g}" for name, value in load.items()) for load in loads)
        say(f"{current} to {wanted} replicas ({shown or 'no metrics'})")
        scaled.scale(wanted)
        scaled.settle()


def read_metrics(url: str, names: Sequence[str], key: str = "") -> dict[str, float] | None:
    """Return metrics of a replica, labels added up; None unless it is ready."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        _get(f"{url}/health/ready", headers)
        text = _get(f"{url}/metrics", headers).decode(errors="replace")
    except (OSError, HTTPException):
        return None
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and match[1] in names:
            with contextlib.suppress(ValueError):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def _get(url: str, headers: Mapping[str, str]) -> bytes:
    with urllib.request.urlopen(
        urllib.request.Request(url, headers=dict(headers)), timeout=_TIMEOUT_SECONDS
    ) as response:
        return bytes(response.read())


@dataclass
class LocalReplica:
    """A process of this machine; `born` as in `RunningProcess.started`."""

    url: str
    pid: int
    born: int
    draining_since: float | None = None
    stopped: bool = False
    ready: bool = False

    @property
    def alive(self) -> bool:
        with contextlib.suppress(ChildProcessError):  # that of another planner
            os.waitpid(self.pid, os.WNOHANG)
        return tree.runs(tree.RunningProcess(self.pid, self.born))


class LocalReplicas:
    """Replicas that are processes of this machine. They outlive the planner, whose successor adopts them.

    `FOLDER/ROLE.urls` has the URLs of those that take requests, for ROUTE_URLS or PREFILL_URLS of others as
    `file:///FOLDER/ROLE.urls`. A replica leaves this file, then finishes its requests, then is stopped.
    """

    def __init__(
        self,
        folder: Path,
        role: str,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        *,
        key: str = "",
        drain_seconds: float = 60.0,
        notice_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`command` returns what starts a replica at a port. `notice_seconds` pass between leaving the file and being
        stopped: its readers look every few seconds (RESOLVE_SECONDS).

        Raises ScaleError if another planner has the folder.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        self.urls = folder / f"{role}.urls"
        self._folder = folder
        self._role = role
        self._command = command
        self._environment = dict(environment)
        self._key = key
        self._drain_seconds = drain_seconds
        self._notice_seconds = notice_seconds
        self._clock = clock
        self._state = folder / f"{role}.json"
        self._lock = (folder / f"{role}.lock").open("a")
        self._failures = 0
        self._not_before = 0.0
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ScaleError(f"another planner scales {role} replicas in {folder}") from error
        self._wanted, self.replicas = self._read()

    def close(self) -> None:
        """Release the folder for another planner. The replicas keep running."""
        self._lock.close()

    def count(self) -> int:
        return self._wanted

    def loads(self, names: Sequence[str]) -> list[Load]:
        loads = (read_metrics(replica.url, names, self._key) for replica in self._serving())
        return [load for load in loads if load is not None]

    def scale(self, count: int) -> None:
        self._wanted = count
        self._write()

    def settle(self) -> None:
        for replica in list(self.replicas):
            if not replica.alive:
                self._lost(replica)
            elif replica.draining_since is not None:
                self._drain(replica)
            elif not replica.ready:
                replica.ready = read_metrics(replica.url, (), self._key) is not None
                self._failures = 0 if replica.ready else self._failures
        serving = self._serving()
        for replica in serving[self._wanted :]:  # the newest
            replica.draining_since = self._clock()
        try:
            if self._clock() >= self._not_before:
                for _ in range(self._wanted - len(serving)):
                    self.replicas.append(self._start())
        finally:  # those before one that cannot be started run
            self._write()

    def _serving(self) -> list[LocalReplica]:
        return [replica for replica in self.replicas if replica.draining_since is None]

    def _lost(self, replica: LocalReplica) -> None:
        """Forget a replica that has ended. If it ended by itself, the next start is delayed, each time longer."""
        self.replicas.remove(replica)
        if not replica.stopped:
            self._failures += 1
            self._not_before = self._clock() + min(_LONGEST_PAUSE_SECONDS, 2.0 ** (self._failures - 1))

    def _drain(self, replica: LocalReplica) -> None:
        """Stop a replica that routers no longer choose, once it is idle or `drain_seconds` have passed."""
        assert replica.draining_since is not None, "it drains"
        waited = self._clock() - replica.draining_since
        if replica.stopped and waited > 3 * self._drain_seconds:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(replica.pid, signal.SIGKILL)
        if replica.stopped or waited < self._notice_seconds:
            return
        load = read_metrics(replica.url, _BUSY, self._key)
        if load is None or not any(load.values()) or waited > self._drain_seconds:
            replica.stopped = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(replica.pid, signal.SIGTERM)  # a server finishes what came meanwhile

    def _start(self) -> LocalReplica:
        port = free_port()
        with (self._folder / "logs" / f"{self._role}-{port}.log").open("ab") as log:
            try:
                process = subprocess.Popen(
                    list(self._command(port)), env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ScaleError(f"a replica cannot be started: {error}") from error
        process.returncode = 0  # it outlives us: Popen shall not wait for it, nor warn
        started = tree.find(process.pid)
        return LocalReplica(f"http://127.0.0.1:{port}", process.pid, started.started if started else 0)

    def _read(self) -> tuple[int, list[LocalReplica]]:
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
            return int(state["wanted"]), [LocalReplica(**entry) for entry in state["replicas"]]
        except FileNotFoundError:
            return 0, []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ScaleError(f"{self._state} cannot be read: {error}") from error

    def _write(self) -> None:
        state = {"wanted": self._wanted, "replicas": [asdict(replica) for replica in self.replicas]}
        write_whole(self._state, json.dumps(state, indent=1) + "\n")
        write_whole(self.urls, "".join(f"{replica.url}\n" for replica in self._serving() if replica.ready))


class KubernetesReplicas:
    """Replicas of a Deployment, StatefulSet or LeaderWorkerSet, by its scale subresource. Pods are drained by their
    preStop hooks and grace periods.
    """

    def __init__(
        self,
        api: str,
        namespace: str,
        name: str,
        *,
        token: Callable[[], str] = str,
        ca: Path | None = None,
        port: int = 8000,
        key: str = "",
    ) -> None:
        """`name` is RESOURCE/NAME, such as deployments/trellis-decode. `token` is called for each request, since
        Kubernetes replaces a pod's token within the hour. Raises ScaleError.
        """
        resource, slash, own = name.partition("/")
        groups = {
            "deployments": "apps/v1", "statefulsets": "apps/v1",
            "leaderworkersets": "leaderworkerset.x-k8s.io/v1",
        }  # fmt: skip
        if not slash or not own or resource not in groups:
            raise ScaleError(f"{name}: write {', '.join(f'{each}/NAME' for each in groups)}")
        base = f"{api.rstrip('/')}/apis/{groups[resource]}/namespaces/{quote(namespace)}"
        self._url = f"{base}/{resource}/{quote(own)}/scale"
        self._pods = f"{api.rstrip('/')}/api/v1/namespaces/{quote(namespace)}/pods"
        self._token = token
        self._tls = ssl.create_default_context(cafile=str(ca)) if ca else None
        self._port = port
        self._key = key

    def count(self) -> int:
        return int(self._ask(self._url)["spec"].get("replicas", 0))

    def loads(self, names: Sequence[str]) -> list[Load]:
        selector = self._ask(self._url)["status"].get("selector", "")
        pods = self._ask(f"{self._pods}?labelSelector={quote(selector)}")["items"]
        loads = (read_metrics(self._address(pod), names, self._key) for pod in pods if _serves(pod))
        return [load for load in loads if load is not None]

    def scale(self, count: int) -> None:
        self._ask(self._url, {"spec": {"replicas": count}})

    def settle(self) -> None:
        """Do nothing: the cluster starts and stops pods."""

    def _address(self, pod: Mapping[str, Any]) -> str:
        address = pod["status"]["podIP"]
        return f"http://[{address}]:{self._port}" if ":" in address else f"http://{address}:{self._port}"

    def _ask(self, url: str, patch: Mapping[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        body = None if patch is None else json.dumps(patch).encode()
        if patch is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        request = urllib.request.Request(url, body, headers, method="PATCH" if body else "GET")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS, context=self._tls) as response:
                return dict(json.load(response))
        except HTTPError as error:
            said = error.read(300).decode(errors="replace")
            raise ScaleError(f"{url}: HTTP {error.code}: {said}") from error
        except (OSError, ValueError, HTTPException) as error:
            raise ScaleError(f"{url}: {error}") from error


def _serves(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is ready and not being deleted."""
    status = pod.get("status", {})
    ready = any(entry["type"] == "Ready" and entry["status"] == "True" for entry in status.get("conditions", ()))
    return ready and bool(status.get("podIP")) and "deletionTimestamp" not in pod.get("metadata", {})


def looks(seconds: float, stopped: Callable[[], bool]) -> Iterator[float]:
    """Yield the time for each look, `seconds` apart, until `stopped`."""
    while not stopped():
        now = time.monotonic()
        yield now
        while not stopped() and time.monotonic() < now + seconds:
            time.sleep(min(0.1, seconds))
