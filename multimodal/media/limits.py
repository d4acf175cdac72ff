"""What files requests may refer to."""

from dataclasses import dataclass
from pathlib import Path

from engine.config import MAX_IMAGE_PIXELS


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits for each file; how many one request may have is the caller's to check."""

    max_image_bytes: int = 20 << 20
    max_image_pixels: int = MAX_IMAGE_PIXELS
    timeout_seconds: float = 30.0
    """For a fetch in all: name, connection, redirects and body. Waiting for others (`concurrency`) does not count."""
    concurrency: int = 16
    """Most files that are fetched or read at once."""
    allowed_hosts: tuple[str, ...] = ()
    """Names (`images.example.org`) and suffixes (`.example.org`: all below it); empty allows any."""
    allow_private: bool = False
    """Whether loopback and private networks may be fetched from. Link-local, metadata and multicast addresses never are."""
    local_folder: Path | None = None
    """The folder of files that requests may name; None refuses all."""
