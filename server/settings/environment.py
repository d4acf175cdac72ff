"""Access to environment variables, which only this module and pydantic-settings read."""

import os


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment for a child process: this process's own and `variables`."""
    return {**os.environ, **variables}


def provide(name: str, value: str) -> None:
    """Set an environment variable for this process and its children, unless it is already set."""
    os.environ.setdefault(name, value)


def visible_devices() -> str | None:
    """Return CUDA_VISIBLE_DEVICES; None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
