"""Prefill replicas on real sockets in this process, a decode engine before them, and whole replicas in processes."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import msgspec
import uvicorn

from engine.admission import AdmissionEngine
from engine.base import DeltaStream, Engine
from engine.config import FakeConfig
from engine.fake.engine import FakeEngine
from engine.replicas.pool import R, ReplicaPool
from engine.replicas.prefill_engine import DisaggregatedEngine
from engine.replicas.prefill_pool import PrefillPool
from engine.stats import IterationStats
from engine.types import Delta, GenerateRequest, Handoff, SamplingParams
from protocol.internal import VERSION, PrefillInfo
from routers.state import ReplicaState
from server.app import create_app
from server.http.connection import HttpConnection
from server.process.serving import listen, url_of
from server.settings import Settings
from tests.support.servers import ServerProcess

SECRET = "between us"
BEARER = {"authorization": f"Bearer {SECRET}"}
SOON = 5.0
"""100 ms are promised; a busy machine gets more. Without help, what these tests wait for would take a minute."""
INFO = PrefillInfo(VERSION, "fake", "fake", "none", FakeConfig().block_size, 1, "")
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
"""Head of a prefill replica's answer."""
PROMPT = tuple(range(10, 80))


class Seen:
    """A `RemoteObserver` that remembers."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.by_peer: Counter[str] = Counter()
        self.local: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self.retries = 0
        self.peers: dict[str, bool] = {}

    def answered(self, peer: str, outcome: str, seconds: float) -> None:
        self.outcomes[outcome] += 1
        self.by_peer[peer] += outcome == "ok"

    def retried(self) -> None:
        self.retries += 1

    def computed_locally(self, reason: str) -> None:
        self.local[reason] += 1

    def remote_rows(self, outcome: str) -> None:
        self.rows[outcome] += 1

    def available(self, peer: str, available: bool) -> None:
        self.peers[peer] = available

    def gone(self, peer: str) -> None:
        self.peers.pop(peer, None)
        self.by_peer.pop(peer, None)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def replica(role: str, **settings: Any) -> AsyncIterator[tuple[str, ReplicaState]]:
    """URL and inner life of a replica without a model."""
    given = {"engine": "fake", "engine_process": False, "disaggregation_mode": role, "internal_secret": SECRET}
    app = create_app(Settings(**{**given, **settings}))
    http: Any = partial(HttpConnection, head_seconds=5.0, send_seconds=5.0)
    server = _Server(
        uvicorn.Config(
            app, http=http, ws="none", lifespan="on", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
    )
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.started and server.lifespan.state["replica"].ready):
        assert not serving.done()
        await asyncio.sleep(0.005)
    life: ReplicaState = server.lifespan.state["replica"]
    assert life.service is not None
    try:
        yield url_of(listener), life
    finally:
        await life.service.close()
        server.should_exit = True
        await serving
        listener.close()


@asynccontextmanager
async def prefill_replica(**settings: Any) -> AsyncIterator[tuple[str, AdmissionEngine, ReplicaState]]:
    """URL, engine and inner life of a prefill replica with the fake engine."""
    async with replica("prefill", **settings) as (url, life):
        assert life.engine is not None
        yield url, life.engine, life


@asynccontextmanager
async def decode_engine(
    urls: Sequence[str],
    *,
    min_tokens: int | None = 0,
    attempts: int = 3,
    secret: str = SECRET,
    model: str = "fake",
    **fake: Any,
) -> AsyncIterator[tuple[DisaggregatedEngine, Seen]]:
    """A started decode engine over a fake one."""
    seen = Seen()
    engine = DisaggregatedEngine(
        FakeEngine(FakeConfig(**fake)), PrefillPool(urls, secret, attempts, seen), model, min_tokens, seen
    )
    await engine.start()
    try:
        yield engine, seen
    finally:
        await engine.close()


@asynccontextmanager
async def pair(
    prefill: dict[str, Any] | None = None, **decode: Any
) -> AsyncIterator[tuple[AdmissionEngine, DisaggregatedEngine, Seen]]:
    """The engine of a prefill replica, and a decode engine before it."""
    async with prefill_replica(**(prefill or {})) as (url, peer, _), decode_engine([url], **decode) as (engine, seen):
        yield peer, engine, seen


def replica_at(pool: ReplicaPool[R], url: str) -> R:
    return next(replica for replica in pool.replicas if replica.url == url)


async def busy(engine: Engine) -> DeltaStream:
    """A request that keeps the steps of a slow fake engine far apart: what comes now waits for the next."""
    stream = engine.generate(request("busy", max_tokens=1000, prompt=tuple(range(100, 140))))
    await anext(stream)
    return stream


def answer_of(body: bytes, status: bytes = b"200 OK", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(body), body)


@asynccontextmanager
async def bare_peer(
    after: bytes = b"", info: PrefillInfo = INFO, port: int = 0, probes: Sequence[bytes] = ()
) -> AsyncIterator[str]:
    """URL of a replica that answers probes with `info`, and a prefill with the bytes `after` and nothing more.

    The first probes are answered with the bytes `probes`.
    """
    answer = answer_of(msgspec.msgpack.encode(info))
    answers = [*probes]
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
                writer.write(answers.pop(0) if answers else answer)
            writer.write(after)
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


def request(request_id: str = "r", prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> GenerateRequest:
    parameters = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **sampling})
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=parameters)


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def at_the_end(_: Handoff | None) -> None:
    """Read nothing before the whole prompt is computed."""


async def all_of(engine: Engine, wanted: GenerateRequest) -> list[Delta]:
    return [delta async for delta in engine.generate(wanted)]


async def aggregated(wanted: GenerateRequest, **fake: Any) -> list[Delta]:
    """What one engine says."""
    engine = FakeEngine(FakeConfig(**fake))
    await engine.start()
    try:
        return await all_of(engine, wanted)
    finally:
        await engine.close()


async def stats_with(
    engine: Engine, condition: Callable[[IterationStats], object], seconds: float = 20.0
) -> IterationStats:
    """The first statistics of which `condition` is true; fails if they take longer than `seconds`."""
    async with asyncio.timeout(seconds):
        async for stats in engine.stats():
            if condition(stats):
                return stats
    raise AssertionError("the statistics have ended")


def nothing(stats: IterationStats) -> bool:
    """Whether nothing runs, waits or is held."""
    running = stats.num_active_requests or stats.num_queued_requests or stats.num_held_requests
    return not running and not stats.kv_cache_stats.used_num_blocks


@contextmanager
def servers(*commands: Sequence[str]) -> Iterator[list[ServerProcess]]:
    """Ready servers that were started together, killed afterwards if they still run."""
    started = [ServerProcess("--internal-secret", SECRET, *flags) for flags in commands]
    try:
        for server in started:
            server.wait_ready()
        yield started
    finally:
        for server in started:
            if server.process.poll() is None:
                server.process.terminate()
        for server in started:
            server.wait()


@contextmanager
def cluster(
    prefill: int, decode: Sequence[str] = (), more: Sequence[str] = ()
) -> Iterator[tuple[list[ServerProcess], ServerProcess]]:
    """Prefill replicas and a decode replica, the flags `decode` its own, and `more` for all."""
    role = ("--disaggregation-mode", "prefill", *more)
    with ExitStack() as stack:
        peers = stack.enter_context(servers(*[role] * prefill))
        urls = ",".join(peer.url for peer in peers)
        flags = ("--disaggregation-mode", "decode", "--prefill-urls", urls, "--prefill-min-tokens", "0", *decode, *more)
        (front,) = stack.enter_context(servers(flags))
        yield peers, front


def wait_empty(*replicas: ServerProcess) -> None:
    """Nothing may run or be held any more."""
    for replica in replicas:
        for name in ("trtllm_num_requests_running", "trtllm_num_requests_held", "trtllm_kv_cache_used_blocks"):
            replica.wait_metric(name, 0)
