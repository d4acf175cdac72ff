"""What `python -m mpi4py.futures.server` is here: a process that waits for a signal."""

import signal

signal.pause()
