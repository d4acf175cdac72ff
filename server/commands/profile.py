"""`trellis profile`: find the smallest deployment that meets targets, and write the files that start it."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server.commands import sweep
from server.commands.remote import named_server
from server.settings.flags import FlagParser
from server.sweep.plan import read_plan
from server.sweep.profile import Targets, capacities, choose, plan_for, predictions, write_files
from server.sweep.results import ResultFolder
from server.sweep.sweep import Sweep

_EPILOG = """FILE is that of `trellis sweep`: its deployments are the candidates (docs/profiling.md). Targets hold for
nine of ten requests. What was not measured is marked as predicted."""


def parser() -> FlagParser:
    found = FlagParser(
        prog="trellis profile", description="Find the smallest deployment that meets targets.", epilog=_EPILOG
    )
    found.add_argument("file", nargs="?", type=Path, metavar="FILE", help="candidates (default: one replica)")
    found.add_argument("--ttft", type=float, required=True, metavar="MS", help="time to the first token")
    found.add_argument("--itl", type=float, required=True, metavar="MS", help="mean time between tokens")
    found.add_argument("--isl", type=int, required=True, metavar="TOKENS", help="length of prompts")
    found.add_argument("--osl", type=int, required=True, metavar="TOKENS", help="length of answers")
    found.add_argument("--rate", type=float, default=0.0, metavar="NUMBER", help="requests per second to be served")
    found.add_argument("-c", "--concurrency", type=sweep.names, metavar="INT,...", help="loads (default: 1,2,4,8,16)")
    found.add_argument("--repeats", type=int, metavar="INT", help="measurements of each point (default: 3)")
    found.add_argument("--requests-per-stream", type=int, metavar="INT", help="requests of each stream (default: 4)")
    found.add_argument("--output", type=Path, default=Path("profile"), metavar="FOLDER", help="default: ./profile")
    return found


def main(arguments: Sequence[str]) -> int:
    """Run `trellis profile`. Raises SettingsError."""
    args = parser().parse(arguments)
    targets = Targets(args.ttft, args.itl, args.isl, args.osl, args.rate)
    names = ("concurrency", "repeats", "requests_per_stream")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.file is None:
        given = {"deployments": [{"name": "default"}], "concurrency": [1, 2, 4, 8, 16], **given}
    plan = plan_for(read_plan(args.file, {**given, "lengths": [f"{args.isl}:{max(2, args.osl)}"]}), targets)
    sweep.end_as_by_ctrl_c()
    folder = ResultFolder(args.output)
    results = Sweep(
        plan,
        folder,
        lambda deployment: named_server(Namespace(url=deployment.url, api_key=None)),
        ["trellis", "profile", *arguments],
    ).run()
    code = sweep.report(results, args.output)
    found = capacities(results, targets)
    predicted = predictions(plan, found, targets)
    choice = choose(plan, found, predicted, targets)
    for capacity in found.values():
        met = f"{capacity.requests_per_second:.3g} requests/s at {capacity.load}" if capacity.load else "misses them"
        more = f", until about {capacity.load_predicted:.3g} (interpolated)" if capacity.load_predicted else ""
        sys.stdout.write(f"{capacity.deployment}, {capacity.units} x {capacity.per}: {met}{more}\n")
    files = write_files(args.output, plan, targets, found, predicted, choice)
    if choice is None:
        sys.stderr.write("no deployment meets the targets\n")
        return 1
    sys.stdout.write(f"smallest: {choice.deployment.name}, {choice.why}\n{', '.join(map(str, files))}\n")
    return code
