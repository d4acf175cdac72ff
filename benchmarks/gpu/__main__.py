"""Run the GPU benchmark: `python -m benchmarks.gpu`. See the package's docstring."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import benchmarks.gpu
from benchmarks.gpu.cells import GREEDY, ROUNDS, ROWS, WORKLOADS, Workload
from benchmarks.gpu.load import Clients
from benchmarks.gpu.model import SHAPES, SMALL, TAME, Shape, write_folder, write_weights
from benchmarks.gpu.report import GpuReport
from benchmarks.gpu.worker import Job, Measure, Measured, Started, work
from benchmarks.servers import Server, Spec, serving, tail
from engine.config import EmbeddedConfig
from server.bench.summary import Summary
from server.compose.config import engine_config
from server.settings import read_settings

DEFAULTS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "attention": "flashinfer",
    "max-batch-size": "256",
    "max-num-tokens": "4352",  # 4096 prompt tokens and one token per decoding sequence
    "engine-on-death": "exit",
}
CHECK_FLAGS = {"max-batch-size": "32", "max-num-tokens": "512", "max-seq-len": "1024"}
"""Few tokens per step, so that prompts are split and share steps with decoding sequences."""


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack, which stops servers and engines
    shown = {
        key: value for key, value in vars(args).items() if key not in ("output", "label", "shape", "flags", "commit")
    }
    flags = " ".join(f"--{name} {value}" for name, value in args.flags.items())
    report = GpuReport(
        args.label,
        {**shown, "server": flags},
        anchored=SHAPES[args.shape_name] is SHAPES["llama-8b"],
        fp8=args.flags.get("quantization") == args.flags.get("kv-cache-dtype") == "fp8",
    )
    if args.commit:
        report.machine["commit"] = args.commit
    if args.flags["device"] == "cuda":
        report.machine["chip"] = run_alone("benchmarks.gpu.chip")
    for key, value in report.facts().items():
        print(f"{key}: {value}")
    with tempfile.TemporaryDirectory(prefix="trellis-gpu-") as folder:
        args.logs = args.logs or Path(folder)
        args.logs.mkdir(parents=True, exist_ok=True)
        run = GpuRun(args, report, Path(folder))
        try:
            for wanted, part in (
                (args.http, run.over_http),
                (args.in_process, run.in_process),
                (args.check, run.check),
            ):
                if wanted:
                    run.attempt(part)
        finally:  # one that is ended early has measured something, too
            print("\n" + report.markdown())
            print(report.compact())
            print(f"written to {report.write(args.output)}", flush=True)
    return 1 if run.failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=benchmarks.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--cells", default=",".join(GREEDY), help="workloads by name, separated by commas")
    parser.add_argument(
        "--rows", default="", help=f"further kinds of requests for each of them: {', '.join(ROWS)}, or all"
    )
    parser.add_argument("--repeats", type=int, default=3, help="measurements per workload, after a warm-up")
    parser.add_argument("--row-repeats", type=int, help="measurements of each further kind; default: --repeats")
    parser.add_argument(
        "--starts", type=int, default=2, help="starts of the server, all timed; the last one is measured"
    )
    parser.add_argument("--http", action=argparse.BooleanOptionalAction, default=True, help="measure over HTTP")
    parser.add_argument(
        "--in-process", action=argparse.BooleanOptionalAction, default=True, help="measure the engine alone"
    )
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=False, help="compare the output with float32"
    )
    parser.add_argument(
        "--shape", dest="shape_name", choices=SHAPES, default="llama-8b", help="model shape; tiny is for tests on a CPU"
    )
    parser.add_argument(
        "--load-format", choices=["dummy", "auto"], default="dummy", help="auto writes random weights and loads them"
    )
    parser.add_argument(
        "--clients", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)), help="client processes"
    )
    parser.add_argument("--seed", default=str(int(time.time())), help="seed of the prompts")
    parser.add_argument("--commit", default="", help="commit to report if git is not available")
    parser.add_argument("--label", default="gpu", help="name of the result files")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent.parent / "results")
    parser.add_argument("--logs", type=Path, help="folder for the logs of server and engines; default: a temporary one")
    args, flags = parser.parse_known_args()
    rows = list(ROWS) if args.rows == "all" else [row for row in args.rows.split(",") if row]
    # Greedy requests of a cell and those they are compared with follow each other.
    args.cells = ",".join(
        name
        for cell in args.cells.split(",")
        for name in (cell, *(f"{cell}-{row}" for row in rows if not cell.startswith("prefill")))
    )
    wrong = [name for name in args.cells.split(",") if name not in WORKLOADS]
    if wrong:
        parser.error(f"no such cells: {', '.join(wrong)}; choose from {', '.join(GREEDY)} and rows {', '.join(ROWS)}")
    args.row_repeats = args.repeats if args.row_repeats is None else args.row_repeats
    args.shape = SHAPES[args.shape_name]
    args.flags = (
        DEFAULTS
        | {"max-seq-len": str(min(8192, args.shape.max_position))}
        | ({"load-format": "dummy"} if args.load_format == "dummy" else {})
        | settings_of(flags, parser)
    )
    return args


def settings_of(flags: list[str], parser: argparse.ArgumentParser) -> dict[str, str]:
    """Parse `--a b --c=d` to names and values that override the defaults."""
    settings = {}
    rest = iter(flags)
    for flag in rest:
        name, separator, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not (separator or (value := next(rest, ""))):
            parser.error(f"{flag} is neither an option of this program nor a setting with a value")
        settings[name] = value
    return settings


def run_alone(module: str) -> str:
    """Return the output of a module, run in a process that frees the GPU when it ends."""
    return subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, check=True).stdout.strip()


class GpuRun:
    """The parts of one run, which add to the report. `failed` is set if a part raises or finds wrong output."""

    def __init__(self, args: argparse.Namespace, report: GpuReport, folder: Path) -> None:
        self._args = args
        self._report = report
        self._folder = folder
        self._workloads: list[Workload] = [WORKLOADS[name] for name in args.cells.split(",")]
        self._began = time.perf_counter()
        self.failed = False

    def attempt(self, part: Callable[[], None]) -> None:
        """Run a part. If it fails, report this and go on with the next one: machine time is scarce."""
        try:
            part()
        except RuntimeError as error:
            self.failed = True
            self._say(f"{part.__name__} failed: {error}")

    def over_http(self) -> None:
        """Start the server `--starts` times, and measure the last one."""
        args, model = self._args, self._model(self._args.shape, self._args.load_format == "auto")
        argv = (sys.executable, "-m", "server", "--port", "{port}", *arguments(model, args.flags))
        spec = Spec("trellis", argv, "/health/ready")
        with Clients(args.clients, args.shape.vocabulary) as clients:
            for start in range(1, args.starts + 1):
                with serving(spec, log=args.logs / f"server-{start}.log") as server:
                    self._report.starts.append((server.ready_seconds, server.answer_seconds))
                    times = (
                        f"ready after {server.ready_seconds:.1f} s, first answer after {server.answer_seconds:.1f} s"
                    )
                    self._say(f"start {start}: {times}")
                    if start == args.starts:
                        self._load(server, clients)

    def in_process(self) -> None:
        """Measure the same workloads on the engine, in a process of its own."""
        args = self._args
        config = embedded_config(self._model(args.shape, args.load_format == "auto"), args.flags)
        greedy = [workload for workload in self._workloads if not workload.row]
        cells = [(workload, repeat) for workload in greedy for repeat in ("warm-up", *range(1, args.repeats + 1))]
        asked = [
            (workload.warm_up() if repeat == "warm-up" else workload.cell, self._seed(workload, repeat))
            for workload, repeat in cells
        ]
        queue = iter(cells)
        for message in work(Job(config, Measure(asked)), args.logs / "in-process.log"):
            if isinstance(message, Started):
                blocks = f"{message.info.num_blocks} KV blocks of {message.info.block_size}"
                self._say(f"in process: started after {message.seconds:.1f} s, {blocks}")
            elif isinstance(message, Measured):
                self._note("in process", *next(queue), message.summary, self._report.in_process)

    def check(self) -> None:
        """Compare the engine's output with float32; fail if it differs by more than its type explains."""
        from benchmarks.gpu.check import check, passes  # noqa: PLC0415 - torch and transformers take seconds to import

        args, shape = self._args, min(self._args.shape, SMALL, key=lambda shape: shape.hidden)
        if "fp8" in (args.flags.get("quantization"), args.flags.get("kv-cache-dtype")):
            shape = replace(shape, spread=TAME)
        folder = self._model(shape, weights=True)
        flags = {name: value for name, value in args.flags.items() if name != "load-format"} | CHECK_FLAGS
        found = list(
            check(folder, embedded_config(folder, flags), shape.vocabulary, args.seed, args.logs / "check.log")
        )
        passed = all(passes(*rows[-2:]) for rows in found)
        self._report.agreements += [row for rows in found for row in rows]
        self.failed |= not passed
        self._say(
            "check: " + ("passed" if passed else "FAILED") + "".join(f"\n  {row}" for row in self._report.agreements)
        )
        self._report.write(args.output)

    def _load(self, server: Server, clients: Clients) -> None:
        greedy = [workload for workload in self._workloads if not workload.row]
        for workload in greedy:
            self._run(server, clients, workload, "first")
        for workload in self._workloads:
            repeats = self._args.row_repeats if workload.row else self._args.repeats
            for repeat in (*(["warm-up"] if workload.row else []), *range(1, repeats + 1)):
                self._run(server, clients, workload, repeat)

    def _run(self, server: Server, clients: Clients, workload: Workload, repeat: int | str) -> None:
        """Measure a workload once. Repetition "first" is the server's first sight of it, and reported as such."""
        target = replace(server.target, endpoint="completions")
        cell = workload.warm_up() if repeat == "warm-up" else workload.cell
        cpu = server.cpu_seconds()
        rounds = 1 if repeat == "warm-up" or workload.prefill else ROUNDS
        summary = clients.run(target, workload, cell, self._seed(workload, repeat), rounds)
        if summary.errors:
            time.sleep(1)  # wait for the end of the server's log
            self._say(f"{summary.errors} errors; the server's log ends with\n{tail(server.log)}")
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with {server.process.poll()}")
        cores = (server.cpu_seconds() - cpu) / summary.seconds
        self._note(f"HTTP (server on {cores:.1f} cores)", workload, repeat, summary, self._report.http)

    def _note(
        self, where: str, workload: Workload, repeat: int | str, summary: Summary, runs: dict[str, list[Summary]]
    ) -> None:
        self.failed |= summary.errors > 0
        if repeat == "first":
            self._report.first[workload.name] = summary
        elif repeat != "warm-up":
            runs.setdefault(workload.name, []).append(summary)
            self._report.write(self._args.output)  # keep results if a later part fails
        what = f"{where} {workload.name} run {repeat}"
        self._say(
            f"{what}: {workload.rate(summary):,.0f} tok/s in {summary.seconds:.2f} s, "
            f"TTFT {summary.ttft_p50:.0f} / {summary.ttft_p99:.0f} ms, "
            f"gap {summary.gap_p50:.1f} / {summary.gap_p99:.1f}, at most {summary.gap_max:.0f} ms, "
            f"{summary.chunks:,} chunks for {summary.completion_tokens:,} tokens"
            + (f", {summary.cached_tokens} tokens found in the cache" if summary.cached_tokens else "")
            + (f", {summary.errors} errors: {summary.first_error}" if summary.errors else "")
        )

    def _model(self, shape: Shape, weights: bool) -> Path:
        """Return the model's folder, which is created on first use."""
        folder = self._folder / f"hidden-{shape.hidden}-{f'spread-{shape.spread}' if weights else 'dummy'}"
        if not folder.exists():
            write_folder(folder, shape)
            if weights:
                write_weights(folder, seed=0)
            self._say(f"made {folder.name}")
        return folder

    def _seed(self, workload: Workload, repeat: int | str) -> str:
        return f"{self._args.seed}/{workload.name}/{repeat}"

    def _say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {text}", flush=True)


def embedded_config(model: Path, flags: dict[str, str]) -> EmbeddedConfig:
    """Return the configuration of the engine of a server with these flags."""
    config = engine_config(read_settings(arguments(model, flags)), model)
    assert isinstance(config, EmbeddedConfig), "these benchmarks measure the embedded engine"
    return config


def arguments(model: Path, flags: dict[str, str]) -> list[str]:
    """Return the server's command line."""
    return ["--model", str(model), *(part for name, value in flags.items() for part in (f"--{name}", value))]


if __name__ == "__main__":
    sys.exit(main())
