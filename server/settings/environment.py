"""Environment variables and the file `.env`, which only this module and pydantic-settings read."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dotenv import dotenv_values
from dotenv.parser import parse_stream
from pydantic_settings import SettingsError

ENV_FILE = Path(".env")
_NAME = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)")
_FOREIGN = re.compile(
    "(HF|HUGGING_FACE|COMPOSE|DOCKER|NVIDIA|CUDA)_.*|(HTTPS?|NO|ALL)_PROXY|"
    "GRAFANA_PASSWORD|METRICS_API_KEY|VISION_MODEL|MEMORY_LIMIT|CPU_LIMIT|TLS_FOLDER",
    re.IGNORECASE,
)
"""Names in `.env` that are no settings: compose.yaml, docker and libraries read them."""


class EnvFile(NamedTuple):
    """The contents of `.env`."""

    settings: dict[str, str]
    """Values by lower-case name, misspelt names included."""
    foreign: dict[str, str]
    """Variables for others, such as HF_TOKEN."""


def read_env_file(path: Path = ENV_FILE) -> EnvFile:
    """Read `.env`; without one nothing is set. Raises SettingsError for a line that is not NAME=value, whose value is
    not quoted: it may be a secret.
    """
    if not path.is_file():
        return EnvFile({}, {})
    try:
        with path.open(encoding="utf-8") as file:
            lines = list(parse_stream(file))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    if wrong := next((line for line in lines if line.error or (line.key and line.value is None)), None):
        found = _NAME.match(wrong.original.string)
        start = wrong.original.line + wrong.original.string[: found.start(1) if found else 0].count("\n")
        hint = f"write {found[1]}=value" if found else "write NAME=value, or # before a comment"
        raise SettingsError(f"line {start} of {path} is not NAME=value: {hint}")
    given = {name: value for name, value in dotenv_values(path, encoding="utf-8").items() if value is not None}
    foreign = {name: value for name, value in given.items() if _FOREIGN.fullmatch(name)}
    return EnvFile({name.lower(): value for name, value in given.items() if name not in foreign}, foreign)


def variables() -> Iterator[str]:
    """Yield the names of all environment variables."""
    yield from os.environ


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment for a child process: this process's own and `variables`."""
    return {**os.environ, **variables}


def provide(name: str, value: str) -> None:
    """Set an environment variable for this process and its children, unless it is already set."""
    os.environ.setdefault(name, value)


def impose(name: str, value: str) -> None:
    """Set an environment variable for this process and its children, whatever it was before."""
    os.environ[name] = value


def visible_devices() -> str | None:
    """Return CUDA_VISIBLE_DEVICES; None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
