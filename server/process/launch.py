"""Start, restart and end several API processes that share one port and one engine.

Each child has its own socket, bound to the shared port (SO_REUSEPORT), so that the kernel distributes connections
evenly. Children report when they are ready; once all are, the launcher tells them, and the server is. One that is
restarted later listens when it is ready, so that the others serve meanwhile. Metrics are kept in a private folder, from
which any child reports the sums.
"""

import asyncio
import logging
import signal
import socket
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from engine.config import EngineConfig, TrtllmEncoderConfig
from engine.errors import EngineFailure
from engine.kit.logs import printable
from engine.kit.tasks import background, in_thread
from engine.process.child import ServiceProcess, SpareHost
from engine.process.command import kill, module_command
from engine.process.engine_service import ENGINE
from engine.process.folder import PrivateFolder
from engine.process.service import Interface
from engine.process.supervisor import End, Supervisor
from server.compose.config import engine_config
from server.compose.model import model_folder
from server.compose.sizing import standby, this_machine
from server.process.child import FIRST, LATER, SILENT, SPEAKS
from server.process.logs import one_line
from server.process.serving import ALL_READY, CUT_OFF, DRAIN, FAILED, FAILURE, listen
from server.settings import Settings
from server.settings.environment import child_environment

log = logging.getLogger(__name__)


def launch(
    settings: Settings,
    arguments: Sequence[str],
    listener: socket.socket,
    runner: asyncio.Runner,
    spare: SpareHost | None = None,
) -> int:
    """Serve with `settings.api_processes` processes until a signal or a failure; return the exit code.

    `listener` only reserves the port, and `spare` is a process for the engine.
    """
    with closing(PrivateFolder()) as folder:
        return runner.run(Launcher(settings, arguments, listener, folder, spare).run())


class Launcher:
    """The parent of the API processes and of the engine."""

    def __init__(
        self,
        settings: Settings,
        arguments: Sequence[str],
        listener: socket.socket,
        folder: PrivateFolder,
        spare: SpareHost | None = None,
    ) -> None:
        self._settings = settings
        self._spare = spare
        self._host, self._port = listener.getsockname()[:2]
        self._address = settings.engine_address or f"ipc://{folder.path}/engine.sock"
        self._lock = folder.lock
        self._metrics = folder.path / "metrics"
        self._metrics.mkdir()
        processes = settings.api_processes
        self._flags = [*arguments, "--engine-address", self._address, "--api-processes", str(processes)]
        self._children: set[_Child] = set()
        self._loading = set(range(processes))
        """Places of children that are not ready, until all have been."""
        self._supervisors = [Supervisor(partial(self._live, place)) for place in range(processes)]
        self._stops = 0
        self._failure: str | None = None

    async def run(self) -> int:
        """Run until all children have ended, because of a signal or a failure; return the exit code."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._drain)
        async with background(self._engine(), "engine"), asyncio.TaskGroup() as group:
            for supervisor in self._supervisors:
                group.create_task(supervisor.run())
        return 0 if self._failure is None else FAILURE

    async def _engine(self) -> None:
        """Run the engine process that the children share."""
        if self._settings.engine_address:
            return
        try:
            async with AsyncExitStack() as stack:
                folder = await in_thread(partial(model_folder, self._settings))
                config = engine_config(self._settings, folder)
                process = ServiceProcess(
                    _interface(config),
                    config,
                    self._address,
                    self._settings.engine_on_death,
                    *standby(self._settings, this_machine()),
                    spare=self._spare,
                )
                stack.push_async_callback(process.close)
                await process.start()
                raise EngineFailure(await process.wait_failed())
        except Exception as error:  # whatever it is, nothing can be served: report it
            self._fail(one_line(error))

    async def _live(self, place: int) -> End:
        """Run one child to its end. A child that cannot serve ends the launcher."""
        began = time.monotonic()
        child = await self._spawn(place)
        listening = asyncio.create_task(self._listen_to(child, place))
        code = await child.process.wait()
        await listening
        self._children.discard(child)
        child.orders.close()
        if self._loading:
            self._loading.add(place)
        mark_process_dead(child.process.pid, str(self._metrics))  # type: ignore[no-untyped-call]
        if code == FAILURE and not self._stops:
            self._fail("an API process cannot serve")
        return End(f"an API process ended with exit code {code}", time.monotonic() - began)

    async def _spawn(self, place: int) -> "_Child":
        """Start a child. The one in the first place speaks for all."""
        ours, theirs = socket.socketpair()
        with listen(self._host, self._port, share=True) as listener, theirs:
            metrics = str(self._metrics)
            descriptors = listener.fileno(), theirs.fileno()
            facts = (metrics, SILENT if place else SPEAKS, FIRST if self._loading else LATER)
            command = module_command("server.process.child", *map(str, descriptors), *facts, *self._flags)
            environment = child_environment(PROMETHEUS_MULTIPROC_DIR=metrics)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=DEVNULL,
                pass_fds=(*descriptors, self._lock),
                env=environment,
                start_new_session=True,
            )
        child = _Child(process, *await asyncio.open_connection(sock=ours))
        self._children.add(child)
        if self._stops:  # stopped while it was being spawned
            child.orders.write(DRAIN)
        return child

    async def _listen_to(self, child: "_Child", place: int) -> None:
        """Follow what a child reports, to its end."""
        with suppress(ConnectionResetError):  # it was killed before it had read its orders
            async for line in child.reports:
                if line.startswith(FAILED):
                    self._fail(line.removeprefix(FAILED).decode(errors="replace").strip())
                elif self._loading:
                    self._note_ready(place)
                else:
                    log.info("an API process is ready again")

    def _note_ready(self, place: int) -> None:
        self._loading.discard(place)
        if not self._loading:
            for child in self._children:
                child.orders.write(ALL_READY)

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            log.error("the server ends: %s", printable(reason, 2000))
        self._drain()

    def _drain(self) -> None:
        if not self._stops:
            self._stop()

    def _stop(self) -> None:
        """React to a signal.

        The first lets the children drain, the second has them abort running requests, the third kills them.
        """
        self._stops += 1
        if self._loading and self._failure is None and self._stops == 1:
            log.info("stopping")
        for supervisor in self._supervisors:
            supervisor.stop()
        for child in self._children:
            if self._stops <= 2:
                child.orders.write(DRAIN if self._stops == 1 else CUT_OFF)
            else:
                kill(child.process)


@dataclass(frozen=True, eq=False)
class _Child:
    """An API process, and the two directions of the socket to it."""

    process: Process
    reports: asyncio.StreamReader
    orders: asyncio.StreamWriter


def _interface(config: EngineConfig) -> Interface[Any, Any]:
    """Return the interface of what the API processes share: an engine, or TensorRT-LLM's encoder."""
    if not isinstance(config, TrtllmEncoderConfig):
        return ENGINE
    from engine.trtllm.hosted_encoder import ENCODER  # noqa: PLC0415 - other replicas do without

    return ENCODER
