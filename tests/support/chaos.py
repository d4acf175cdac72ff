"""Replicas of a small model that can be killed, stopped and started again, and a load that checks every answer."""

import itertools
import json
import random
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import httpx
import psutil

from benchmarks.gpu.model import FIRST_WORD, Shape, write_folder, write_weights
from engine.process.sockets import free_port
from tests.support.disaggregated import SECRET, servers
from tests.support.servers import ServerProcess
from tests.support.waiting import slowness

SHAPE = Shape(256, 6, 4, 2, 512, vocabulary=2048, max_position=2048, spread=0.1)
"""6 KiB of keys and values for each token, and a step in a few milliseconds."""
FLAGS = (
    "--engine",
    "embedded",
    "--threads",
    "1",
    "--max-seq-len",
    "1024",
    "--max-num-tokens",
    "128",
    "--kv-cache-memory-mb",
    "48",
)
STREAMS = 8
LONGEST = 10.0
"""Seconds that a request may take, whatever happens."""
_EMPTY = (
    "trtllm_num_requests_running",
    "trtllm_num_requests_queued",
    "trtllm_num_requests_held",
    "trtllm_num_requests_fetching",
    "trtllm_kv_cache_held_blocks",
    "trtllm_kv_cache_used_blocks",
)
_TLS = ssl.create_default_context()
"""Shared: making one takes as long as a request."""
_rng = random.Random(5)
PROMPTS = [[_rng.randrange(FIRST_WORD, SHAPE.vocabulary) for _ in range(_rng.randrange(40, 300))] for _ in range(10)]


def write_model(folder: Path) -> None:
    write_folder(folder, SHAPE)
    write_weights(folder, seed=1)


class Replica:
    """A server that starts again at the port it had."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.port = free_port()
        self._flags = ("--internal-secret", SECRET, *flags, "--port", str(self.port))
        self.server = ServerProcess(*self._flags)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> psutil.Process:
        return self.server.child("engine.process.host")

    @property
    def alive(self) -> bool:
        return self.server.process.poll() is None

    def restart(self) -> None:
        """Begin to start, after the end of what ran."""
        self.server.wait(20)
        self.server = ServerProcess(*self._flags)

    def wait_idle(self) -> None:
        """Nothing runs, waits or is held any more."""
        for name in _EMPTY:
            self.server.wait_metric(name, 0)


class Cluster:
    """Two prefill and two decode replicas, and what an aggregated one says to each of `PROMPTS`.

    One decode replica reads blocks from shared memory, the other over TCP, which needs their owner: a read breaks or
    stalls with it.
    """

    def __init__(self, model: Path) -> None:
        common = (*FLAGS, "--model", str(model), "--transfer-timeout-seconds", "2")
        with servers(common) as (whole,):
            self.expected = [ask(whole.url, index)[2] for index in range(len(PROMPTS))]
        self.prefill = [Replica((*common, "--disaggregation-mode", "prefill")) for _ in range(2)]
        urls = ("--prefill-urls", ",".join(peer.url for peer in self.prefill))
        self.decode = [
            Replica((*common, "--disaggregation-mode", "decode", *urls, "--kv-transfer", method))
            for method in ("shared_memory", "tcp")
        ]
        self.replicas = [*self.prefill, *self.decode]

    def recover(self) -> None:
        """Return once all replicas serve, each knows its peers, and nothing is left anywhere."""
        for replica in self.replicas:
            if not replica.alive:
                replica.restart()
        deadline = time.monotonic() + 60 * slowness()
        with httpx.Client() as client:
            while not all(_serves(client, replica) for replica in self.replicas):
                assert time.monotonic() < deadline, "\n".join(replica.server.log[-1000:] for replica in self.replicas)
                time.sleep(0.1)
        for replica in self.decode:
            replica.server.wait_metric("trtllm_prefill_peer_available", 2, timeout=40)
        for replica in self.replicas:
            replica.wait_idle()

    def close(self) -> None:
        for replica in reversed(self.replicas):
            if replica.alive:
                replica.server.process.terminate()
        for replica in self.replicas:
            replica.server.wait(20)


def _serves(client: httpx.Client, replica: Replica) -> bool:
    assert replica.alive, replica.server.log
    replica.server.url = replica.url
    try:
        return client.get(f"{replica.url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


class Outcome(NamedTuple):
    seconds: float
    kind: str
    """right, wrong, refused (an error's envelope), cut (its event), or what came instead of one of these."""
    said: str


_salts = itertools.count()


def ask(url: str, index: int) -> tuple[str, str, str]:
    """Return how a stream after a prompt ends (done, refused, cut or vague), why, and its text.

    The prompt's blocks are found in no cache.
    """
    fields = {
        "prompt": PROMPTS[index],
        "max_tokens": 20 + 4 * index,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text = ""
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**fields, "cache_salt": f"salt {next(_salts)}"}, timeout=30, verify=_TLS
    ) as answer:
        if answer.status_code != 200:
            error = json.loads(answer.read())["error"]
            return (
                "refused" if error["message"] and answer.status_code in (429, 500, 502, 503) else "vague",
                str(error),
                "",
            )
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return "done", "", text
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return "cut" if event["error"]["message"] else "vague", str(event["error"]), text
                text += event["choices"][0]["text"]
    return "vague", "the stream has ended without a word", text


