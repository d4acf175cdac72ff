"""One of several API processes, `python -m server.process.child FD LINK FOLDER VOICE TIME FLAGS…`, started by
`server/process/launch.py`.

FD is a bound socket to serve on, LINK a socket to the launcher (`serving.LauncherLink`). FOLDER holds the files of
metrics; PROMETHEUS_MULTIPROC_DIR names it too. The child whose VOICE is SPEAKS logs events of the whole server. TIME is
FIRST until all children have been ready, and LATER for one that is started after that.
"""

import asyncio
import gc
import logging
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import uvloop

SPEAKS, SILENT = "speaks", "silent"
FIRST, LATER = "first", "later"
NO_ROOM = 75
"""Exit code of a process that may find room for its metrics another time (EX_TEMPFAIL)."""
_METRICS_BYTES = {"counter": 1 << 17, "histogram": 1 << 19, "summary": 1 << 16} | {
    f"gauge_{mode}": 1 << 16 for mode in ("livemax", "livemin", "livesum")
}
"""Room for the values of each kind, by the name of its file in `prometheus_client.values`."""

log = logging.getLogger(__name__)


def reserve(folder: Path) -> None:
    """Allocate the files that this process keeps its metrics in. Raises OSError.

    They are written through mappings of memory: where a full disk has no room for a page, the kernel ends the process.
    Other processes read every file in `folder`, so files are moved there once all have their sizes.
    """
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        for kind, size in _METRICS_BYTES.items():
            with Path(unfinished, f"{kind}_{os.getpid()}.db").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        for path in Path(unfinished).iterdir():
            path.rename(folder / path.name)


def main() -> int:
    started = time.monotonic()
    gc.disable()  # imports make a million objects that stay
    from server.process import logs, serving  # noqa: PLC0415
    from server.settings import read_settings  # noqa: PLC0415

    gc.enable()
    descriptor, link, folder, voice, when, *arguments = sys.argv[1:]
    settings = read_settings(arguments)
    logs.configure(settings.log_level, settings.log_format)
    try:
        reserve(Path(folder))
    except OSError as error:
        log.error("no room for metrics in %s: %s", folder, error)
        return NO_ROOM
    with (
        socket.socket(fileno=int(descriptor)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        launcher = serving.LauncherLink(int(link), speaks=voice == SPEAKS, joins=when == LATER)
        return serving.serve(settings, listener, started, runner, Path(folder), launcher)


if __name__ == "__main__":
    sys.exit(main())
