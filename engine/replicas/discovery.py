"""Addresses of other replicas: fixed addresses, DNS names that stand for all their addresses (dns+http://name:port),
and files with one URL on each line (file:///path), which a planner writes.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence, Set
from pathlib import Path
from urllib.parse import urlsplit

DNS = "dns+http"
FILE = "file"
RESOLVE_SECONDS = 3.0
"""Pause between DNS lookups, and between two looks into a file."""

log = logging.getLogger(__name__)


class Addresses:
    """URLs in the order given, those behind DNS names, and those in files. `kind` is that of replicas, for the log."""

    def __init__(self, urls: Sequence[str], kind: str = "routed") -> None:
        self.fixed = [url.rstrip("/") for url in urls if not url.startswith((f"{DNS}://", f"{FILE}://"))]
        self._files = [Path(urlsplit(url).path) for url in urls if url.startswith(f"{FILE}://")]
        self._names = [urlsplit(url) for url in urls if url.startswith(f"{DNS}://")]
        self._kind = kind
        self._unresolved: set[str] = set()

    @property
    def change(self) -> bool:
        """Whether `find` may return other URLs later."""
        return bool(self._names or self._files)

    async def find(self, known: Set[str]) -> list[str]:
        """Return all URLs. While a name cannot be resolved, or a file not be read, those `known` so far stay."""
        urls = dict.fromkeys(self.fixed)
        for file in self._files:
            try:
                lines = (await asyncio.to_thread(file.read_text, encoding="utf-8")).split()
            except (OSError, ValueError) as error:
                if str(file) not in self._unresolved:
                    self._unresolved.add(str(file))
                    log.warning("cannot read %s, the file of %s replicas: %s", file, self._kind, error)
                urls |= dict.fromkeys(sorted(known))
                continue
            self._unresolved.discard(str(file))
            urls |= dict.fromkeys(line.rstrip("/") for line in lines if line.startswith(("http://", "https://")))
        for name in self._names:
            assert name.hostname is not None and name.port is not None, "checked by the settings"
            try:
                found = await asyncio.get_running_loop().getaddrinfo(name.hostname, name.port, type=socket.SOCK_STREAM)
            except OSError as error:
                if name.hostname not in self._unresolved:
                    self._unresolved.add(name.hostname)
                    log.warning("cannot resolve %s, the name of %s replicas: %s", name.hostname, self._kind, error)
                urls |= dict.fromkeys(sorted(known))
                continue
            if name.hostname in self._unresolved:
                self._unresolved.discard(name.hostname)
                log.info("%s, the name of %s replicas, resolves now", name.hostname, self._kind)
            urls |= dict.fromkeys(sorted(_url(str(address[0]), name.port) for *_, address in found))
        return list(urls)


def _url(address: str, port: int) -> str:
    host = f"[{address}]" if ipaddress.ip_address(address.partition("%")[0]).version == 6 else address
    return f"http://{host}:{port}"
