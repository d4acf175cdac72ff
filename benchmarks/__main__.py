"""Compare our server with other servers on one model, and measure our HTTP path alone: `make bench`.

All servers run at the same time and are measured in turns, cell by cell, so that noise affects all of them alike.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from benchmarks import servers
from benchmarks.metrics import histogram, percentile_between
from benchmarks.report import Cell, Report
from benchmarks.servers import Server, Spec, pinned, serving
from engine.checkpoints.store import resolve_model
from server.bench.client import LoadRun, fit, run
from server.bench.prompts import PromptMaker
from server.settings import read_settings

CELLS = [Cell(streams, prompt, output) for prompt, output in ((40, 128), (500, 64)) for streams in (1, 4, 16, 32)]
QUICK = [Cell(1, 40, 32), Cell(4, 40, 32), Cell(16, 40, 32), Cell(4, 500, 16)]
DTYPES = ("float32", "bfloat16")
FAKE_RAMP_SECONDS = 2.0
"""Streams start spread over this time, so that they do not run in lockstep."""
LAG = "trellis_event_loop_lag_seconds"


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack, which stops the servers
    compared = specs(args)
    settings = {
        key: value for key, value in vars(args).items() if key not in ("output", "label", "llama_server", "vllm")
    }
    report = Report(args.label, settings | {"cells": " ".join(map(str, args.cells))})
    for key, value in {**report.machine, **report.settings}.items():
        print(f"{key}: {value}")
    if compared:
        compare(compared, args, report)
    if "fake" in args.servers:
        http_alone(args, report)
    print("\n" + report.markdown())
    print(f"written to {report.write(args.output)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    choices = [
        "ours",
        "ours-int8",
        *(f"transformers-{dtype}" for dtype in DTYPES),
        "llama.cpp",
        *(f"vllm-{dtype}" for dtype in DTYPES),
        "fake",
    ]
    parser.add_argument("--model", default="", help="folder, id or GGUF file for all servers; default: the server's")
    parser.add_argument("--servers", nargs="+", choices=choices, default=["ours", "transformers-float32", "fake"])
    parser.add_argument(
        "--transformers-options",
        default="",
        help="additional options of transformers serve, such as '--cb-max-batch-tokens 512'",
    )
    parser.add_argument(
        "--llama-server", default="llama-server", help="binary of llama.cpp's server, built for this machine"
    )
    parser.add_argument(
        "--gguf",
        default="",
        help="model for llama.cpp; `python -m benchmarks.widen` converts the built-in model to bfloat16",
    )
    parser.add_argument("--vllm", default="vllm", help="command of vLLM's CPU build, in its own environment")
    parser.add_argument(
        "--cells",
        nargs="+",
        type=cell,
        help="cells as STREAMS:PROMPT:OUTPUT; default: 1, 4, 16, 32 streams x 40:128, 500:64 tokens",
    )
    parser.add_argument("--repeats", type=int, help="repetitions of all cells (3; quick: 1)")
    parser.add_argument("--rounds", type=int, default=1, help="requests per stream in a cell, at least 3 in total")
    parser.add_argument(
        "--quick", action="store_true", help="take a few minutes: fewer and smaller cells, one repetition"
    )
    parser.add_argument("--fake-streams", type=int, default=256, help="streams on FakeEngine")
    parser.add_argument("--fake-rounds", type=int, default=6, help="requests per stream on FakeEngine")
    parser.add_argument("--fake-delay-ms", type=float, default=24.0, help="time between the tokens of FakeEngine")
    parser.add_argument(
        "--fake-engine-process",
        action="store_true",
        help="run FakeEngine in a separate process, as engines are by default",
    )
    parser.add_argument("--seed", default=str(int(time.time())), help="seed of the prompts")
    parser.add_argument("--label", default="", help="name of the result files (full or quick)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.cells = args.cells or (QUICK if args.quick else CELLS)
    args.repeats = args.repeats or (1 if args.quick else 3)
    args.label = args.label or ("quick" if args.quick else "full")
    return args


def cell(text: str) -> Cell:
    streams, prompt, output = map(int, text.split(":"))
    return Cell(streams, prompt, output)


def specs(args: argparse.Namespace) -> list[Spec]:
    """Return the servers to compare, ours first, all with the same model folder."""
    if set(args.servers) <= {"fake"}:
        return []
    settings = read_settings(["--model", args.model] if args.model else [])
    folder = str(resolve_model(settings.model, settings.cache_dir))
    args.model = Path(folder).name
    gguf = args.gguf
    args.gguf = Path(args.gguf).name  # results name files without their folders
    made = {
        "ours": lambda: servers.ours(folder),
        "ours-int8": lambda: servers.ours(folder, "int8"),
        **{
            f"transformers-{dtype}": partial(servers.transformers, folder, dtype, *args.transformers_options.split())
            for dtype in DTYPES
        },
        "llama.cpp": lambda: servers.llama_cpp(args.llama_server, gguf),
        **{f"vllm-{dtype}": partial(servers.vllm, args.vllm, folder, dtype) for dtype in DTYPES},
    }
    return [make() for name, make in made.items() if name in args.servers]


def compare(compared: list[Spec], args: argparse.Namespace, report: Report) -> None:
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(serving(spec)) for spec in compared]
        prompts = {server.spec.name: warm_up(server) for server in running}
        for repeat in range(args.repeats):
            for row in args.cells:
                for server in running:
                    if len(running) > 1:
                        wait_for_quiet()
                    measure(server, row, prompts[server.spec.name], args, repeat, report)
            report.write(args.output)  # keep results if a later repetition fails
        for server in running:
            report.servers[server.spec.name] = {
                "ready": server.ready_seconds,
                "answer": server.answer_seconds,
                "memory": server.memory_mb,
            }


def warm_up(server: Server) -> PromptMaker:
    """Learn how the server counts tokens from two requests, then send a few at once."""
    times = f"ready after {server.ready_seconds:.1f} s, first answer after {server.answer_seconds:.1f} s"
    print(f"{server.spec.name}: {times}")
    prompts = fit(server.target)
    run(server.target, LoadRun(4, 4, 60, 8), prompts, "warm-up")
    return prompts


def measure(
    server: Server, row: Cell, prompts: PromptMaker, args: argparse.Namespace, repeat: int, report: Report
) -> None:
    load = LoadRun(row.concurrency, max(3, row.concurrency * args.rounds), row.prompt_tokens, row.max_tokens)
    others = others_cpu_seconds(server)
    summary = run(server.target, load, prompts, f"{args.seed}/{row}/{repeat}")
    others = (others_cpu_seconds(server) - others) / summary.seconds
    report.others.append(others)
    server.note_memory()
    report.cells.setdefault(str(row), {}).setdefault(server.spec.name, []).append(summary)
    wrong_size = abs(summary.prompt_tokens - row.prompt_tokens) > row.prompt_tokens * 0.1
    print(
        f"[{repeat + 1}/{args.repeats}] {row} {server.spec.name}: {summary.tokens_per_second:.1f} tok/s, "
        f"TTFT {summary.ttft_p50:.0f} ms, gap {summary.gap_p50:.1f} ms, others used {others:.2f} cores"
        + (f", prompts of {summary.prompt_tokens:.0f} tokens" if wrong_size else "")
        + (f", {summary.errors} errors: {summary.first_error}" if summary.errors else ""),
        flush=True,
    )


def wait_for_quiet() -> None:
    """Wait until the machine is idle, 10 seconds at most: vLLM's threads spin for a second behind their last request,
    at the cost of the server whose turn comes next."""
    until = time.monotonic() + 10
    while (used := psutil.cpu_percent(0.5) * (psutil.cpu_count() or 1)) > 10:
        if time.monotonic() > until:
            print(f"others use {used:.0f} % of a core")
            break


def others_cpu_seconds(server: Server) -> float:
    """Return the CPU time so far of everything except this server and this process."""
    spent, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return float(spent.user + spent.nice + spent.system - own.user - own.system) - server.cpu_seconds()


def http_alone(args: argparse.Namespace, report: Report) -> None:
    """Measure our server on FakeEngine, pinned to a core of its own if the machine has two."""
    cores = sorted(os.sched_getaffinity(0))
    server_core, client_core = (cores[1], cores[0]) if len(cores) > 1 else (None, None)
    with (
        serving(servers.fake(args.fake_delay_ms, engine_process=args.fake_engine_process), server_core) as server,
        pinned(client_core),
    ):
        prompts = fit(server.target)
        run(server.target, LoadRun(32, 64, 40, 64), prompts, "warm-up")
        lag, cpu = histogram(server.get("/metrics"), LAG), server.cpu_seconds()
        load = LoadRun(args.fake_streams, args.fake_streams * args.fake_rounds, 40, 256, ramp=FAKE_RAMP_SECONDS)
        summary = run(server.target, load, prompts, args.seed)
        cpu = server.cpu_seconds() - cpu
        lag_p99 = percentile_between(lag, histogram(server.get("/metrics"), LAG), 99)
        server.note_memory()
    report.http = {
        "streams": args.fake_streams,
        "cores of the server": 1 if server_core is not None else len(cores),
        "chunks/s": summary.chunks_per_second,
        "chunks per CPU second of the server": summary.chunks / cpu,
        "tokens/s": summary.tokens_per_second,
        "TTFT p50, ms": summary.ttft_p50,
        "TTFT p99, ms": summary.ttft_p99,
        "gap p50, ms": summary.gap_p50,
        "gap p99, ms": summary.gap_p99,
        "event-loop lag p99, ms (bucket's upper bound)": lag_p99 * 1e3,
        "errors": f"{summary.errors} {summary.first_error}".strip(),
        "resident, MiB": server.memory_mb,
    }


if __name__ == "__main__":
    main()
