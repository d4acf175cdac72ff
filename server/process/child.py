"""One of several API processes, `python -m server.process.child FD FOLDER FLAGS…`, started by
`server/process/launch.py`.

FD is a bound socket to serve on. FOLDER holds the files of metrics; PROMETHEUS_MULTIPROC_DIR names it too. The launcher
writes orders (`serving.DRAIN`) to standard input, which closes when the launcher ends.
"""

import socket
import sys
import time
from pathlib import Path


def main() -> int:
    started = time.monotonic()
    from server.process import logs, serving  # noqa: PLC0415
    from server.settings import read_settings  # noqa: PLC0415

    descriptor, folder, *arguments = sys.argv[1:]
    settings = read_settings(arguments)
    logs.configure(settings.log_level, settings.log_format)
    with socket.socket(fileno=int(descriptor)) as listener:
        return serving.serve(settings, listener, started, Path(folder), parent=sys.stdin.fileno())


if __name__ == "__main__":
    sys.exit(main())
