"""Where other replicas are: fixed addresses, and DNS names that stand for every address they have (dns+http://name:port)."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterable, Sequence, Set
from urllib.parse import urlsplit

DNS = "dns+http"
RESOLVE_SECONDS = 3.0
"""Pause between looking names up."""

log = logging.getLogger(__name__)


class Addresses:
    """URLs, in the order in which they were given, and those behind names. `what` is the log's word for those who are there."""

    def __init__(self, urls: Sequence[str], what: str = "replicas") -> None:
        self.fixed = [url.rstrip("/") for url in urls if not url.startswith(f"{DNS}://")]
        self._names = [urlsplit(url) for url in urls if url.startswith(f"{DNS}://")]
        self._what = what

    @property
    def change(self) -> bool:
        """Whether they may be others later."""
        return bool(self._names)

    async def find(self, known: Set[str]) -> list[str]:
        """All URLs now. A name that cannot be resolved at present keeps what is `known`."""
        urls = dict.fromkeys(self.fixed)
        for name in self._names:
            assert name.hostname is not None and name.port is not None, "the settings are checked"
            try:
                found = await asyncio.get_running_loop().getaddrinfo(name.hostname, name.port, type=socket.SOCK_STREAM)
            except OSError as error:
                log.warning("the name %s of %s cannot be resolved: %s", name.hostname, self._what, error)
                urls |= dict.fromkeys(sorted(known))
                continue
            urls |= dict.fromkeys(sorted(_url(str(address[0]), name.port) for *_, address in found))
        return list(urls)


async def wait_for_first(probed: Iterable[asyncio.Event], seconds: float) -> None:
    """Wait until each of them is set, the first probe of a replica, but no longer than that."""
    probes = [asyncio.create_task(event.wait()) for event in probed]
    try:
        if probes:
            await asyncio.wait(probes, timeout=seconds)
    finally:
        for probe in probes:
            probe.cancel()


def _url(address: str, port: int) -> str:
    return (
        f"http://[{address}]:{port}"
        if ipaddress.ip_address(address.partition("%")[0]).version == 6
        else f"http://{address}:{port}"
    )
