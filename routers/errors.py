"""Errors of the routes, in addition to those of `multimodal/errors.py` and `engine/errors.py`."""

from typing import NamedTuple

from engine.errors import EngineNotReady
from multimodal.errors import RequestError


class Missing(NamedTuple):
    """A part that a replica lacks to be ready."""

    name: str
    """Name of the part, for programs: engine, prefill_peers, replicas, kv_events, canary, event_loop, sleep or
    draining."""
    reason: str
    """Description for people."""


class NotReady(EngineNotReady):
    """The replica takes no requests for now; `missing` lists all that it lacks."""

    def __init__(self, missing: list[Missing]) -> None:
        super().__init__(" ".join(dict.fromkeys(reason for _, reason in missing)))
        self.missing = missing


class WrongReplica(RequestError):
    """The route exists, but a replica of this role or model does not serve it."""


class NotFound(RequestError):
    """No response, batch, video or file has this name, or it belongs to another key."""


class ReplicasDiffer(RequestError):
    """Another replica uses another version of the protocol, or serves another model."""
