"""Errors of the routes, in addition to those of `multimodal/errors.py` and `engine/errors.py`."""

from typing import NamedTuple

from engine.errors import EngineNotReady
from multimodal.errors import RequestError, shown


class Missing(NamedTuple):
    """A part without which a replica is not ready."""

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


class ResponseNotFound(RequestError):
    """There is no such response, or it belongs to another key."""

    def __init__(self, response: str) -> None:
        super().__init__(f"Response with id '{shown(response)}' not found.", "response_id", "response_not_found")


class ReplicasDiffer(RequestError):
    """Another replica speaks another version, or serves another model."""


class MediaNotFound(RequestError):
    """There is no such file any more, or it belongs to another key."""

    def __init__(self, name: str) -> None:
        super().__init__(f"There is no file '{shown(name)}' (any more).", "file", "file_not_found")


class VideoNotFound(RequestError):
    """There is no such video, or it belongs to another key."""

    def __init__(self, video: str) -> None:
        super().__init__(f"There is no video '{shown(video)}'.", "video_id", "video_not_found")


class BatchNotFound(RequestError):
    """There is no such batch, or it belongs to another key."""

    def __init__(self, batch: str) -> None:
        super().__init__(f"There is no batch '{shown(batch)}'.", "message_batch_id", "batch_not_found")
