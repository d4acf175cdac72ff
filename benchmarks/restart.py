"""Measure restarts over HTTP: `python -m benchmarks.restart`.

The engine's process is killed at random times while clients stream. A set-up without help, one with the memory service
(`trellis memory`) and one with a standby process as well are measured one after the other: seconds from a kill to the
next first token, and the memory that one and two replicas use, before and after the kills.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import psutil

from benchmarks.servers import Server, Spec, serving
from engine.memory.client import status
from server.bench.client import stream_events

_SETUPS = ("nothing", "memory service", "standby")
_ENGINE = "engine.process.engine_service"
_POLL = 0.01


def spec(options: argparse.Namespace, setup: str, socket: Path) -> Spec:
    """Return a server whose health page answers once a standby process is ready, too."""
    flags = ["--model", options.model, "--device", options.device, "--load-format", options.load_format]
    flags += ["--guide-workers", "1", *options.more]
    if setup != "nothing":
        flags += ["--memory-service", str(socket)]
    if setup == "standby":
        flags += ["--engine-standby", "true"]
    return Spec("trellis", (sys.executable, "-m", "server", "--port", "{port}", *flags), "/health/ready")
