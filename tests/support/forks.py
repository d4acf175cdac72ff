"""Servers without their second of imports: a process that has imported everything forks one for each request.

`python -m tests.support.forks` is that process, `fork` asks for a server. A server so made is `python -m server` in all
but its command line; that the command works is for the tests of `deploy/` and `tests/server/process/`. Engines of their
own process start as anywhere; `--engine embedded --engine-process false` saves importing torch, too, where a test is
about something else than that process.
"""

import atexit
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


class Forked:
    """A process with the methods of `subprocess.Popen`, although it is the child of another process."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self.pid = int(self._status.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises TimeoutExpired if it does not come in time."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(64) or -signal.SIGKILL)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired("server", timeout or 0) from None
            self._status.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(arguments: Sequence[str], environment: Mapping[str, str], stderr: int) -> Forked:
    """A server with these arguments that writes its log to the descriptor `stderr`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        message = json.dumps([*arguments, environment]).encode()
        socket.send_fds(_parent(), [message], [stderr, theirs.fileno()])
    return Forked(ours)


@functools.cache
def _parent() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        root = Path(__file__).resolve().parents[2]
        process = subprocess.Popen([sys.executable, "-m", __name__], cwd=root, stdin=theirs)
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _serve() -> int:
    """Fork until nobody asks any more; in each fork, the exit code of its server."""
    gc.disable()  # imports make a million objects that stay
    import server.app  # noqa: PLC0415 - only here
    import server.cli  # noqa: PLC0415

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child becomes a zombie
    requests = socket.socket(fileno=0)
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 2)
        if not message:
            return 0
        stderr, status = descriptors
        *arguments, environment = json.loads(message)
        if {"embedded", "--engine-process"} <= {*arguments}:
            import engine.embedded.models.native.runner  # noqa: PLC0415, F401 - torch takes a second
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (pid := os.fork()) == 0:
                os.close(status)
                os.open(os.devnull, os.O_RDONLY)  # as 0, which was the socket
                os.dup2(stderr, 2)
                os.close(stderr)
                os.environ.clear()
                os.environ.update(environment)
                sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
                tempfile.tempdir = None
                return server.cli.main(arguments)
            for descriptor in (1, 2, stderr):  # whoever reads these is to see the server's end
                os.close(descriptor)
            os.write(status, b"%d" % pid)
            os.write(status, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        os.close(stderr)
        os.close(status)


if __name__ == "__main__":
    sys.exit(_serve())
