"""Run replicas on this machine behind a router that knows the contents of their KV caches: `make serve-routed`.

--replicas sets their number, 2 by default. All other arguments are settings of every process (--engine fake,
--model FOLDER, --route-policy round_robin). Clients connect to PORT (8000 by default). A process that dies is
restarted. Ctrl-C stops everything.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from disaggregated import Group, serve

from engine.process.sockets import free_port


async def run(count: int, arguments: Sequence[str]) -> int:
    group = Group(arguments, count)
    return await serve(group, _start(group, count))


async def _start(group: Group, count: int) -> str:
    """Start everything and return its URL."""
    sockets: list[tuple[str, str]] = []

    def each() -> dict[str, str]:
        sockets.append((f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"))
        return {"KV_EVENTS_ENDPOINT": sockets[-1][0], "KV_EVENTS_REPLAY_ENDPOINT": sockets[-1][1]}

    urls = await group.replicas("aggregated", count, each, PUBLISH_KV_EVENTS="true")
    events, replays = (",".join(column) for column in zip(*sockets, strict=True))
    port = int(os.environ.get("PORT", "8000"))
    await group.router(port, ROUTE_URLS=",".join(urls), ROUTE_EVENTS=events, ROUTE_REPLAYS=replays)
    return f"http://127.0.0.1:{port}"


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--replicas", type=int, choices=range(1, 65), default=2, metavar="N")
    options, arguments = parser.parse_known_args()
    return asyncio.run(run(options.replicas, arguments))


if __name__ == "__main__":
    sys.exit(main())
