"""Compare a prefill and a decode replica with two aggregated replicas, over HTTP, on the same devices and load.

    python -m benchmarks.disaggregated                      # SmolLM2 on this CPU, one thread per replica
    python -m benchmarks.disaggregated --device cuda        # Llama 3.1 8B's shape on GPU 0 and 1, about two minutes

Handoff: for one prompt at a time, the time from the first token, which the prefill replica computes, to the second, the
first of the decode replica; an aggregated replica's time between them is shown for comparison. Mix: streams run while
long prompts arrive at a steady rate. Unknown options are settings of all replicas.
"""

import argparse
import asyncio
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.gpu.__main__ import arguments, settings_of
from benchmarks.gpu.load import token_ids
from benchmarks.gpu.model import SHAPES, write_folder
from benchmarks.gpu.report import describe_gpu
from benchmarks.metrics import total
from benchmarks.report import save, table
from benchmarks.servers import Server, Spec, reserved_port, serving
from server.bench.client import LoadRun, Target, exchange
from server.bench.machine import describe_machine
from server.bench.summary import Sample, percentile

SMOLLM2 = "smollm2-135m-instruct"
CPU = {"device": "cpu", "threads": "1", "max-seq-len": "2048", "prefill-min-tokens": "16"}
CUDA = {"device": "cuda", "dtype": "bfloat16", "max-batch-size": "64", "max-num-tokens": "2048", "max-seq-len": "20480"}
PREFILL_CUDA = {"max-num-tokens": "4096"}
"""Prefill replicas compute long prompts in large chunks: no stream waits for them."""
VOCABULARY = 49152
PEER_SECONDS = 60.0
MOST_LONG = 160
"""Maximum number of long prompts in a mix. They are generated beforehand, to keep the client's timing exact."""
Rows = dict[str, float]
"""Measured values by name; names end with the unit."""


@dataclass(frozen=True, slots=True)
class Mix:
    """`streams` streams of (prompt, output) tokens, and every `every` seconds a prompt of `long` tokens."""

    streams: int
    prompt: int
    output: int
    long: int
    every: float


