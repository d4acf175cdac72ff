"""`trellis bench`: load a server and show what its clients see."""

import json
import sys
import time
from collections.abc import Iterator, Sequence

from server.bench.client import LoadRun, Target, fit, run
from server.bench.summary import Summary
from server.commands.remote import RemoteError, add_server_flags, named_server
from server.settings.flags import FlagParser


def parser() -> FlagParser:
    found = FlagParser(
        prog="trellis bench", description="Load a server with greedy streams, and show what clients see."
    )
    add_server_flags(found)
    found.add_argument("--endpoint", choices=["chat", "completions"], default="chat", help="API (default: chat)")
    found.add_argument(
        "-c", "--concurrency", type=int, default=4, metavar="INT", help="streams at a time (default: %(default)s)"
    )
    found.add_argument(
        "-n", "--requests", type=int, metavar="INT", help="requests in all (default: four for each stream)"
    )
    found.add_argument(
        "--prompt-tokens", type=int, default=40, metavar="TOKENS", help="length of prompts (default: %(default)s)"
    )
    found.add_argument(
        "--max-tokens", type=int, default=64, metavar="TOKENS", help="length of answers (default: %(default)s)"
    )
    found.add_argument("--extra", type=json.loads, default={"ignore_eos": True}, metavar="JSON", help="more fields")
    found.add_argument("--seed", default="", metavar="TEXT", help="equal seeds send equal prompts (default: the time)")
    found.add_argument("--json", action="store_true", help="print the result as JSON; ttft and gap are in ms")
    return found


def main(arguments: Sequence[str]) -> int:
    """Run `trellis bench`. Raises RemoteError if the server does not answer."""
    args = parser().parse(arguments)
    remote = named_server(args)
    target = Target(f"{remote.url}/v1", remote.model(args.model), remote.key, args.endpoint, args.extra)
    requests = args.requests or 4 * args.concurrency
    try:
        prompts = fit(target)
    except RuntimeError as error:
        raise RemoteError(str(error)) from error
    if not args.json:
        sys.stdout.write(
            f"{target.model} at {remote.url}: {requests} requests of {args.prompt_tokens} + {args.max_tokens} tokens, "
            f"{args.concurrency} at a time\n"
        )
        sys.stdout.flush()
    load = LoadRun(args.concurrency, requests, args.prompt_tokens, args.max_tokens)
    summary = run(target, load, prompts, args.seed or str(time.time_ns()))
    sys.stdout.write(json.dumps(summary.asdict(), indent=2) if args.json else "\n".join(_lines(summary)))
    sys.stdout.write("\n")
    return int(bool(summary.errors))


def _lines(summary: Summary) -> Iterator[str]:
    yield f"  tokens             {summary.tokens_per_second:10.1f} /s"
    yield f"  requests           {(summary.requests - summary.errors) / summary.seconds:10.2f} /s"
    yield f"  time to first text {summary.ttft_p50:10.1f} ms median {summary.ttft_p99:10.1f} ms p99"
    yield f"  between chunks     {summary.gap_p50:10.1f} ms median {summary.gap_p99:10.1f} ms p99"
    yield f"  prompts            {summary.prompt_tokens:10.1f} tokens on average, {summary.cached_tokens} cached in all"
    yield f"  duration           {summary.seconds:10.1f} s"
    if summary.errors:
        yield f"  errors             {summary.errors:10} of {summary.requests}: {summary.first_error}"
