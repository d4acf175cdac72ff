"""`trellis memory`: a service that owns the memory of weights, so that engines share them and need not load them again.

It runs beside the replicas of a host until a signal. docs/shared-weights.md explains it.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from engine.kit.logs import size_text
from engine.memory.client import status
from engine.memory.service import MemoryService
from engine.memory.wire import MemoryServiceError, Status
from server.process import logs
from server.settings import Settings, read_settings

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal, or with `--status` show what a running service owns. Raises SettingsError."""
    settings = read_settings([argument for argument in arguments if argument != "--status"])
    path = settings.memory_service or settings.cache_dir / "memory.sock"
    if "--status" in arguments:
        return _show(path)
    logs.configure(settings.log_level, settings.log_format)
    try:
        asyncio.run(_serve(settings, path))
    except OSError as error:
        log.error("cannot serve at %s: %s", path, error)
        return 1
    return 0


def lines(found: Status) -> Iterator[str]:
    """Yield what a service owns, for people."""
    limit = f" of at most {size_text(found.limit)}" if found.limit else ""
    yield f"{size_text(sum(owned.size for owned in found.owned))}{limit} of weights"
    for owned in found.owned:
        state = f"{owned.leases} lease(s)" if owned.ready else "being filled"
        yield f"{owned.key[:8]}  {size_text(owned.size):>9}  {owned.device or 'host':<40}  {state}"
    yield f"granted {found.granted}, filled {found.filled}, refused {found.refused}, freed {found.freed}"


async def _serve(settings: Settings, path: Path) -> None:
    """Serve until stopped. Raises OSError."""
    service = MemoryService(path, settings.memory_service_limit_mb << 20, settings.memory_service_grace_seconds)
    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    service.start()
    with closing(service):
        log.info("serving memory for weights; start replicas with MEMORY_SERVICE=%s", path)
        await stopped.wait()


def _show(path: Path) -> int:
    try:
        found = status(path)
    except MemoryServiceError as error:
        sys.stderr.write(f"error: no memory service: {error}\n")
        return 1
    sys.stdout.writelines(f"{line}\n" for line in lines(found))
    return 0
