"""Compare the KV-aware router with nginx' round robin, in front of the same replicas and with the same chats.

    python -m benchmarks.routing                        # 4 replicas of SmolLM2 on this CPU, one thread each; minutes
    python -m benchmarks.routing --engine fake --only overhead

Chats: conversations of several turns that begin with one of a few long system prompts; a prompt contains all previous
turns. They are repeated while a replica is killed and restarted. Overhead: the latency that the router adds to a
request, and its CPU time per event of a stream. Unknown options are settings of all replicas.
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import httpx
import uvloop

from benchmarks.chats import Chats, Found, Rows, converse, served_model
from benchmarks.gpu.__main__ import settings_of
from benchmarks.metrics import total
from benchmarks.report import save, table
from benchmarks.servers import Server, Spec, reserved_port, serving
from deploy.disaggregated import nginx_configuration
from server.bench.machine import describe_machine
from server.bench.prompts import words


class Replicas:
    """Replicas that keep their ports when restarted."""

    def __init__(self, flags: list[str], count: int, stack: ExitStack) -> None:
        self._flags, self._stack = flags, stack
        self.ports = [tuple(stack.enter_context(reserved_port()) for _ in range(3)) for _ in range(count)]
        self.servers = [self._serve(place) for place in range(count)]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port, _, _ in self.ports]

    def router(self, *flags: str) -> Spec:
        events, replays = (",".join(f"tcp://127.0.0.1:{ports[place]}" for ports in self.ports) for place in (1, 2))
        argv = (
            "--disaggregation-mode",
            "router",
            "--route-urls",
            ",".join(self.urls),
            "--route-events",
            events,
            "--route-replays",
            replays,
        )
        return Spec(
            "router",
            (sys.executable, "-m", "server", "--port", "{port}", *argv, *self._flags, *flags),
            "/health/ready",
            answers=False,
        )

    def _serve(self, place: int) -> Server:
        port, events, replay = self.ports[place]
        sockets = (
            "--kv-events-endpoint",
            f"tcp://127.0.0.1:{events}",
            "--kv-events-replay-endpoint",
            f"tcp://127.0.0.1:{replay}",
        )
        argv = (
            sys.executable,
            "-m",
            "server",
            "--port",
            "{port}",
            "--publish-kv-events",
            "true",
            *sockets,
            *self._flags,
        )
        return self._stack.enter_context(
            serving(Spec(f"replica-{place}", argv, "/health/ready", port=port, answers=False))
        )

    def kill(self, place: int) -> None:
        os.killpg(self.servers[place].process.pid, signal.SIGKILL)

    def restart(self, place: int) -> None:
        self.servers[place] = self._serve(place)


@contextmanager
def nginx(urls: list[str]) -> Iterator[str]:
    """Run nginx in front of replicas with the shipped configuration, which is round robin; yield its URL."""
    binary = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if binary is None:
        raise SystemExit("nginx is not installed")
    with tempfile.TemporaryDirectory(prefix="trellis-nginx-") as name, reserved_port() as port:
        folder = Path(name)
        (folder / "nginx.conf").write_text(nginx_configuration(urls, port, folder))
        directives = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
        argv = (binary, "-e", "stderr", "-p", name, "-c", f"{name}/nginx.conf", "-g", directives)
        with serving(Spec("nginx", argv, "/health/ready", port=port, answers=False)) as server:
            yield server.url


async def with_kill(url: str, chats: Chats, seed: str, replicas: Replicas) -> Found:
    """Hold the chats; after a third of the answers, kill a replica and restart it three seconds later."""
    found = Found()
    running = asyncio.create_task(converse(url, chats, seed, "killed", found))
    while found.kinds["right"] < chats.sessions * chats.turns // 3:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    replicas.kill(1)
    await asyncio.sleep(3)
    await asyncio.to_thread(replicas.restart, 1)
    await running
    return found


async def overhead(direct: str, routed: Server, requests: int, tokens: int) -> Rows:
    """Measure what the router adds in front of a replica that needs no time.

    Returns medians of alternating requests, and CPU time over long streams.
    """
    seconds: dict[str, list[float]] = {direct: [], routed.url: []}
    async with httpx.AsyncClient(timeout=60) as client:
        model = await served_model(client, direct)
        body = {"model": model, "prompt": words(300, random.Random(1)), "max_tokens": 1, "ignore_eos": True}
        for _ in range(requests):
            for url, times in seconds.items():
                began = time.perf_counter()
                (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
                times.append(time.perf_counter() - began)
        page = (await client.get(f"{routed.url}/metrics")).text
        before, began = routed.cpu_seconds(), time.perf_counter()
        long = {**body, "max_tokens": tokens, "stream": True}
        chunks = sum(await asyncio.gather(*(count_chunks(client, routed.url, long) for _ in range(8))))
        used, took = routed.cpu_seconds() - before, time.perf_counter() - began
    rows = {
        f"{name}, p50 us": median(times) * 1e6
        for name, times in zip(("request, direct", "request, routed"), seconds.values(), strict=True)
    }
    for name in ("tokenize", "choose"):
        metric = f"trtllm_router_{name}_seconds"
        rows[f"of it {name}, mean us"] = total(page, f"{metric}_sum") / max(total(page, f"{metric}_count"), 1) * 1e6
    return {**rows, "CPU for an event of a stream, us": used / chunks * 1e6, "events/s through it": chunks / took}


async def count_chunks(client: httpx.AsyncClient, url: str, body: dict[str, object]) -> int:
    count = 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        async for data in answer.aiter_raw():
            count += data.count(b"data: ")
    return count


def measure(args: argparse.Namespace) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    with ExitStack() as stack:
        if args.only != "overhead":
            replicas = Replicas(args.flags, args.replicas, stack)
            with nginx(replicas.urls) as url:
                found["nginx, round robin"] = run_chats(url, args, "nginx")
            with serving(replicas.router("--route-policy", "round_robin")) as server:
                found["router, round_robin"] = run_chats(server.url, args, "robin")
            with serving(replicas.router()) as server:
                found["router, kv"] = run_chats(server.url, args, "kv")
                killed = asyncio.run(with_kill(server.url, args.chats, args.seed, replicas))
                found["router, kv, one killed"] = killed.rows()
    if args.only != "chats":
        with ExitStack() as stack:
            replicas = Replicas(["--engine", "fake", "--fake-token-delay-ms", "2"], 1, stack)
            router = stack.enter_context(serving(replicas.router()))
            found["overhead"] = uvloop.run(overhead(replicas.urls[0], router, args.requests, args.tokens))
    return found


def run_chats(url: str, args: argparse.Namespace, salt: str) -> Rows:
    found = Found()
    asyncio.run(converse(url, args.chats, args.seed, salt, found))
    return found.rows()


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack, which stops the servers
    facts = {
        **describe_machine(),
        "chats": str(args.chats),
        "replicas": args.replicas,
        "seed": args.seed,
        "settings": " ".join(args.flags),
    }
    found = measure(args)
    names = list(dict.fromkeys(name for side, rows in found.items() if side != "overhead" for name in rows))
    lines = [
        [side, *(f"{rows[name]:.0f}" if name in rows else "" for name in names)]
        for side, rows in found.items()
        if side != "overhead"
    ]
    parts = ["\n".join(f"- {key}: {value}" for key, value in facts.items())]
    parts += [table(["before the replicas", *names], lines)] if lines else []
    if "overhead" in found:
        parts.append(
            table(["the router alone", ""], [[name, f"{value:.0f}"] for name, value in found["overhead"].items()])
        )
    markdown = "\n\n".join([f"# Benchmark: {args.label}", *parts]) + "\n"
    print("\n" + markdown)
    print(f"written to {save(args.output, args.label, markdown, {'facts': facts, **found})}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument(
        "--chats", default="24:4:6:4:400:30:16:0.5", help="sessions:turns:concurrency:systems:system:user:answer:pause"
    )
    parser.add_argument("--only", choices=["chats", "overhead"])
    parser.add_argument("--requests", type=int, default=300, help="requests to measure the overhead of a request")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens per stream to measure the overhead of a token")
    parser.add_argument("--seed", default=str(int(time.time())))
    parser.add_argument("--label", default="routing-cpu", help="name of the result files")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    args, flags = parser.parse_known_args()
    *counts, pause = args.chats.split(":")
    args.chats = Chats(*map(int, counts), float(pause))
    given = {"threads": "1", "max-seq-len": "4096", "kv-cache-memory-mb": "256"} | settings_of(flags, parser)
    args.flags = [part for name, value in given.items() for part in (f"--{name}", value)]
    return args


if __name__ == "__main__":
    sys.exit(main())
