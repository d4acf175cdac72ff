"""One API process on uvicorn: listens at once, logs when it is ready, drains on a signal, returns an exit code."""

import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi.routing import APIWebSocketRoute, iter_route_contexts

from engine.kit.logs import printable
from engine.process.child import SpareHost
from routers.state import ReplicaState
from server.app import create_app
from server.http.connection import HttpConnection
from server.http.websocket import WebSocketConnection
from server.process.banner import banner, on_terminal, summary
from server.settings import Settings

FAILURE = 1
"""Exit code of a server that failed and has logged the reason."""
_CLOSE_SECONDS = 3
"""Seconds to send the last answers once the engine has closed."""
_LAST_EVENTS_MS = 500
"""Milliseconds to send the last events before WebSockets are closed."""

_SWITCH_SECONDS = 0.0005
"""Interpreter switch interval with tracing: a tenth of Python's default, so that the exporting thread delays the event
loop less.
"""

_M_ARENA_MAX = -8
"""glibc's name for the number of arenas (malloc.h)."""
_ARENAS = 2

DRAIN, CUT_OFF, ALL_READY = b"d", b"c", b"r"
"""Commands of the launcher to its children."""
READY, FAILED = b"ready", b"failed "
"""Lines that a child sends to the launcher; the reason follows FAILED."""

