"""The plan of a sweep: deployments, loads and service levels, from a YAML file or flags."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import SettingsError

LEAST_REPEATS = 3
"""Fewer give no useful confidence interval."""


class Strict(BaseModel):
    """A part of the file: unknown keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Deployment(Strict):
    """A server that runs already, one replica, replicas behind a router, or prefill and decode replicas."""

    name: str = Field(min_length=1, pattern=r"^[\w. :+-]+$")
    url: str = ""
    """URL of a server that runs already; nothing is started."""
    replicas: int = Field(0, ge=0, le=64)
    """Number of replicas behind a router; 0 starts one replica without a router."""
    prefill: int = Field(0, ge=0, le=64)
    decode: int = Field(0, ge=0, le=64)
    encode: int = Field(0, ge=0, le=64)
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of every replica: MAX_BATCH_SIZE is written max_batch_size."""
    gpus: int | None = Field(default=None, ge=1)
    """GPUs of all replicas together. Without it, throughput is divided by the number of replicas."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Deployment":
        if bool(self.prefill) != bool(self.decode) or (self.encode and not self.decode):
            raise ValueError("prefill and decode need each other, and encode both")
        if sum(map(bool, (self.url, self.replicas, self.decode))) > 1:
            raise ValueError("give one of url, replicas, or prefill and decode")
        if self.url and self.settings:
            raise ValueError("a server that runs already (url) takes no settings")
        return self

    @property
    def units(self) -> int:
        """The number by which throughput is divided: of GPUs if known, else of replicas."""
        return self.gpus or self.replicas or (self.prefill + self.decode + self.encode) or 1


class Length(Strict):
    """Tokens of a prompt and of its answer."""

    prompt: int = Field(ge=1)
    answer: int = Field(ge=2)

    def __str__(self) -> str:
        return f"{self.prompt}:{self.answer}"


def _length(value: object) -> object:
    if not isinstance(value, str):
        return value
    prompt, colon, answer = value.partition(":")
    if not colon or not prompt.isdigit() or not answer.isdigit():
        raise ValueError("write PROMPT:ANSWER, such as 1000:100")
    return {"prompt": int(prompt), "answer": int(answer)}


class Slo(Strict):
    """Service levels in milliseconds: a request is good if it meets all that are set."""

    ttft: float | None = Field(default=None, gt=0)
    """Time to the first token."""
    itl: float | None = Field(default=None, gt=0)
    """Mean time between tokens."""


@dataclass(frozen=True)
class Point:
    """One load on one deployment."""

    deployment: Deployment
    length: Length
    concurrency: int = 0
    rate: float = 0.0
    """Requests per second; 0 keeps `concurrency` requests running."""

    @property
    def load(self) -> str:
        return f"{self.rate:g}/s" if self.rate else f"c{self.concurrency}"

    def __str__(self) -> str:
        return f"{self.deployment.name} {self.length} {self.load}"


class SweepPlan(Strict):
    """A sweep: every deployment, at every length, under every load."""

    deployments: tuple[Deployment, ...] = Field(min_length=1)
    client: Literal["builtin", "aiperf"] = "builtin"
    concurrency: tuple[Annotated[int, Field(ge=1, le=100_000)], ...] = ()
    rate: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Requests per second that arrive at random times."""
    lengths: tuple[Annotated[Length, BeforeValidator(_length)], ...] = Field(
        (Length(prompt=40, answer=64),), min_length=1
    )
    repeats: int = Field(LEAST_REPEATS, ge=LEAST_REPEATS, le=100)
    requests_per_stream: int = Field(4, ge=1)
    """Requests of each stream; a load by rate has as many in all as this many seconds bring, at least ten."""
    timeout: float = Field(900.0, gt=0)
    """Seconds that a request may take."""
    model: str = ""
    """Name in requests; empty takes the first that the server lists."""
    tokenizer: str = ""
    """Folder or id of aiperf's tokenizer; empty takes the model's."""
    seed: int = Field(0, ge=0)
    slo: Slo = Slo()
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of all deployments that are started; each deployment may override them."""

    @field_validator("deployments", mode="after")
    @classmethod
    def _names_differ(cls, value: tuple[Deployment, ...]) -> tuple[Deployment, ...]:
        names = [deployment.name for deployment in value]
        if len(set(names)) < len(names):
            raise ValueError("two deployments have one name")
        return value

    @model_validator(mode="after")
    def _some_load(self) -> "SweepPlan":
        if not self.concurrency and not self.rate:
            raise ValueError("give concurrency or rate")
        return self

    def points(self, deployment: Deployment) -> Iterator[Point]:
        """Yield the loads on a deployment."""
        for length in self.lengths:
            yield from (Point(deployment, length, concurrency=streams) for streams in self.concurrency)
            yield from (Point(deployment, length, rate=rate) for rate in self.rate)

    def requests(self, point: Point) -> int:
        """Return the number of requests of one measurement."""
        if point.rate:
            return max(10, round(point.rate * self.requests_per_stream))
        return max(self.requests_per_stream, point.concurrency * self.requests_per_stream)

    def settings_of(self, deployment: Deployment) -> dict[str, Any]:
        return {**self.settings, **deployment.settings}

    def digest(self, point: Point, environment: Mapping[str, Any] | None = None) -> str:
        """Return a digest of everything that a measurement of `point` depends on, except its repetition: another plan
        measures again.

        `environment` has settings that started servers find there.
        """
        settings = {**(environment or {}), **self.settings_of(point.deployment)}
        parts = [
            point.deployment.model_dump(), settings, str(point.length), point.load,
            self.requests(point), self.client, self.model, self.tokenizer, self.seed, self.timeout,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def read_plan(file: Path | None, given: dict[str, Any]) -> SweepPlan:
    """Return the plan of a YAML file, with values `given` by flags. Raises SettingsError."""
    loaded: Any = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SettingsError(f"{file} cannot be read: {error}") from error
        if not isinstance(loaded, dict):
            raise SettingsError(f"{file} must be a mapping, such as concurrency: [1, 4]")
    try:
        return SweepPlan.model_validate({**loaded, **given})
    except ValidationError as error:
        entries = error.errors(include_url=False, include_input=False)
        where = f"{file}: " if file else ""
        faults = (f"{'.'.join(map(str, entry['loc'])) or 'sweep'}: {entry['msg']}" for entry in entries)
        raise SettingsError(where + "; ".join(faults)) from error
