"""The loop over deployments, repetitions and loads. A point that fails is reported, and the sweep continues."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic_settings import SettingsError

from engine.errors import EngineError
from server import __version__
from server.bench.client import Target
from server.bench.machine import describe_machine
from server.commands.remote import Remote, RemoteError
from server.process import gpus
from server.settings import read_settings
from server.sweep.deployments import DeploymentFailed, RunningDeployment, flags_of, running
from server.sweep.loads import AiperfClient, BuiltinClient, LoadClient, MeasurementFailed
from server.sweep.plan import Deployment, Point, Slo, SweepPlan
from server.sweep.results import Measured, PointResult, ResultFolder, requests_of, summarised

_MAX_STARTS = 2
"""Starts of one deployment before it is given up: it may fail to start, or end by itself."""
_OWN_SETTINGS = {"api_keys", "host", "internal_secret", "port"}
"""Settings of started servers that are chosen here."""
_PAGE_EVERY = 10
"""Measurements after which the page is written again."""


class Sweep:
    """A plan and its folder of results."""

    def __init__(
        self,
        plan: SweepPlan,
        folder: ResultFolder,
        remote_of: Callable[[Deployment], Remote],
        command: Sequence[str] = (),
    ) -> None:
        self.plan = plan
        self.folder = folder
        self._remote_of = remote_of
        self._measured = 0
        machine = describe_machine()
        self._commit = str(machine["commit"])
        settings = read_settings([])
        self._environment = settings.model_dump(mode="json", include=settings.model_fields_set - _OWN_SETTINGS)
        this_run = {
            **machine,
            "trellis": __version__,
            "gpus": ", ".join(gpu.name for gpu in gpus.parse_gpus(gpus.nvidia_smi())) or "none",
            "client": plan.client,
            "command": " ".join(command),
        }
        self._about: dict[str, Any] = {
            "runs": [*folder.about.get("runs", []), this_run],  # a sweep that was interrupted has several
            "plan": plan.model_dump(),
            "slo": plan.slo.model_dump(),
            "deployments": folder.about.get("deployments", {}),
        }

    def run(self) -> list[PointResult]:
        """Measure what is missing, and return the results of all points."""
        self.results()  # an interrupted run is named, too
        for deployment in self.plan.deployments:
            self._run_deployment(deployment)
        return self.results()

    def results(self) -> list[PointResult]:
        """Write the files, and return the results of the plan's points."""
        wanted = {
            (str(point), self._digest(point))
            for deployment in self.plan.deployments
            for point in self.plan.points(deployment)
        }
        records = (record for record in self.folder.records if (record.point, record.digest) in wanted)
        results = summarised(records, self.plan.slo)
        self.folder.write(results, self._about)
        return results

    def _digest(self, point: Point) -> str:
        return self.plan.digest(point, {} if point.deployment.url else self._environment)

    def _run_deployment(self, deployment: Deployment) -> None:
        points = list(self.plan.points(deployment))
        missing = [
            (point, repeat)
            for repeat in range(self.plan.repeats)  # outermost, so that what drifts meets all points alike
            for point in points
            if not self.folder.done(self._digest(point), repeat)
        ]
        if len(missing) < len(points) * self.plan.repeats:
            _say(f"{deployment.name}: {len(points) * self.plan.repeats - len(missing)} measurements are there")
        starts, reason = 0, ""
        session: tuple[RunningDeployment, LoadClient] | None = None
        with ExitStack() as stack:
            for point, repeat in missing:
                try:
                    if session is None or not session[0].alive:
                        if starts == _MAX_STARTS:
                            self._give_up(deployment, points, reason)
                            return
                        starts += 1
                        session = None
                        stack.close()
                        session = self._begin(stack, deployment, points)
                    record = self._measure(*session, point, repeat)
                except (DeploymentFailed, MeasurementFailed, RemoteError, EngineError, OSError) as error:
                    reason = str(error)
                    record = self._record(point, repeat, error=reason)
                if record.error and session is not None and not session[0].alive:
                    reason = f"{record.error}; the server has ended: {session[0].said_last()}"
                    record = self._record(point, repeat, error=reason)
                self._keep(record)

    def _give_up(self, deployment: Deployment, points: Sequence[Point], reason: str) -> None:
        """Record the reason for each point that has not been measured."""
        _say(f"{deployment.name}: given up after {_MAX_STARTS} starts")
        known = {(record.digest, record.repeat) for record in self.folder.records}
        for point in points:
            if not any((self._digest(point), repeat) in known for repeat in range(self.plan.repeats)):
                self.folder.add(self._record(point, 0, error=reason))

    def _begin(
        self, stack: ExitStack, deployment: Deployment, points: Sequence[Point]
    ) -> tuple[RunningDeployment, LoadClient]:
        """Start the deployment, and warm it up."""
        remote = self._remote_of(deployment) if deployment.url else None
        if remote is None:
            _say(f"{deployment.name}: starting")
        log = self.folder.path / "logs" / f"{deployment.name}.log"
        server = stack.enter_context(running(deployment, self.plan.settings_of(deployment), log, remote))
        about = Remote(server.url, server.key)
        target = Target(f"{about.url}/v1", about.model(self.plan.model), about.key)
        client: LoadClient = (
            BuiltinClient(self.plan, target)
            if self.plan.client == "builtin"
            else AiperfClient(
                self.plan, target, self.plan.tokenizer or self._tokenizer(deployment), read_settings([]).cache_dir
            )
        )
        client.warm_up(points)
        if settings := server.settings():
            self._about["deployments"][deployment.name] = settings
        return server, client

    def _tokenizer(self, deployment: Deployment) -> str:
        """Return the folder of the model of a server that is started here, or else the name of its model."""
        from engine.checkpoints.store import resolve_model  # noqa: PLC0415 - most sweeps do without

        settings = read_settings(flags_of(self.plan.settings_of(deployment)))
        return str(resolve_model(settings.model, settings.cache_dir, weights=False))

    def _measure(self, server: RunningDeployment, client: LoadClient, point: Point, repeat: int) -> Measured:
        not_reset = server.reset()
        name = f"{point}-{repeat + 1}".replace(" ", "-").replace(":", "-").replace("/", "-per-")
        measured = client.measure(point, f"{self.plan.seed}/{point}/{repeat}", self.folder.path / "aiperf" / name)
        if fault := measured.fault(point, check_prompts=client.checks_prompts):
            return self._record(point, repeat, error=fault)
        note = f"caches were not reset: {not_reset}" if not_reset else ""
        return self._record(point, repeat, seconds=measured.seconds, requests=requests_of(measured.samples), note=note)

    def _record(self, point: Point, repeat: int, **found: Any) -> Measured:
        return Measured(
            deployment=point.deployment.name,
            length=str(point.length),
            load=point.load,
            repeat=repeat,
            digest=self._digest(point),
            units=point.deployment.units,
            per="GPU" if point.deployment.gpus else "replica",
            concurrency=point.concurrency,
            rate=point.rate,
            commit=self._commit,
            **found,
        )

    def _keep(self, record: Measured) -> None:
        self.folder.add(record)
        self._measured += 1
        _say(f"{record.point} [{record.repeat + 1}/{self.plan.repeats}]: {said(record)}")
        if self._measured % _PAGE_EVERY == 0:
            self.results()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def said(record: Measured) -> str:
    """Return a one-line summary of a measurement."""
    if record.error:
        return f"FAILED: {record.error}"
    tokens = sum(answer for *_, answer in record.requests)
    ttfts = sorted(ttft for _, ttft, *_ in record.requests)
    itls = sorted(itl for _, _, itl, *_ in record.requests)
    middle = len(ttfts) // 2
    return f"{tokens / record.seconds:.1f} tok/s, TTFT {ttfts[middle] * 1e3:.0f} ms, ITL {itls[middle] * 1e3:.1f} ms"


def join(folders: Sequence[Path], output: Path, slo: Slo) -> list[PointResult]:
    """Write one page of several folders of results. Raises SettingsError if two use one name."""
    records: list[Measured] = []
    sources: dict[str, Path] = {}
    about: dict[str, Any] = {"runs": [], "deployments": {}}
    for folder in folders:
        found = ResultFolder(folder)
        for record in found.records:
            if sources.setdefault(record.deployment, folder) != folder:
                raise SettingsError(
                    f"{folder} and {sources[record.deployment]} both have a deployment {record.deployment}"
                )
        records += found.records
        about["runs"] += found.about.get("runs", [])
        about["deployments"] |= found.about.get("deployments", {})
    if not records:
        raise SettingsError("there are no measurements to join")
    results = summarised(records, slo)
    ResultFolder(output).write(results, {**about, "slo": slo.model_dump()})
    return results