class Load:
    """Stream to all decode replicas, one request after the other, while the context lasts.

    `outcomes` then holds every request. With `failover`, a client that is refused, or disconnected before the first
    event, asks another replica, as nginx does. `pause` is the number of seconds between two requests of a stream, so
    that what is restarted gets a turn.
    """

    def __init__(self, cluster: Cluster, failover: bool = False, pause: float = 1.0) -> None:
        self.outcomes: list[Outcome] = []
        self._cluster, self._failover, self._pause = cluster, failover, pause
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(STREAMS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def wait(self, more: int, seconds: float = 60.0) -> None:
        """Return once `more` requests have ended rightly from now on."""
        wanted, deadline = self.right + more, time.monotonic() + seconds
        while self.right < wanted:
            assert time.monotonic() < deadline, self.report()
            time.sleep(0.02)

    @property
    def right(self) -> int:
        return sum(outcome.kind == "right" for outcome in self.outcomes)

    def check(self, allowed: Sequence[str] = ()) -> None:
        """Each ended in time, rightly or as `allowed`."""
        assert not [outcome for outcome in self.outcomes if outcome.kind not in ("right", *allowed)], self.report()
        seconds = sorted(outcome.seconds for outcome in self.outcomes)
        assert seconds[-1] < LONGEST + 5 * seconds[len(seconds) // 2], (
            self.report()
        )  # who shares a busy machine is slower all along

    def report(self) -> str:
        counts = Counter(
            (outcome.kind, outcome.said[:300] if outcome.kind != "right" else "") for outcome in self.outcomes
        )
        return f"{counts}, the longest {max((outcome.seconds for outcome in self.outcomes), default=0):.1f} s"

    def _run(self, number: int) -> None:
        for index in range(number, 1 << 30):
            if self._over.is_set():
                return
            began = time.monotonic()
            kind, said = self._ask(index)
            self.outcomes.append(Outcome(time.monotonic() - began, kind, said))
            time.sleep(self._pause if kind == "right" else 0.1)

    def _ask(self, index: int) -> tuple[str, str]:
        replicas = self._cluster.decode
        urls = [replicas[(index + more) % len(replicas)].url for more in range(len(replicas) if self._failover else 1)]
        kind, why = "", ""
        for url in urls:
            try:
                kind, why, text = ask(url, index % len(PROMPTS))
            except (httpx.ConnectError, httpx.RemoteProtocolError) as error:
                if "incomplete" in str(error):
                    return "lost", repr(error)
                kind, why = "unreachable", repr(error)
                continue
            except httpx.HTTPError as error:
                return "lost", repr(error)
            expected = self._cluster.expected[index % len(PROMPTS)]
            if not (expected == text if kind == "done" else expected.startswith(text)):
                return "wrong", f"{text!r} is not {expected!r}"
            if kind != "refused":
                break
        return "right" if kind == "done" else kind, why


@contextmanager
def cluster_of(model: Path) -> Iterator[Cluster]:
    cluster = Cluster(model)
    try:
        cluster.recover()
        yield cluster
        cluster.recover()
    finally:
        cluster.close()
