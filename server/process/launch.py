"""Start, restart and end several API processes that share one port and one engine.

Each child has its own socket, bound to the shared port (SO_REUSEPORT), so that the kernel distributes connections
evenly. Metrics are kept in a private folder, from which any child reports the sums.
"""

import asyncio
import logging
import signal
import socket
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from functools import partial
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from engine.config import EngineConfig, TrtllmEncoderConfig
from engine.errors import EngineFailure
from engine.kit.logs import printable
from engine.kit.tasks import background, in_thread
from engine.process.child import ServiceProcess
from engine.process.command import module_command
from engine.process.engine_service import ENGINE
from engine.process.folder import PrivateFolder
from engine.process.service import Interface
from engine.process.supervisor import End, Supervisor
from server.compose.config import engine_config
from server.compose.model import model_folder
from server.process.child import SILENT, SPEAKS
from server.process.logs import one_line
from server.process.serving import CUT_OFF, DRAIN, FAILURE, listen, url_of
from server.settings import Settings
from server.settings.environment import child_environment

log = logging.getLogger(__name__)


def launch(settings: Settings, arguments: Sequence[str], listener: socket.socket, started: float) -> int:
    """Serve with `settings.api_processes` processes until a signal or a failure; return the exit code.

    `listener` only reserves the port.
    """
    with closing(PrivateFolder()) as folder:
        return asyncio.run(Launcher(settings, arguments, listener, folder).run())


class Launcher:
    """The parent of the API processes and of the engine."""

    def __init__(
        self, settings: Settings, arguments: Sequence[str], listener: socket.socket, folder: PrivateFolder
    ) -> None:
        self._settings = settings
        self._host, self._port = listener.getsockname()[:2]
        self._address = settings.engine_address or f"ipc://{folder.path}/engine.sock"
        self._lock = folder.lock
        self._metrics = folder.path / "metrics"
        self._metrics.mkdir()
        self._flags = [*arguments, "--engine-address", self._address]
        self._children: set[Process] = set()
        self._supervisors = [Supervisor(partial(self._live, place == 0)) for place in range(settings.api_processes)]
        self._stops = 0
        self._failure: str | None = None
        log.info("%d API processes share %s", settings.api_processes, url_of(listener))

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
        if self._failure is not None:
            log.error("the server ends: %s", printable(self._failure, 2000))
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
                    self._settings.engine_standby,
                )
                stack.push_async_callback(process.close)
                await process.start()
                raise EngineFailure(await process.wait_failed())
        except Exception as error:  # whatever it is, nothing can be served: report it
            self._fail(one_line(error))

    async def _live(self, speaks: bool) -> End:
        """Run one child to its end. A child that cannot serve ends the launcher. One of them `speaks` for all."""
        began = time.monotonic()
        child = await self._spawn(speaks)
        code = await child.wait()
        self._children.discard(child)
        mark_process_dead(child.pid, str(self._metrics))  # type: ignore[no-untyped-call]
        if code == FAILURE and not self._stops:
            self._fail("an API process cannot serve")
        return End(f"an API process ended with exit code {code}", time.monotonic() - began)

    async def _spawn(self, speaks: bool) -> Process:
        with listen(self._host, self._port, share=True) as listener:
            descriptor = listener.fileno()
            metrics = str(self._metrics)
            voice = SPEAKS if speaks else SILENT
            command = module_command("server.process.child", str(descriptor), metrics, voice, *self._flags)
            environment = child_environment(PROMETHEUS_MULTIPROC_DIR=metrics)
            child = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, pass_fds=(descriptor, self._lock), env=environment, start_new_session=True
            )
        self._children.add(child)
        if self._stops:  # stopped while it was being spawned
            _tell(child, DRAIN)
        return child

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._drain()

    def _drain(self) -> None:
        if not self._stops:
            self._stop()

    def _stop(self) -> None:
        """React to a signal.

        The first lets the children drain, the second has them abort running requests, the third kills them.
        """
        self._stops += 1
        for supervisor in self._supervisors:
            supervisor.stop()
        for child in self._children:
            if self._stops <= 2:
                _tell(child, DRAIN if self._stops == 1 else CUT_OFF)
            else:
                child.kill()


def _interface(config: EngineConfig) -> Interface[Any, Any]:
    """Return the interface of what the API processes share: an engine, or TensorRT-LLM's encoder."""
    if not isinstance(config, TrtllmEncoderConfig):
        return ENGINE
    from engine.trtllm.hosted_encoder import ENCODER  # noqa: PLC0415 - other replicas do without

    return ENCODER


def _tell(child: Process, order: bytes) -> None:
    assert child.stdin is not None
    child.stdin.write(order)
