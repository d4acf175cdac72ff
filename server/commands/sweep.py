"""`trellis sweep`: measure configurations under many loads, and draw the trade-offs."""

import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError

from server.commands.remote import NAMED_BY_URL, Remote, named_server
from server.settings.flags import FlagParser
from server.sweep.plan import Deployment, Slo, SweepPlan, read_plan
from server.sweep.results import PointResult, ResultFolder
from server.sweep.sweep import Sweep, join

_EPILOG = """FILE is YAML with the keys of these flags (requests_per_stream), and `deployments`: docs/sweeps.md.
The same command goes on with an interrupted sweep. Ctrl-C stops everything that was started."""


def parser() -> FlagParser:
    found = FlagParser(prog="trellis sweep", description="Measure configurations under many loads.", epilog=_EPILOG)
    found.add_argument("file", nargs="?", type=Path, metavar="FILE", help="what is measured; flags override it")
    found.add_argument(
        "--output", type=Path, default=Path("sweep"), metavar="FOLDER", help="results (default: ./sweep)"
    )
    found.add_argument("--url", metavar="URL", help="measure this server, instead of starting any")
    found.meant |= NAMED_BY_URL
    found.add_argument("--api-key", metavar="KEY", help="API key of that server")
    found.add_argument("--name", default="server", help="name of that server in the results (default: server)")
    found.add_argument("--gpus", type=int, metavar="INT", help="GPUs of that server")
    found.add_argument("--client", choices=["builtin", "aiperf"], help="what loads the servers (default: builtin)")
    found.add_argument("-c", "--concurrency", type=names, metavar="INT,...", help="streams at a time")
    found.add_argument("--rate", type=names, metavar="NUMBER,...", help="requests per second, at random times")
    found.add_argument("--lengths", type=names, metavar="PROMPT:ANSWER,...", help="tokens (default: 40:64)")
    found.add_argument("--repeats", type=int, metavar="INT", help="measurements of each point, 3 at least (default: 3)")
    found.add_argument("--requests-per-stream", type=int, metavar="INT", help="requests of each stream (default: 4)")
    found.add_argument("--ttft", type=float, metavar="MS", help="service level: time to the first token")
    found.add_argument("--itl", type=float, metavar="MS", help="service level: mean time between tokens")
    found.add_argument("--model", metavar="NAME", help="model in requests (default: the first that is served)")
    found.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer of aiperf (default: the model's)")
    found.add_argument("--seed", type=int, metavar="INT", help="equal seeds send equal prompts (default: 0)")
    found.add_argument(
        "--join", nargs="+", type=Path, metavar="FOLDER", help="only join folders of results in --output"
    )
    return found


def main(arguments: Sequence[str]) -> int:
    """Run `trellis sweep`. Raises SettingsError."""
    args = parser().parse(arguments)
    if args.join:
        results = join(args.join, args.output, _slo(args))
    else:
        plan = plan_of(args)
        end_as_by_ctrl_c()
        folder = ResultFolder(args.output)
        try:
            results = Sweep(
                plan, folder, lambda deployment: _remote(args, deployment), ["trellis", "sweep", *_shown(arguments)]
            ).run()
        except KeyboardInterrupt:
            sys.stderr.write("interrupted; the same command goes on from here\n")
            raise
    return report(results, args.output)


def plan_of(args: Namespace) -> SweepPlan:
    """Return the plan of a file and of flags. Raises SettingsError."""
    keys = ("client", "concurrency", "rate", "lengths", "repeats", "requests_per_stream", "model", "tokenizer", "seed")
    given: dict[str, Any] = {name: value for name in keys if (value := getattr(args, name)) is not None}
    if args.ttft is not None or args.itl is not None:
        given["slo"] = _slo(args)
    if args.url:
        given["deployments"] = [{"name": args.name, "url": args.url, "gpus": args.gpus}]
    elif args.file is None:
        given["deployments"] = [{"name": "default"}]
    if args.file is None and not {"concurrency", "rate"} & given.keys():
        given["concurrency"] = [1, 4, 16]
    return read_plan(args.file, given)


def report(results: Sequence[PointResult], output: Path) -> int:
    """Say what came of it; return 1 if a point failed."""
    failed = [result for result in results if result.error]
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in failed:
        reasons.setdefault((result.deployment, result.error), []).append(f"{result.length} {result.load}")
    for (deployment, error), points in reasons.items():
        sys.stderr.write(f"failed: {deployment} at {', '.join(points)}: {error}\n")
    sys.stdout.write(f"{len(results) - len(failed)} of {len(results)} points measured: {output / 'index.html'}\n")
    return int(bool(failed))


def _slo(args: Namespace) -> Slo:
    try:
        return Slo(ttft=args.ttft, itl=args.itl)
    except ValidationError as error:
        raise SettingsError("--ttft and --itl must be above 0") from error


def _remote(args: Namespace, deployment: Deployment) -> Remote:
    return named_server(Namespace(url=deployment.url, api_key=args.api_key))


def _shown(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the API key."""
    shown = list(arguments)
    for index, argument in enumerate(shown):
        if argument.replace("_", "-").startswith("--api-key="):
            shown[index] = "--api-key=..."
        elif index and shown[index - 1].replace("_", "-") == "--api-key":
            shown[index] = "..."
    return shown


def names(text: str) -> list[str]:
    """Return the parts of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def end_as_by_ctrl_c() -> None:
    """Have SIGTERM do what Ctrl-C does, so that everything that was started is stopped.

    An event loop then cancels its main task; uvloop would swallow a KeyboardInterrupt that is raised in a callback.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what scripts run in the background
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