CPU_MIX, CUDA_MIX = Mix(4, 64, 400, 256, 1.0), Mix(32, 512, 1200, 8192, 0.5)


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack, which stops the servers
    facts = {**describe_gpu(), **describe_machine(), **({"commit": args.commit} if args.commit else {})}
    facts |= {
        "model": args.model,
        "mix": args.mix,
        "seed": args.seed,
        "settings": arguments(Path(args.model), args.flags)[2:],
    }
    for key, value in facts.items():
        print(f"- {key}: {value}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="trellis-disaggregated-") as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        if args.model in SHAPES:
            write_folder(Path(folder) / args.model, SHAPES[args.model])
        run = DisaggregatedRun(args, args.model if args.model not in SHAPES else str(Path(folder) / args.model), logs)
        found = {"disaggregated": run.disaggregated(), "aggregated": run.aggregated()}
    facts["whole run, s"] = f"{time.perf_counter() - began:.0f}"
    lines = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    markdown = f"# Benchmark: {args.label}\n\n{lines}\n\n{rendered(**found)}\n"
    print("\n" + markdown)
    print(f"written to {save(args.output, args.label, markdown, {'facts': facts, **found})}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disaggregated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", help=f"folder, model name, or a shape without weights: {', '.join(SHAPES)}")
    parser.add_argument(
        "--gpus", default="0,1", help="GPUs of the decode and the prefill replica; twice the same to share one"
    )
    parser.add_argument(
        "--prompts", default="", help="lengths in tokens of the prompts to hand off, separated by commas"
    )
    parser.add_argument("--repeats", type=int, default=5, help="measurements per prompt, after a warm-up")
    parser.add_argument("--mix", default="", help="streams:prompt:output:long:every, in tokens and seconds")
    parser.add_argument("--seed", default=str(int(time.time())))
    parser.add_argument("--commit", default="", help="commit to report if git is not available")
    parser.add_argument("--label", default="", help="name of the result files")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--logs", type=Path, help="folder for the logs of the replicas; default: a temporary one")
    args, flags = parser.parse_known_args()
    cuda = args.device == "cuda"
    args.model = args.model or ("llama-8b" if cuda else SMOLLM2)
    args.label = args.label or f"disaggregated-{args.device}"
    args.prompts = [
        int(tokens) for tokens in (args.prompts or ("512,4096,16384" if cuda else "128,512,1536")).split(",")
    ]
    args.mix = mix_of(args.mix) if args.mix else CUDA_MIX if cuda else CPU_MIX
    args.flags = (
        (CUDA if cuda else CPU)
        | ({"load-format": "dummy"} if args.model in SHAPES else {})
        | settings_of(flags, parser)
    )
    args.prefill_flags = args.flags | (PREFILL_CUDA if cuda else {})
    return args


def mix_of(text: str) -> Mix:
    streams, prompt, output, long, every = text.split(":")
    return Mix(int(streams), int(prompt), int(output), int(long), float(every))


class DisaggregatedRun:
    """Measures both set-ups, one after the other."""

    def __init__(self, args: argparse.Namespace, model: str, logs: Path) -> None:
        self._args = args
        self._model = model
        self._logs = logs
        self._vocabulary = SHAPES[args.model].vocabulary if args.model in SHAPES else VOCABULARY
        self._gpus = args.gpus.split(",")

    def disaggregated(self) -> Rows:
        with reserved_port() as port, reserved_port() as prefill_port:
            secret = {"INTERNAL_SECRET": secrets.token_hex(16)}
            roles = ("--disaggregation-mode", "decode", "--prefill-urls", f"http://127.0.0.1:{prefill_port}")
            decode = self._spec("decode", self._args.flags, 0, roles, secret)
            prefill = self._spec("prefill", self._args.prefill_flags, 1, ("--disaggregation-mode", "prefill"), secret)
            specs = [replace(decode, port=port), replace(prefill, port=prefill_port, answers=False)]
            with self._started(specs) as (server, _):
                wait_for_peer(server)
                return self._measured([server])

    def aggregated(self) -> Rows:
        with reserved_port() as one, reserved_port() as two:
            specs = [
                replace(self._spec(f"aggregated-{i}", self._args.flags, i, (), {}), port=port)
                for i, port in enumerate((one, two))
            ]
            with self._started(specs) as servers:
                return self._measured(servers)

    def _spec(self, name: str, flags: dict[str, str], gpu: int, more: tuple[str, ...], env: dict[str, str]) -> Spec:
        """Return a replica on its own GPU. It sees the other's GPU too, after its own, as CUDA IPC requires."""
        argv = (sys.executable, "-m", "server", "--port", "{port}", *arguments(Path(self._model), flags), *more)
        order = ",".join(dict.fromkeys([self._gpus[gpu], self._gpus[1 - gpu]]))
        return Spec(
            name,
            argv,
            "/health/ready",
            env=env if self._args.device == "cpu" else {**env, "CUDA_VISIBLE_DEVICES": order},
        )

    @contextmanager
    def _started(self, specs: list[Spec]) -> Iterator[list[Server]]:
        """Start servers together."""
        with ExitStack() as stack, ThreadPoolExecutor(len(specs)) as threads:
            contexts = [serving(spec, log=self._logs / f"{spec.name}.log") for spec in specs]
            begun = [threads.submit(context.__enter__) for context in contexts]
            for context, started in zip(contexts, begun, strict=True):
                if started.exception() is None:
                    stack.push(context.__exit__)
            servers = [started.result() for started in begun]
            for server in servers:
                print(f"{server.spec.name}: ready after {server.ready_seconds:.1f} s", flush=True)
            yield servers

    def _measured(self, servers: list[Server]) -> Rows:
        targets = [replace(server.target, endpoint="completions") for server in servers]
        rows: Rows = {}
        for tokens in self._args.prompts:
            rows |= self._hand_over(servers[0], targets[0], tokens)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows |= runner.run(mixed(targets, self._args.mix, self._vocabulary, random.Random(self._args.seed)))
        for name, value in rows.items():
            print(f"{name}: {shown(value)}", flush=True)
        return rows

    def _hand_over(self, server: Server, target: Target, tokens: int) -> Rows:
        """Return medians for one prompt at a time; transferred bytes and seconds are the engine's own counters."""
        samples, moved = [], []
        for repeat in range(self._args.repeats + 1):
            before = transferred(server)
            prompt = token_ids(tokens, self._vocabulary, random.Random(f"{self._args.seed}/{tokens}/{repeat}"))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                (sample,) = checked(
                    runner.run(exchange(target, LoadRun(1, 1, tokens, 8, timeout=120), [target.request(prompt, 8)]))
                )
            time.sleep(0.3)  # wait for the engine's statistics and for an idle cache
            if repeat:
                samples.append(sample)
                moved.append([after - was for was, after in zip(before, transferred(server), strict=True)])
        second = median(sample.gaps[0] for sample in samples)
        rows = {f"{tokens} tokens: first token after, ms": median(sample.ttft for sample in samples) * 1e3}
        rows |= {f"{tokens} tokens: from first token to second, ms": second * 1e3}
        rows |= {f"{tokens} tokens: from second to third, ms": median(sample.gaps[1] for sample in samples) * 1e3}
        size, seconds = (median(values) for values in zip(*moved, strict=True))
        if size:
            rows |= {f"{tokens} tokens: KV blocks, MiB": size / 2**20, f"{tokens} tokens: transfer, ms": seconds * 1e3}
            rows |= {
                f"{tokens} tokens: transfer, GB/s": size / seconds / 1e9,
                f"{tokens} tokens: to the second token, GB/s": size / second / 1e9 if second else 0.0,
            }
        return rows


def wait_for_peer(server: Server) -> None:
    deadline = time.monotonic() + PEER_SECONDS
    while not total(server.get("/metrics"), "trtllm_prefill_peer_available"):
        if time.monotonic() > deadline:
            raise RuntimeError("the decode replica does not find its prefill replica")
        time.sleep(0.05)


def transferred(server: Server) -> tuple[float, float]:
    """Return bytes and seconds of all transfers so far."""
    page = server.get("/metrics")
    return total(page, "trtllm_kv_transfer_bytes_total"), total(page, "trtllm_kv_transfer_seconds_total")


def checked(samples: list[Sample]) -> list[Sample]:
    """Return the samples. Raises RuntimeError if a request failed."""
    for sample in samples:
        if sample.error:
            raise RuntimeError(sample.error)
    return samples


async def mixed(targets: list[Target], mix: Mix, vocabulary: int, rng: random.Random) -> Rows:
    """Send streams and long prompts, both spread evenly over the targets."""
    prompts = [token_ids(mix.prompt, vocabulary, rng) for _ in range(mix.streams)]
    long_prompts = [token_ids(mix.long, vocabulary, rng) for _ in range(MOST_LONG)]
    shares = [prompts[index :: len(targets)] for index in range(len(targets))]
    began = time.perf_counter()
    running = asyncio.gather(
        *(
            exchange(
                target,
                LoadRun(len(share), len(share), mix.prompt, mix.output),
                [target.request(prompt, mix.output) for prompt in share],
            )
            for target, share in zip(targets, shares, strict=True)
        )
    )
    arrivals: list[asyncio.Task[list[Sample]]] = []
    while not running.done():
        await asyncio.wait({running}, timeout=mix.every)
        if not running.done() and len(arrivals) < MOST_LONG:
            target = targets[len(arrivals) % len(targets)]
            request = target.request(long_prompts[len(arrivals)], 4)
            arrivals.append(asyncio.create_task(exchange(target, LoadRun(1, 1, mix.long, 4), [request])))
    seconds = time.perf_counter() - began
    streams = checked([sample for samples in running.result() for sample in samples])
    long = checked([sample for samples in await asyncio.gather(*arrivals) for sample in samples])
    gaps = [gap for sample in streams for gap in sample.gaps]
    rows = {"mix: tokens/s of the streams": sum(sample.completion_tokens for sample in streams) / seconds}
    rows |= {f"mix: gap p{percent}, ms": percentile(gaps, percent) * 1e3 for percent in (50, 90, 99)}
    rows |= {"mix: longest gap, ms": max(gaps) * 1e3, "mix: long prompts": float(len(long))}
    for name, samples in (("a stream", streams), ("a long prompt", long)):
        for percent in (50, 99):
            rows[f"mix: first token of {name} p{percent}, ms"] = (
                percentile([sample.ttft for sample in samples], percent) * 1e3
            )
    return rows


def rendered(disaggregated: Rows, aggregated: Rows) -> str:
    rows = []
    for name, ours in disaggregated.items():
        theirs = aggregated.get(name)
        rows.append(
            [
                name,
                shown(ours),
                *(["", ""] if theirs is None else [shown(theirs), f"{theirs / ours:.2f}" if ours else ""]),
            ]
        )
    return table(["", "disaggregated", "aggregated", "aggregated / disaggregated"], rows)


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
