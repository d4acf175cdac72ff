"""Limits for the files that requests refer to."""

from dataclasses import dataclass
from pathlib import Path

from engine.config import MAX_IMAGE_PIXELS
from engine.media import MediaKind

MAX_REQUEST_PIXELS = 2 * MAX_IMAGE_PIXELS
"""Default limit for all images of a request together."""


MAX_VIDEOS = 4
"""Default limit for the number of videos in a request."""


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits for each file. The caller limits their number in a request."""

    max_image_bytes: int = 20 << 20
    max_image_pixels: int = MAX_IMAGE_PIXELS
    max_video_bytes: int = 64 << 20
    timeout_seconds: float = 30.0
    """Time for a whole fetch: name, connection, redirects and body. Waiting for other fetches does not count."""
    concurrency: int = 16
    """Maximum number of files that are fetched or read at once."""
    allowed_hosts: tuple[str, ...] = ()
    """Names (`images.example.org`) and suffixes (`.example.org`: all names below it). Empty allows any."""
    allow_private: bool = False
    """Whether to fetch from loopback and private networks. Link-local, metadata and multicast addresses are never
    allowed."""
    local_folder: Path | None = None
    """Folder of the files that requests may name; None allows none."""

    def max_bytes(self, kind: MediaKind) -> int:
        """Maximum size of a file."""
        return {"image": self.max_image_bytes, "video": self.max_video_bytes}[kind]