_OTHERS = "api_processes"
"""Name of the condition of readiness that other API processes fulfil."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class LauncherLink:
    """The link of one of several API processes to their launcher, over the socket `descriptor`.

    The launcher writes DRAIN, and perhaps CUT_OFF after it; closing the socket means DRAIN. It writes ALL_READY once
    all processes have been ready. A process that `joins` is started after that, in place of one that ended.
    """

    descriptor: int
    speaks: bool
    """Whether this process logs events of the whole server."""
    joins: bool
    all_ready: bool = field(init=False)

    def __post_init__(self) -> None:
        self.all_ready = self.joins

    def waits(self) -> str:
        """Return why the server is not ready although this process is; empty if it is."""
        return "" if self.all_ready else "Another API process is not ready."

    def tell(self, line: bytes) -> None:
        with suppress(OSError):  # the launcher has ended, which `obey` notices
            os.write(self.descriptor, line.replace(b"\n", b" ") + b"\n")


def serve(
    settings: Settings,
    listener: socket.socket,
    started: float,
    runner: asyncio.Runner,
    metrics_folder: Path | None = None,
    launcher: LauncherLink | None = None,
    spare: SpareHost | None = None,
) -> int:
    """Serve on a bound socket until a signal or a failure; return the exit code. `started` is time.monotonic() at the
    start of the process, `runner` has the event loop, and `spare` is a process for the engine.
    """
    limit_arenas()
    if settings.otel_endpoint:
        sys.setswitchinterval(_SWITCH_SECONDS)
    server = DrainingServer(uvicorn_config(settings, metrics_folder, spare), settings, started, launcher)
    if launcher is not None:
        threading.Thread(target=server.obey, args=(launcher,), daemon=True).start()
    runner.run(server.serve(sockets=[listener]))
    return server.exit_code


def uvicorn_config(
    settings: Settings, metrics_folder: Path | None = None, spare: SpareHost | None = None
) -> uvicorn.Config:
    app = create_app(settings, metrics_folder, spare)
    routes = [context.original_route for context in iter_route_contexts(app.routes)]
    paths = frozenset(route.path.encode() for route in routes if isinstance(route, APIWebSocketRoute))
    received, sent = settings.body_timeout_seconds, settings.send_timeout_seconds
    return uvicorn.Config(
        app,
        http=partial(  # type: ignore[arg-type]
            HttpConnection, head_seconds=received, send_seconds=sent, websocket_paths=paths
        ),
        ws=partial(WebSocketConnection, message_seconds=received, send_seconds=sent),  # type: ignore[arg-type]
        ws_max_size=int(settings.max_body_mb * (1 << 20)),
        ws_ping_interval=settings.sse_ping_seconds or None,
        ws_ping_timeout=None,  # clients that read only while they wait for an answer are late
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=settings.root_path,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )


def listen(host: str, port: int, share: bool = False) -> socket.socket:
    """Return a socket bound to the address, not yet listening. With `share` several processes can bind to it. Raises
    OSError.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a socket, as this machine reaches it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class DrainingServer(uvicorn.Server):
    """A server that keeps the port open while it drains, so that probes and new requests get an answer.

    The first signal lets running requests finish within the grace period. At its end, or at a second signal, the engine
    is closed and they end with an error. A third signal kills the process; the engine process notices and ends too.
    SIGHUP, sent when a terminal closes, begins to drain and does not count as another signal, because shell and kernel
    both send it. If it is ignored (nohup), it stays ignored.

    Of several API processes each listens at once, and is ready when all are. A later one listens once it is ready, so
    that no connection waits for it.
    """

    def __init__(
        self, config: uvicorn.Config, settings: Settings, started: float, launcher: LauncherLink | None = None
    ) -> None:
        super().__init__(config)
        self.exit_code = 0
        self._settings = settings
        self._launcher = launcher
        self._speaks = launcher is None or launcher.speaks
        self._joins = launcher is not None and launcher.joins
        self._listeners: list[socket.socket] = []
        self._told_to_stop = False
        self._started = started
        self._signals = 0
        self._deadline = 0.0  # not draining
        self._serves = False
        self._announced = self._joins or not self._speaks

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._listeners = sockets or []
        if self._launcher is not None:
            self._replica.checks[_OTHERS] = self._launcher.waits
        if not self._joins:
            await self._listen()

    async def _listen(self) -> None:
        protocol = partial(
            self.config.http_protocol_class,
            config=self.config,  # type: ignore[call-arg]
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        self.servers += [
            await loop.create_server(protocol, sock=listener, backlog=self.config.backlog)
            for listener in self._listeners
        ]

    @property
    def _replica(self) -> ReplicaState:
        replica: ReplicaState = self.lifespan.state["replica"]
        return replica

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                signal.signal(signal.SIGHUP, lambda *_: self._drain())
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals == 1:
            self._drain()
        elif self._signals == 2:
            self._cut_off(sig)
        else:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    def obey(self, launcher: LauncherLink) -> None:
        """Follow the launcher's orders until it ends. They may repeat signals that this process has received itself,
        since a service manager signals every process of a service, in any order.
        """
        with suppress(ConnectionResetError):  # it has ended without reading all that was told
            while orders := os.read(launcher.descriptor, 64):
                launcher.all_ready |= ALL_READY in orders
                if DRAIN in orders:
                    self._drain()
                if CUT_OFF in orders:
                    self._cut_off(signal.SIGTERM)
        self._drain()

    def _drain(self) -> None:
        self._deadline = self._deadline or time.monotonic() + self._settings.shutdown_grace_seconds

    def _cut_off(self, sig: int) -> None:
        self._deadline = time.monotonic()
        self.exit_code = 128 + sig

    async def on_tick(self, counter: int) -> bool:
        replica = self._replica
        if replica.failure is not None:
            reason = printable(replica.failure, 2000)
            if self._launcher is not None:
                self._launcher.tell(FAILED + reason.encode())
            else:
                log.error("the server ends: %s", reason)
            self.exit_code = FAILURE
            return True
        if self._deadline:
            replica.draining = True
            self._tell_to_stop(replica)
            idle = replica.running == 0 and not replica.registered
            if idle or time.monotonic() >= self._deadline:
                return True
        elif not self._serves and all(name == _OTHERS for name, _ in replica.missing):
            await self._begin_to_serve()
        if replica.ready and not self._announced:
            self._announced = True
            self._announce(replica)
        return await super().on_tick(counter)

    async def _begin_to_serve(self) -> None:
        """Start to listen, unless this process listens already, and tell the launcher that it is ready."""
        self._serves = True
        _calm_collector()
        if self._joins:
            await self._listen()
        if self._launcher is not None:
            self._launcher.tell(READY)

    def _tell_to_stop(self, replica: ReplicaState) -> None:
        if self._speaks and not self._told_to_stop and (self._announced or self._launcher is None):
            running = replica.running
            grace = f": {running} running requests get {self._settings.shutdown_grace_seconds:g} s" if running else ""
            log.info("stopping%s", f"{grace}; another signal ends them" if grace else "")
        self._told_to_stop = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End running requests by closing the engine, its encoders and fetches, and then everything else."""
        replica = self._replica
        replica.draining = True
        if replica.running:
            log.warning("ending %d running requests", replica.running)
        if replica.service is not None:
            await replica.service.close()
        for _ in range(_LAST_EVENTS_MS // 10):
            if not replica.running:
                break
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)

    def _announce(self, replica: ReplicaState) -> None:
        url, seconds = url_of(self._listeners[0]), time.monotonic() - self._started
        if on_terminal(self._settings):
            sys.stderr.write(banner(self._settings, replica, url, seconds))
            return
        log.info(
            "ready: %s serves %s, %s; after %.1f s",
            f"{url}{replica.entrance}",
            replica.model_name,
            summary(self._settings, replica),
            seconds,
        )


def limit_arenas() -> None:
    """Have all threads allocate from two of glibc's arenas. The default is up to eight arenas for each core, and an
    arena keeps memory that large bodies took: a server's memory would grow with the number of cores.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has neither
        mallopt(_M_ARENA_MAX, _ARENAS)


def _calm_collector() -> None:
    """Make garbage collections, which pause the event loop, rare and short (figures in docs/log.md)."""
    gc.freeze()  # what is loaded now stays, and is not traversed again
    gc.set_threshold(50_000, 20, 100)
