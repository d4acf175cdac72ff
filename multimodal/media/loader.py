"""Loads the files that requests name, and checks them: fetched, decoded from a data URL, or read from the server's
folder.

Concurrent requests for one http URL share a fetch. Files are not kept; the cache holds embeddings (`cache.py`).
"""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from engine.errors import EngineNotReady
from engine.media import MediaInput, MediaKind
from multimodal.errors import MediaError, UnsupportedMedia
from multimodal.media.embeddings import Embeddings, read_embeddings
from multimodal.media.fetch import Fetcher
from multimodal.media.inflight import InFlight
from multimodal.media.limits import MediaLimits
from multimodal.media.sniff import check_image
from multimodal.media.sources import decode_data_url, local_path, read_file
from multimodal.media.url import MAX_LENGTH, Url, parse_url

Kind = MediaKind | Literal["embeddings"]
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE | re.ASCII)
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npy", ".npz")
"""Extensions of files that are pickles, or may contain one."""
_CHECKS: dict[MediaKind, Callable[[bytes, MediaLimits], object]] = {
    "image": lambda data, limits: check_image(data, limits.max_image_pixels)
}
"""How a file of each kind is checked. Each raises MediaError."""


class MediaLoader:
    """Loads files within `limits`.

    Files of embeddings must have the language model's `hidden_size`; with 0 none are accepted.

    Use it on one event loop, which it never blocks for long, and close it once.
    """

    def __init__(self, limits: MediaLimits, hidden_size: int = 0, fetcher: Fetcher | None = None) -> None:
        self._limits = limits
        self._hidden_size = hidden_size
        self._fetcher = fetcher or Fetcher(limits)
        self._turns = asyncio.Semaphore(limits.concurrency)
        # One thread: its work needs the GIL, and with several the event loop would wait for each in turn.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="media")
        self._fetches: InFlight[tuple[Kind, str], MediaInput | Embeddings] = InFlight()
        self._closed = False

    async def load(self, url: str, param: str = "messages", kind: MediaKind = "image") -> MediaInput | Embeddings:
        """Load the file at an http, https, data or file URL, or at a path.

        Raises MediaError, which names `param`, and EngineNotReady if the loader is closed, before or meanwhile.
        """
        closing = EngineNotReady("the server is closing")
        if self._closed:
            raise closing
        try:
            scheme = match[1].lower() if (match := _SCHEME.match(url)) else ""
            if scheme == "data":  # not limited by `concurrency`: slow servers may have all turns
                return await self._checked(lambda: decode_data_url(url, self._limits.max_image_bytes), kind)
            if scheme in ("http", "https"):
                parsed = parse_url(url)
                found = self._kind(parsed.path, kind)
                return await self._fetches.do((found, str(parsed)), lambda: self._fetched(parsed, found))
            return await self._local(url, scheme, kind)
        except MediaError as error:
            raise error.at(param) from error
        except asyncio.CancelledError:
            if self._closed:  # the fetch was cancelled, not its waiter
                raise closing from None
            raise

    async def aclose(self) -> None:
        """Cancel all running loads."""
        self._closed = True
        await self._fetches.aclose()
        await self._fetcher.aclose()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _fetched(self, url: Url, kind: Kind) -> MediaInput | Embeddings:
        async with self._turns:
            data = await self._fetcher.fetch(url)
            return await self._checked(lambda: data, kind)

    async def _local(self, url: str, scheme: str, kind: MediaKind) -> MediaInput | Embeddings:
        folder = self._limits.local_folder
        if folder is None or scheme not in ("", "file"):
            raise MediaError("An image's URL must be an http, https or data URL.")
        if len(url) > MAX_LENGTH:
            raise MediaError(f"An image's path has more than {MAX_LENGTH} characters.")
        path = local_path(url)
        found = self._kind(path, kind)
        async with self._turns:
            data = await asyncio.to_thread(read_file, path, folder, self._limits.max_image_bytes)
            return await self._checked(lambda: data, found)

    def _kind(self, path: str, kind: MediaKind) -> Kind:
        """Return `kind`, or what the path's ending says instead. Raises UnsupportedMedia."""
        ending = path.lower()
        if ending.endswith(_PICKLES):
            raise UnsupportedMedia("Files that may run code are not taken; embeddings must be a .safetensors file.")
        if not ending.endswith(".safetensors"):
            return kind
        if not self._hidden_size:
            raise UnsupportedMedia("This server takes no embeddings in place of images.")
        return "embeddings"

    async def _checked(self, read: Callable[[], bytes], kind: Kind) -> MediaInput | Embeddings:
        """Read and check a file, both in the thread."""

        def work() -> MediaInput | Embeddings:
            data = read()
            if kind == "embeddings":
                return read_embeddings(data, self._hidden_size)
            _CHECKS[kind](data, self._limits)
            return MediaInput(data, kind=kind)

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
