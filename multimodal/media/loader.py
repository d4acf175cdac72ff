"""Loads the files that requests name, and checks them: fetched, decoded from a data URL, or read from the server's
folder.

Concurrent requests for one http URL share a fetch. Files are not kept; the cache holds embeddings (`cache.py`).
"""

import asyncio
import re
from collections.abc import Callable
from typing import Literal

from engine.errors import EngineNotReady
from engine.kit.work import FILES, Turns, off_loop
from engine.media import MediaInput, MediaKind
from multimodal.errors import MediaError, UnsupportedMedia
from multimodal.media.embeddings import Embeddings, read_embeddings
from multimodal.media.fetch import Fetcher
from multimodal.media.inflight import InFlight
from multimodal.media.limits import MediaLimits
from multimodal.media.sniff import check_image, check_video
from multimodal.media.sniff_audio import check_audio
from multimodal.media.sources import decode_data_url, local_path, read_file
from multimodal.media.url import MAX_LENGTH, Url, parse_url

Kind = MediaKind | Literal["embeddings"]
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE | re.ASCII)
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npy", ".npz")
"""Extensions of files that are, or may contain, pickles."""
SHARES = 4
"""Shares of the places for concurrent fetches, of which each request, and each host, may take one."""
_UNLIMITED = 1 << 30
_BYTES_PER_LENGTH = 64
"""Bytes of a file that count as one unit of length for `off_loop`: small files are checked in less than a turn."""


class MediaLoader:
    """Loads files within `limits`.

    Files of embeddings must have the language model's `hidden_size`; with 0 none are accepted.

    Use it on one event loop, which it never blocks for long, and close it once.
    """

    def __init__(self, limits: MediaLimits, hidden_size: int = 0, fetcher: Fetcher | None = None) -> None:
        self._limits = limits
        self._hidden_size = hidden_size
        self._fetcher = fetcher or Fetcher(limits)
        share = max(1, limits.concurrency // SHARES)
        self._of_request = Turns(_UNLIMITED, share)
        self._of_host = Turns(_UNLIMITED, share)
        self._turns = Turns(limits.concurrency, limits.concurrency)
        self._fetches: InFlight[tuple[Kind, str], MediaInput | Embeddings] = InFlight()
        self._closed = False

    async def load(self, url: str, param: str = "messages", kind: MediaKind = "image") -> MediaInput | Embeddings:
        """Load the file at an http, https, data or file URL, or at a path. Raises MediaError, which names `param`, and
        EngineNotReady if the loader is closed or closes meanwhile.
        """
        closing = EngineNotReady("the server is closing")
        if self._closed:
            raise closing
        try:
            scheme = match[1].lower() if (match := _SCHEME.match(url)) else ""
            if scheme == "data":  # not limited by `concurrency`: slow servers may have all turns
                return await self._checked(
                    lambda: decode_data_url(url, self._limits.max_bytes(kind), kind), kind, len(url)
                )
            if scheme in ("http", "https"):
                parsed = parse_url(url)
                found = self._kind(parsed.path, kind)
                return await self._fetches.do((found, str(parsed)), lambda: self._fetched(parsed, found))
            return await self._local(url, scheme, kind)
        except MediaError as error:
            raise error.about(kind, param) from error
        except asyncio.CancelledError:
            if self._closed:  # the fetch was cancelled, not its waiter
                raise closing from None
            raise

    async def aclose(self) -> None:
        """Cancel all running loads."""
        self._closed = True
        await self._fetches.aclose()
        await self._fetcher.aclose()

    async def _fetched(self, url: Url, kind: Kind) -> MediaInput | Embeddings:
        async with self._of_request.place(), self._of_host.place(request=url.host), self._turns.place():
            data = await self._fetcher.fetch(url, self._most(kind))
            return await self._checked(lambda: data, kind, len(data))

    async def _local(self, url: str, scheme: str, kind: MediaKind) -> MediaInput | Embeddings:
        folder = self._limits.local_folder
        if folder is None or scheme not in ("", "file"):
            raise MediaError("A file's URL must be an http, https or data URL.")
        if len(url) > MAX_LENGTH:
            raise MediaError(f"A file's path has more than {MAX_LENGTH} characters.")
        path = local_path(url)
        found = self._kind(path, kind)
        data = await FILES.run(lambda: read_file(path, folder, self._most(found)))
        return await self._checked(lambda: data, found, len(data))

    def _kind(self, path: str, kind: MediaKind) -> Kind:
        """Return `kind`, or another kind by the path's extension. Raises UnsupportedMedia."""
        ending = path.lower()
        if kind != "image":
            return kind
        if ending.endswith(_PICKLES):
            raise UnsupportedMedia("Files that may run code are not taken; embeddings must be a .safetensors file.")
        if not ending.endswith(".safetensors"):
            return kind
        if not self._hidden_size:
            raise UnsupportedMedia("This server takes no embeddings in place of images.")
        return "embeddings"

    def _most(self, kind: Kind) -> int:
        """Return the maximum size of a file."""
        return self._limits.max_bytes("image" if kind == "embeddings" else kind)

    async def _checked(self, read: Callable[[], bytes], kind: Kind, size: int) -> MediaInput | Embeddings:
        """Read and check a file of about `size` bytes, off the event loop if it is large."""

        def work() -> MediaInput | Embeddings:
            data = read()
            if kind == "embeddings":
                return read_embeddings(data, self._hidden_size)
            if kind == "video":
                check_video(data)
                return MediaInput(data, kind=kind)
            if kind == "audio":
                check_audio(data, self._limits.max_audio_seconds)
                return MediaInput(data, kind=kind)
            width, height = check_image(data, self._limits.max_image_pixels)
            return MediaInput(data, kind=kind, pixels=width * height)

        return await off_loop(size // _BYTES_PER_LENGTH, work)
