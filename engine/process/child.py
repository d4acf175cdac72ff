"""A service host as a child process: it is spawned, restarted, and never left behind."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec

from engine.errors import EngineFailure
from engine.kit import logs
from engine.kit.machine import free_memory
from engine.process import tree
from engine.process.command import kill, module_command
from engine.process.engine_service import ENGINE
from engine.process.folder import PrivateFolder
from engine.process.service import Interface
from engine.process.sockets import remove_socket_file
from engine.process.supervisor import FIRST_PAUSE, LONGEST_PAUSE, End, Supervisor
from engine.process.wire import PARENT_BEAT_SECONDS, HostOptions, Standby

STOP_SECONDS = 5.0
"""Time a host may take to stop once its input has ended."""
STANDBY_PAUSE = 2.0
"""Seconds that a host has served before a standby host prepares."""
PREPARE_SECONDS = 900.0
"""Time that a standby host may take to prepare: as a replica may to start."""
KILL_SECONDS = 10.0
"""Time that killed processes may take to end; those that hold GPU memory take longest."""
_LAST_LINES = 20
_LAST_CHARACTERS = 16384

log = logging.getLogger(__name__)
output = logging.getLogger("engine.process.output")


class ServiceProcess:
    """The host process of a service at `address`; an empty address creates an ipc:// address in a private folder.

    A host that dies is restarted (`supervisor.py`), unless `on_death` is "exit" or no host was ever ready: then this
    gives up, and `wait_failed` returns the reason. A host that is not responsive for the service's `hang_seconds` is
    killed. The host ends with this process, however that ends, and what the host has started ends with the host.

    With `standby`, another host prepares once one serves and `standby_room` bytes of memory are free, and takes over
    when that one dies.
    """

    def __init__(
        self,
        interface: Interface[Any, Any],
        config: msgspec.Struct,
        address: str = "",
        on_death: Literal["restart", "exit"] = "restart",
        standby: Standby = "",
        standby_room: int = 0,
        spare: "SpareHost | None" = None,
    ) -> None:
        """`spare`, if it is still there, becomes the first host."""
        self._folder: PrivateFolder | None = None
        if not address:
            self._folder = PrivateFolder()
            address = f"ipc://{self._folder.path}/service.sock"
        self.address = address
        self._interface = interface
        self._options = HostOptions(msgspec.Raw(msgspec.json.encode(config)), self.address, logs.current())
        self._hang_seconds = interface.hang_seconds(config)
        self._stop_seconds = STOP_SECONDS + interface.more_stop_seconds(config)
        self._on_death = on_death
        self._host: _Host | None = None
        self._standby: _Host | None = None
        self.standby: Standby = standby if on_death == "restart" else ""
        """Preparation of the next standby host."""
        self._standby_room = standby_room
        self._spare = spare
        self._serving = asyncio.Event()
        """Set while the host serves."""
        self._was_ready = False
        self._supervision: asyncio.Task[str] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self.restarts = 0
        """Hosts that were started after the first, or took over."""
        self.takeovers = 0
        """Standby hosts that took over."""

    @property
    def pid(self) -> int | None:
        """Process id of the host; None while none runs."""
        return None if self._host is None else self._host.process.pid

    @property
    def standby_pid(self) -> int | None:
        """Process id of the standby host; None while none is prepared."""
        return self._standby.process.pid if self._standby is not None and self._standby.prepared else None

    async def start(self) -> None:
        """Spawn the host. It is ready when a client has started; that fails if `wait_failed` returns first.

        Raises EngineFailure if the system cannot spawn a process.
        """
        try:
            self._host = await self._spawn()
        except OSError as error:
            raise EngineFailure(self._not_spawned(error)) from error
        self._supervision = asyncio.create_task(Supervisor(self._live).run(), name=f"{self._interface.noun}-process")
        if self.standby:
            self._keeping = asyncio.create_task(self._keep_standby(), name=f"{self._interface.noun}-standby")

    async def wait_failed(self) -> str:
        """Return the reason, with the host's last log lines, once this has given up."""
        assert self._supervision is not None, "not started"
        await asyncio.wait([self._supervision])
        if self._supervision.cancelled():
            await asyncio.Event().wait()  # closed, not failed
        return self._supervision.result()

    async def close(self) -> None:
        """Stop the host and remove the socket file. Safe at any time."""
        if tasks := [task for task in (self._supervision, self._keeping) if task is not None]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        hosts, self._host, self._standby = (self._host, self._standby), None, None
        await asyncio.gather(*(host.stop(self._stop_seconds) for host in hosts if host is not None))
        remove_socket_file(self.address)
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    async def _live(self) -> End:
        """Wait for the end of one host: the one that `start` has spawned, or else the standby or a new one."""
        if self._host is None:
            self.restarts += 1
            try:
                self._host = self._take_standby() or await self._spawn()
            except OSError as error:
                return End(self._not_spawned(error))
        host = self._host
        reason = await host.wait()
        self._host = None
        self._serving.clear()
        served = 0.0 if host.ready_at is None else time.monotonic() - host.ready_at
        final = not self._was_ready or self._on_death == "exit"
        return End(reason, served, final, prepared=self.standby_pid is not None)

    async def _spawn(self, standby: Standby = "") -> "_Host":
        """Start a host process and send it its options. Raises OSError."""
        host = self._spare.take(self._hang_seconds, self._note_ready) if self._spare is not None else None
        if host is None:
            host = await _Host.spawn(self._interface, self._hang_seconds, self._note_ready, again=self._was_ready)
        options = msgspec.structs.replace(self._options, standby=standby)
        if standby == "model" and self._host is not None and self._host.successor:
            host.successor = self._host.successor  # it has that configuration itself, and will name no other
            options = msgspec.structs.replace(options, config=msgspec.Raw(host.successor))
        host.tell(msgspec.json.encode(options))
        return host

    def _note_ready(self) -> None:
        self._was_ready = True
        self._serving.set()

    def _take_standby(self) -> "_Host | None":
        """Have the standby host serve and return it; None if none is prepared. A standby that is still preparing is not
        used, as it may hang."""
        if (host := self._standby) is None or not host.prepared:
            return None
        self._standby = None
        self.takeovers += 1
        log.info("the standby %s process takes over", self._interface.noun)
        host.tell(b"go")
        host.taken.set()
        return host

    async def _keep_standby(self) -> None:
        """Spawn a standby host when one serves, and another when it has taken over or died."""
        pause = FIRST_PAUSE
        while True:
            await self._serving.wait()
            await asyncio.sleep(STANDBY_PAUSE)  # the host that has just begun to serve needs the cores
            if not self._serving.is_set():
                continue
            if free_memory() < self._standby_room:
                await asyncio.sleep(LONGEST_PAUSE)
                continue
            try:
                host = self._standby = await self._spawn(self.standby)
            except OSError as error:
                reason = self._not_spawned(error)
            else:
                waits = [asyncio.ensure_future(wait) for wait in (host.taken.wait(), host.process.wait())]
                late = asyncio.get_running_loop().call_later(PREPARE_SECONDS, host.kill_unprepared)
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    late.cancel()
                    for wait in waits:
                        wait.cancel()
                if host.taken.is_set():
                    pause = FIRST_PAUSE
                    continue
                self._standby = None
                reason = await host.wait()
            log.error("no %s process stands by, the next one starts in %.2g s: %s", self._interface.noun, pause, reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _not_spawned(self, error: OSError) -> str:
        return f"the {self._interface.noun} process cannot be spawned: {error}"


EngineProcess = partial(ServiceProcess, ENGINE)
"""The host of an engine; takes the other arguments of `ServiceProcess`."""


class SpareHost:
    """A host process that is spawned before its configuration is known, and imports meanwhile."""

    def __init__(self, host: "_Host") -> None:
        self._host: _Host | None = host

    @classmethod
    async def spawn(cls, interface: Interface[Any, Any], hint: str) -> "SpareHost":
        """Spawn a process; `hint` is for `Interface.anticipate`. Raises OSError."""
        return cls(await _Host.spawn(interface, 0.0, lambda: None, again=False, hint=(hint,)))

    @property
    def process(self) -> Process | None:
        """The process, until `take` or `close`."""
        return None if self._host is None else self._host.process

    def take(self, hang_seconds: float, on_ready: Callable[[], None]) -> "_Host | None":
        """Return the process, once, as `_Host.spawn` would; None if it has been taken or has ended."""
        host, self._host = self._host, None
        if host is None or host.process.returncode is not None:
            return None
        host.watch(hang_seconds, on_ready)
        return host

    async def close(self) -> None:
        """End the process at once, if nobody has taken it: it only imports."""
        if self._host is not None:
            await self._host.stop(0.0)
            self._host = None


class _Host:
    """One child process. Its output goes to standard error, and the last lines are kept."""

    def __init__(
        self,
        noun: str,
        process: Process,
        log_pipe: int,
        mark: str,
        hang_seconds: float,
        on_ready: Callable[[], None],
        again: bool,
    ) -> None:
        self.process = process
        self.prepared = False
        """Whether it is a standby host that can take over at once."""
        self.taken = asyncio.Event()
        """Set once the host has been told to take over."""
        self.successor = b""
        """Configuration of a standby host, if it is not this one's."""
        self._on_ready = on_ready
        self._again = again
        self._noun = noun
        self._mark = mark
        self._hang_seconds = hang_seconds
        self._silent_seconds = 0.0
        self._watch: asyncio.Task[None] | None = None
        self.ready_at: float | None = None
        self._tail = ""
        self._unfinished = ""
        self._failure = ""
        """Reason why the process ends, as it reported."""
        self._log_pipe = log_pipe
        self._log_ended = asyncio.Event()
        self._control = asyncio.create_task(self._read_control())
        asyncio.get_running_loop().add_reader(log_pipe, self._read_log)

    @classmethod
    async def spawn(
        cls,
        interface: Interface[Any, Any],
        hang_seconds: float,
        on_ready: Callable[[], None],
        *,
        again: bool,
        hint: tuple[str, ...] = (),
    ) -> "_Host":
        """Start a host process. `again`: whether a process was ready before. Raises OSError."""
        mark = secrets.token_hex(8)
        # A pipe of our own: asyncio considers a process running as long as one of its children has its standard error
        # open.
        log_pipe, log_end = os.pipe()
        os.set_blocking(log_pipe, False)
        try:
            command = module_command("engine.process.host", interface.name, *hint)
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=log_end, start_new_session=True, env=tree.environment(mark)
            )
        except BaseException:
            os.close(log_pipe)
            raise
        finally:
            os.close(log_end)
        return cls(interface.noun, process, log_pipe, mark, hang_seconds, on_ready, again)

    def watch(self, hang_seconds: float, on_ready: Callable[[], None]) -> None:
        """Set what `spawn` sets."""
        self._hang_seconds, self._on_ready = hang_seconds, on_ready

    def tell(self, line: bytes) -> None:
        """Send a line to the waiting process."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")

    def kill_unprepared(self) -> None:
        """Kill a standby host that has not prepared in time."""
        if not self.prepared:
            log.error("the standby %s process is not prepared after %g s: killing it", self._noun, PREPARE_SECONDS)
            kill(self.process)

    async def wait(self) -> str:
        """Wait for the end of the process and of its descendants. Returns how it ended, with its last log lines."""
        code = await self.process.wait()
        await self._end()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        when = "died" if self.ready_at is not None else "failed to start"
        if self._failure:
            return f"the {self._noun} process {when}: {self._failure}"
        return "\n".join([f"the {self._noun} process {when} ({how})", *self._tail.splitlines()[-_LAST_LINES:]])

    async def stop(self, seconds: float) -> None:
        """End the process by closing its input, and by SIGKILL after `seconds`."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            async with asyncio.timeout(seconds):
                await self.process.wait()
        except TimeoutError:
            kill(self.process)
            await self.process.wait()
        await self._end()

    async def _end(self) -> None:
        """Kill the remaining descendants of the ended process, and read the remaining output."""
        if left := await asyncio.to_thread(tree.kill, self._mark, KILL_SECONDS):
            log.error("processes that the %s has started cannot be killed: %s", self._noun, left)
        await self._read_to_end()

    async def _read_to_end(self) -> None:
        """Read the remaining output of the ended process.

        A grandchild that keeps the pipe open is not waited for.
        """
        await asyncio.wait([self._control])
        if self._watch is not None:  # a process that ended at once may have been ready, too
            self._watch.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._log_ended.wait()
        self._close_log()

    async def _read_control(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self._silent_seconds = 0.0
            if line == b"ready\n":
                self.ready_at = time.monotonic()
                self._on_ready()
                if self._hang_seconds:
                    self._watch = asyncio.create_task(self._kill_if_silent(), name=f"{self._noun}-watch")
                if self._again:
                    log.info("the %s process is ready again", self._noun)
            elif line.startswith(b"successor "):
                self.successor = line.partition(b" ")[2].strip()
            elif line == b"standby\n":
                self.prepared = True
                log.info("a standby %s process is prepared", self._noun)
            elif line.startswith(b"failed "):
                self._failure = line.decode(errors="replace").partition(" ")[2].strip()

    async def _kill_if_silent(self) -> None:
        """Kill the process once its heartbeat has been missing for too long. Counts passes of this loop instead of
        time, because the clock may jump while a machine or container is suspended.
        """
        while self._silent_seconds < self._hang_seconds:
            await asyncio.sleep(PARENT_BEAT_SECONDS)
            self._silent_seconds += PARENT_BEAT_SECONDS
        log.error("the %s process has not responded for %g s: killing it", self._noun, self._hang_seconds)
        kill(self.process)

    def _read_log(self) -> None:
        try:
            chunk = os.read(self._log_pipe, 65536)
        except BlockingIOError:
            return
        text = chunk.decode(errors="replace")
        self._pass_on(text)
        self._tail = (self._tail + text)[-_LAST_CHARACTERS:]
        if not chunk:
            self._close_log()

    def _pass_on(self, text: str) -> None:
        """Write the output to standard error. In a JSON log, lines that libraries print become entries of ours."""
        if logs.current().form == "json":
            *lines, self._unfinished = (self._unfinished + text).split("\n")
            if not text:
                lines.append(self._unfinished)
            text = "".join(f"{line}\n" for line in lines if _is_json_object(line))
            for line in lines:
                if line and not _is_json_object(line):
                    output.warning("%s", line)
        with contextlib.suppress(OSError):  # a terminal that has closed
            sys.stderr.write(text)

    def _close_log(self) -> None:
        if not self._log_ended.is_set():
            self._log_ended.set()
            asyncio.get_running_loop().remove_reader(self._log_pipe)
            os.close(self._log_pipe)


def _is_json_object(line: str) -> bool:
    try:
        msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
