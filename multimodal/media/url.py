"""The only parser of http URLs. Its result is what is checked, dialled and sent, so that no two readers can differ.

It accepts plain URLs and rejects everything else: user names, backslashes, white space and control characters, escapes
or non-ASCII letters in the host, numbers that spell an IPv4 address in another way, zone ids, empty labels and a
trailing dot.
"""

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from urllib.parse import quote, urljoin

from multimodal.errors import MediaError

MAX_LENGTH = 8192
_PORTS = {"http": 80, "https": 443}
_URL = re.compile(
    r"(?P<scheme>https?)://(?:\[(?P<ipv6>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9._-]{1,253}))(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?(?:#.*)?",
    re.ASCII | re.IGNORECASE,
)
_ODD = re.compile(r"[\x00-\x20\x7f-\xa0\\\u2028\u2029\ud800-\udfff]")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_SAFE = "".join(map(chr, range(0x21, 0x7F)))


@dataclass(frozen=True)
class Url:
    """An http(s) URL in canonical spelling: scheme and host in lower case, no fragment, no default port."""

    scheme: str
    host: str
    """A name, or an address without brackets."""
    port: int
    target: str
    """Path and query as sent in the request: ASCII, never empty."""
    address: IPv4Address | IPv6Address | None = None
    """The host, if it is an address."""

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_url(text: str) -> Url:
    """Parse a plain http(s) URL. Raises MediaError for anything else."""
    if len(text) > MAX_LENGTH:
        raise MediaError(f"An image's URL has more than {MAX_LENGTH} characters.")
    match = None if _ODD.search(text) else _URL.fullmatch(text)
    if match is None:
        raise MediaError("An image's URL is not a plain http or https URL.")
    scheme = match["scheme"].lower()
    port = int(match["port"] or _PORTS[scheme])
    if not 1 <= port <= 65535:
        raise MediaError("An image's URL has a port that does not exist.")
    address = _ipv6(match["ipv6"]) if match["ipv6"] else _ipv4(match["name"].lower())
    host = match["name"].lower() if address is None else address.compressed
    return Url(scheme, host, port, quote((match["path"] or "/") + (match["query"] or ""), safe=_SAFE), address)


def redirected(url: Url, location: str) -> Url:
    """Return the target of a redirect. Raises MediaError if it is no plain URL, or leaves https."""
    if len(location) > MAX_LENGTH or _ODD.search(location):
        raise MediaError("The server of an image redirects to what is no URL.")
    try:
        joined = urljoin(str(url), location)
    except ValueError as error:
        raise MediaError("The server of an image redirects to what is no URL.") from error
    target = parse_url(joined)
    if url.scheme == "https" and target.scheme != "https":
        raise MediaError("The server of an image redirects from https to http.")
    return target


def _ipv6(text: str) -> IPv6Address:
    try:
        return IPv6Address(text)
    except AddressValueError as error:
        raise MediaError("An image's URL has a host that is no IPv6 address.") from error


def _ipv4(name: str) -> IPv4Address | None:
    """Return the address that a host is, or None for a name.

    As in browsers, a host whose last label is a number is an address.
    """
    labels = name.split(".")
    if not _NUMBER.fullmatch(labels[-1]):
        if not all(map(_LABEL.fullmatch, labels)):
            raise MediaError("An image's URL has a host that is no name.")
        return None
    try:
        return IPv4Address(name)
    except AddressValueError as error:
        raise MediaError("An image's URL has a host that is no plain IPv4 address.") from error
