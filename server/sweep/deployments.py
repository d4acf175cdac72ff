"""Start the deployments of a sweep as processes of this machine, wait until they are ready, and stop them."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from engine.process.sockets import free_port
from server.commands.remote import Remote
from server.settings import read_settings
from server.settings.environment import child_environment
from server.sweep.plan import Deployment

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 900.0
"""Time for a deployment to become ready; it may have to download its model."""
_STOP_SECONDS = 60.0
_REPLICA = re.compile(r"launcher: (\S+) listens at (http://\S+)")
_TAIL_CHARACTERS = 400


class DeploymentFailed(Exception):
    """The deployment did not start, or has ended."""


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as flags of `trellis serve`."""
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", text_of(value))]


def text_of(value: object) -> str:
    """Return the value of a setting as the text of a flag or variable."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(text_of, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


class RunningDeployment:
    """A deployment that answers at `url`."""

    def __init__(
        self,
        url: str,
        secret: str,
        key: str = "",
        process: "subprocess.Popen[bytes] | None" = None,
        log: Path | None = None,
    ) -> None:
        self.url = url
        self.key = key
        self._secret = secret
        self._process = process
        self._log = log

    @property
    def alive(self) -> bool:
        return self._process is None or self._process.poll() is None

    @property
    def replicas(self) -> list[str]:
        """URLs of the replicas with an engine."""
        found = dict(_REPLICA.findall(self._log.read_text(errors="replace"))) if self._log else {}
        return [url for name, url in found.items() if not name.startswith(("router", "encode"))] or [self.url]

    def reset(self) -> str:
        """Clear the prefix caches of all replicas; return why that failed, or ""."""
        for url in self.replicas:
            request = urllib.request.Request(
                f"{url}/reset_prefix_cache", b"", {"Authorization": f"Bearer {self._secret}"}, method="POST"
            )
            try:
                urllib.request.urlopen(request, timeout=60).close()
            except HTTPError as error:
                hint = "; set its INTERNAL_SECRET here, too" if error.code == HTTPStatus.UNAUTHORIZED else ""
                return f"HTTP {error.code}: {error.read(200).decode(errors='replace')}{hint}"
            except (OSError, HTTPException) as error:
                return str(error)
        return ""

    def settings(self) -> dict[str, Any]:
        """Return the /server_info of the first replica, which has no secrets; empty if it does not answer."""
        request = urllib.request.Request(f"{self.replicas[0]}/server_info", headers=Remote(self.url, self.key).headers)
        with suppress(OSError, ValueError, HTTPException), urllib.request.urlopen(request, timeout=30) as response:
            return dict(json.load(response))
        return {}

    def said_last(self) -> str:
        """Return the end of the log, for a message."""
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log else []
        return lines[-1][:_TAIL_CHARACTERS] if lines else "no output"

    def wait_ready(self) -> None:
        """Wait until the deployment is ready. Raises DeploymentFailed."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(OSError, HTTPException):
                urllib.request.urlopen(f"{self.url}/health/ready", timeout=10).close()
                return
            if not self.alive:
                raise DeploymentFailed(f"it ended before it was ready: {self.said_last()}")
            if time.monotonic() > deadline:
                raise DeploymentFailed(f"it was not ready within {START_SECONDS:g} s: {self.said_last()}")
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        finally:  # also after a second Ctrl-C
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)  # a launcher would leave its replicas behind
                self._process.wait()


@contextmanager
def running(
    deployment: Deployment, settings: Mapping[str, Any], log: Path, remote: Remote | None = None
) -> Iterator[RunningDeployment]:
    """Start a deployment with `settings`, and stop it in the end. Raises DeploymentFailed.

    `remote` is the server of a deployment that runs already.
    """
    given = read_settings([]).internal_secret
    secret = given.get_secret_value() if given else secrets.token_hex(16)
    if remote is not None:
        yield RunningDeployment(remote.url, secret, remote.key)
        return
    port = free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = child_environment(
        PORT=str(port), HOST="127.0.0.1", API_KEYS="", INTERNAL_SECRET=secret, PYTHONPATH=str(ROOT)
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *_command(deployment), *flags_of(settings)],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    started = RunningDeployment(f"http://127.0.0.1:{port}", secret, process=process, log=log)
    try:
        started.wait_ready()
        yield started
    finally:
        started.stop()


def _command(deployment: Deployment) -> list[str]:
    """Return the command that starts a deployment, without the interpreter."""
    if deployment.replicas:
        launcher, counts = "routed.py", {"replicas": deployment.replicas}
    elif deployment.decode:
        launcher = "disaggregated.py"
        counts = {role: getattr(deployment, role) for role in ("encode", "prefill", "decode")}
    else:
        return [str(ROOT / "trellis.py"), "serve"]
    path = ROOT / "deploy" / launcher
    if not path.is_file():
        raise DeploymentFailed(f"several replicas are started by deploy/{launcher}, which is in the repository only")
    return [str(path), *flags_of(counts)]
