"""MPI's worker processes, which compute nothing here: a process's daemon, and its children that run mpi4py's server.

As with OpenMPI, the daemon (`orted --set-sid`) leaves the session of the process that starts it, and the workers are
its children. It watches that process by a pipe, and ends its children with it, unless FAKE_TRTLLM_DAEMON is `deaf`:
then the workers live on, as if it had been killed. It does not reset signals, which OpenMPI's does.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

_DAEMON = """
import os, subprocess, sys
os.setsid()
command = [sys.executable, "-S", "-m", "mpi4py.futures.server"]
workers = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(int(sys.argv[1]))]
print(*[worker.pid for worker in workers], flush=True)
if os.environ.get("FAKE_TRTLLM_DAEMON") != "deaf":
    sys.stdin.read()
    for worker in workers:
        worker.terminate()
for worker in workers:
    worker.wait()
"""


class Workers:
    """A pool of them. `lost` is called, in a thread, once one has ended before `close`."""

    def __init__(self, count: int, lost: Callable[[], object]) -> None:
        command = [sys.executable, "-S", "-c", _DAEMON, str(count)]
        self._daemon = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[1]
        )
        assert self._daemon.stdout is not None
        self.pids = [int(pid) for pid in self._daemon.stdout.readline().split()]
        self._lost = lost
        self._open, self._close = os.pipe()
        handles = [os.pidfd_open(pid) for pid in self.pids]
        self._watcher = threading.Thread(target=self._watch, args=(handles,), name="fake-mpi", daemon=True)
        self._watcher.start()

    def _watch(self, handles: list[int]) -> None:
        ready, _, _ = select.select([self._open, *handles], [], [])
        for handle in handles:
            os.close(handle)
        if self._open not in ready:
            self._lost()

    def close(self) -> None:
        """End all."""
        os.write(self._close, b".")
        self._watcher.join()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self._daemon.communicate()
        os.close(self._open)
        os.close(self._close)
