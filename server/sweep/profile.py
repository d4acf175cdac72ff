"""The smallest deployment that meets targets for the first token and between tokens, and the files that start it.

Two loads are measured: prompts with hardly an answer (prefill), and whole requests. What is between two measured loads
is interpolated, and what more replicas would do is scaled; both are predictions, and are marked as such.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.trtllm.arguments import ArgumentLayer, merge
from server.sweep.conversion import write_values
from server.sweep.deployments import text_of
from server.sweep.plan import Deployment, Length, SweepPlan
from server.sweep.results import PointResult

PREFILL_ANSWER = 2
"""Tokens of an answer when prefill is measured: fewer have no time between them."""
_QUANTILE = "p90"
"""Quantile of requests that has to meet the targets."""


@dataclass(frozen=True)
class Targets:
    """Targets in milliseconds that nine of ten requests have to meet, at these lengths and this rate."""

    ttft: float
    itl: float
    isl: int
    osl: int
    rate: float = 0.0
    """0 asks for any load at all."""

    @property
    def lengths(self) -> tuple[Length, Length]:
        """The lengths of prefill alone, and of whole requests."""
        return Length(prompt=self.isl, answer=PREFILL_ANSWER), Length(prompt=self.isl, answer=self.osl)

    def met(self, result: PointResult) -> bool:
        return self._miss(result) <= 1

    def _miss(self, result: PointResult) -> float:
        """Return how far a point is from the targets: above 1 it misses one."""
        ttft = result.figures[f"ttft_{_QUANTILE}"].mean / self.ttft
        itl = result.figures[f"itl_{_QUANTILE}"].mean / self.itl
        return ttft if result.length == str(self.lengths[0]) else max(ttft, itl)

    def crossing(self, below: PointResult, above: PointResult) -> float:
        """Return the load at which the first target is missed, on the line between two points."""
        low, high = self._miss(below), self._miss(above)
        return load_of(below) + (load_of(above) - load_of(below)) * (1 - low) / (high - low)


def load_of(result: PointResult) -> float:
    return result.rate or float(result.concurrency)


@dataclass(frozen=True)
class Capacity:
    """The load that a deployment can take within the targets. `requests_per_second` is 0 if it never meets them."""

    deployment: str
    units: int
    per: str
    requests_per_second: float = 0.0
    """Measured."""
    load: str = ""
    """The load at which that was measured."""
    load_predicted: float | None = None
    """Load at which the first target is missed, interpolated between two measured ones."""
    prefill_tokens_per_second: float = 0.0
    """Measured: prompts alone, within the target for the first token."""


@dataclass(frozen=True)
class ScaledPrediction:
    """A deployment that was not measured. `how` says how its figure was computed."""

    deployment: Deployment
    requests_per_second: float
    how: str

    def asdict(self) -> dict[str, Any]:
        return {"predicted": True, **asdict(self), "deployment": self.deployment.model_dump(exclude_defaults=True)}


@dataclass(frozen=True)
class ProfileChoice:
    """The deployment that was found, and whether it was measured itself."""

    deployment: Deployment
    why: str
    predicted: bool


def plan_for(plan: SweepPlan, targets: Targets) -> SweepPlan:
    """Return the plan with the lengths of the targets."""
    slo = plan.slo.model_copy(update={"ttft": targets.ttft, "itl": targets.itl})
    return plan.model_copy(update={"lengths": targets.lengths, "slo": slo})


def capacities(results: Sequence[PointResult], targets: Targets) -> dict[str, Capacity]:
    """Return the capacity of each deployment that was measured."""
    found: dict[str, Capacity] = {}
    prefill, whole = map(str, targets.lengths)
    for name in dict.fromkeys(result.deployment for result in results if result.figures):
        own = [result for result in results if result.deployment == name and result.figures]
        best, crossing = _best([result for result in own if result.length == whole], targets)
        prompts, _ = _best([result for result in own if result.length == prefill], targets)
        found[name] = Capacity(
            name,
            own[0].units,
            own[0].per,
            best.figures["requests_per_second"].mean if best else 0.0,
            best.load if best else "",
            crossing,
            prompts.figures["requests_per_second"].mean * targets.isl if prompts else 0.0,
        )
    return found


def _best(results: Sequence[PointResult], targets: Targets) -> tuple[PointResult | None, float | None]:
    """Return the point of most requests within the targets, before the first load that misses them; and where on the
    way to that load they are missed.

    Loads by concurrency and by rate are two series.
    """
    best: PointResult | None = None
    crossing: float | None = None
    for by_rate in (False, True):
        last: PointResult | None = None
        for result in sorted((r for r in results if bool(r.rate) == by_rate), key=load_of):
            if not targets.met(result):
                if last is not None and last is best:
                    crossing = targets.crossing(last, result)
                break
            last = result
            if best is None or _rate(result) > _rate(best):
                best, crossing = result, None
    return best, crossing


def _rate(result: PointResult) -> float:
    return result.figures["requests_per_second"].mean


def predictions(plan: SweepPlan, found: Mapping[str, Capacity], targets: Targets) -> list[ScaledPrediction]:
    """Return deployments that were not measured and should take `targets.rate`, by scaling those that were."""
    scaled: list[ScaledPrediction] = []
    if not targets.rate:
        return scaled
    for deployment in plan.deployments:
        capacity = found.get(deployment.name)
        if capacity is None or not capacity.requests_per_second or deployment.url:
            continue
        copies = math.ceil(targets.rate / capacity.requests_per_second)
        how = f"{capacity.requests_per_second:.3g} requests/s of {deployment.name} at {capacity.load}, times {copies}"
        if copies > 1:
            scaled.append(ScaledPrediction(_times(deployment, copies), capacity.requests_per_second * copies, how))
        if deployment.decode or not capacity.prefill_tokens_per_second:
            continue
        # Replicas of one kind of work are at least as fast as those of both.
        each = deployment.replicas or 1
        prefill = max(1, math.ceil(targets.rate * targets.isl * each / capacity.prefill_tokens_per_second))
        decode = max(1, math.ceil(targets.rate * each / capacity.requests_per_second))
        taken = min(
            prefill * capacity.prefill_tokens_per_second / each / targets.isl,
            decode * capacity.requests_per_second / each,
        )
        gpus = deployment.gpus and deployment.gpus // each * (prefill + decode)
        split = {"name": f"{deployment.name} split", "replicas": 0, "prefill": prefill, "decode": decode, "gpus": gpus}
        how = (
            f"{capacity.prefill_tokens_per_second:.3g} prompt tokens/s and {how.partition(', ')[0]}, without transfers"
        )
        scaled.append(ScaledPrediction(deployment.model_copy(update=split), taken, how))
    return scaled


def _times(deployment: Deployment, copies: int) -> Deployment:
    """Return a deployment with this many times the replicas; one without a router gets one."""
    counts: dict[str, Any] = {role: getattr(deployment, role) * copies for role in ("prefill", "decode", "encode")}
    counts["replicas"] = 0 if deployment.decode else (deployment.replicas or 1) * copies
    gpus = deployment.gpus and deployment.gpus * copies
    return deployment.model_copy(update={**counts, "name": f"{deployment.name} x{copies}", "gpus": gpus})


def choose(
    plan: SweepPlan, found: Mapping[str, Capacity], predicted: Sequence[ScaledPrediction], targets: Targets
) -> ProfileChoice | None:
    """Return the smallest deployment that was measured to meet the targets, else the smallest of the predicted ones;
    None if none should. Of equals it is the one that takes more.
    """
    enough = [
        (found[deployment.name], deployment)
        for deployment in plan.deployments
        if deployment.name in found and found[deployment.name].requests_per_second >= max(targets.rate, 1e-9)
    ]
    if enough:
        capacity, deployment = min(enough, key=lambda pair: (pair[0].units, -pair[0].requests_per_second))
        why = f"measured: {capacity.requests_per_second:.3g} requests/s at {capacity.load} within the targets"
        return ProfileChoice(deployment, why, predicted=False)
    if not predicted:
        return None
    best = min(predicted, key=lambda one: (one.deployment.units, -one.requests_per_second))
    return ProfileChoice(
        best.deployment, f"predicted, not measured: {best.requests_per_second:.3g} requests/s, {best.how}", True
    )


def write_files(
    folder: Path,
    plan: SweepPlan,
    targets: Targets,
    found: Mapping[str, Capacity],
    predicted: Sequence[ScaledPrediction],
    choice: ProfileChoice | None,
) -> list[Path]:
    """Write `profile.json` and, for a choice that can be started, files for compose, Helm and the engine."""
    content = {
        "targets": {**asdict(targets), "requests": "90 % of them"},
        "choice": choice and {**asdict(choice), "deployment": choice.deployment.model_dump(exclude_defaults=True)},
        "measured": [asdict(capacity) for capacity in found.values()],
        "predictions": [prediction.asdict() for prediction in predicted],
    }
    files = {"profile.json": json.dumps(content, indent=1) + "\n"}
    if choice is not None and not choice.deployment.url:
        settings = plan.settings_of(choice.deployment)
        head = f"# Found by trellis profile for TTFT {targets.ttft:g} ms and ITL {targets.itl:g} ms,\n"
        head += f"# prompts of {targets.isl} and answers of {targets.osl} tokens; {choice.why}.\n"
        files["compose.yaml"] = head + yaml.safe_dump(compose(choice.deployment, settings), sort_keys=False)
        files["values.yaml"] = write_values(helm_values(choice.deployment, settings), head)
        if settings.get("engine") == "trtllm":
            files["engine.yaml"] = head + yaml.safe_dump(engine_arguments_of(settings), sort_keys=False)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def compose(deployment: Deployment, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to lay over the repository's compose.yaml (`docker compose -f compose.yaml -f FILE`)."""
    variables = {name.upper(): text_of(value) for name, value in settings.items()}
    service: dict[str, Any] = {"environment": variables}
    if deployment.decode:
        roles = ("encode", "prefill", "decode") if deployment.encode else ("prefill", "decode")
        prefix = "epd-" if deployment.encode else ""
        return {
            "services": {
                f"{prefix}{role}": {**service, "deploy": {"replicas": getattr(deployment, role)}} for role in roles
            }
        }
    if deployment.replicas:
        return {"services": {"routed": {**service, "deploy": {"replicas": deployment.replicas}}}}
    engine = settings.get("engine")
    name = "tensorrt-llm" if engine == "trtllm" else "gpu" if settings.get("device") == "cuda" else "server"
    return {"services": {name: service}}


def helm_values(deployment: Deployment, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of the chart in deploy/helm."""
    own = dict(settings)
    top: dict[str, Any] = {name: own.pop(name) for name in ("model", "engine") if name in own}
    role: dict[str, Any] = {"enabled": True}
    if top.get("engine") == "trtllm":
        role["engineConfig"] = yaml.safe_dump(engine_arguments_of(own), sort_keys=False)
        own = {name: value for name, value in own.items() if name not in ("extra_engine_args", "override_engine_args")}
    role["settings"] = {name.upper(): value for name, value in own.items()}
    if deployment.gpus:
        replicas = deployment.replicas or (deployment.prefill + deployment.decode + deployment.encode) or 1
        role["gpus"] = deployment.gpus // replicas
    if deployment.decode:
        counts = {name: count for name in ("encode", "prefill", "decode") if (count := getattr(deployment, name))}
        roles = {"aggregated": {"enabled": False}} | {
            name: {**role, "replicas": count} for name, count in counts.items()
        }
    else:
        roles = {"aggregated": {**role, "replicas": deployment.replicas or 1}}
        roles |= {"router": {"enabled": True}} if deployment.replicas else {}
    if len(roles) > 1:  # they prove to each other who they are
        top["secret"] = {"existing": "trellis-secrets"}
    return {**top, "roles": roles}


def engine_arguments_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of TensorRT-LLM that settings give: those of a file, and those that override them."""
    layers = []
    if file := settings.get("extra_engine_args"):
        layers.append(ArgumentLayer("file", yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}))
    if override := settings.get("override_engine_args"):
        layers.append(ArgumentLayer("override", json.loads(override) if isinstance(override, str) else override))
    return merge(layers).arguments
