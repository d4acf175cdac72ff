"""The only parser of http URLs, and the addresses that may be fetched from.

The parsed URL is what is checked, dialled and sent, so that no two readers can differ.

It accepts plain URLs and rejects everything else: user names, backslashes, white space and control characters, escapes
or non-ASCII letters in the host, numbers that spell an IPv4 address in another way, zone ids, empty labels and a
trailing dot.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from urllib.parse import quote, urljoin

from multimodal.errors import MediaError

Address = IPv4Address | IPv6Address

_PRIVATE = [
    ip_network(net)
    for net in ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1", "fc00::/7")
]
"""Loopback, private networks and carrier-grade NAT. They belong to the server's operator."""
_NEVER = [
    ip_network(net)
    for net in (
        # This host, link-local and metadata, multicast, reserved.
        *("0.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4"),
        # Special purposes and examples.
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
        # Metadata of Alibaba, Azure, AWS and Google.
        *("100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254"),
        # Protocols and Teredo, 6to4: these contain an IPv4 address.
        *("2001::/23", "2002::/16"),
        # Examples.
        *("2001:db8::/32", "3fff::/20"),
    )
]
_GLOBAL_IPV6 = IPv6Network("2000::/3")
"""All global addresses. Mapped, compatible and translated IPv4, link-local, site-local and multicast are not among
them."""
_NAT64 = IPv6Network("64:ff9b::/96")

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
    address: Address | None = None
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
        raise MediaError(f"A file's URL has more than {MAX_LENGTH} characters.")
    match = None if _ODD.search(text) else _URL.fullmatch(text)
    if match is None:
        raise MediaError("A file's URL is not a plain http or https URL.")
    scheme = match["scheme"].lower()
    port = int(match["port"] or _PORTS[scheme])
    if not 1 <= port <= 65535:
        raise MediaError("A file's URL has a port that does not exist.")
    address = _ipv6(match["ipv6"]) if match["ipv6"] else _ipv4(match["name"].lower())
    host = match["name"].lower() if address is None else address.compressed
    return Url(scheme, host, port, quote((match["path"] or "/") + (match["query"] or ""), safe=_SAFE), address)


def redirected(url: Url, location: str) -> Url:
    """Return the target of a redirect. Raises MediaError if it is not a plain URL, or goes from https to http."""
    if len(location) > MAX_LENGTH or _ODD.search(location):
        raise MediaError("The server of a file redirects to an invalid URL.")
    try:
        joined = urljoin(str(url), location)
    except ValueError as error:
        raise MediaError("The server of a file redirects to an invalid URL.") from error
    target = parse_url(joined)
    if url.scheme == "https" and target.scheme != "https":
        raise MediaError("The server of a file redirects from https to http.")
    return target


def _ipv6(text: str) -> IPv6Address:
    try:
        return IPv6Address(text)
    except AddressValueError as error:
        raise MediaError("A file's URL has a host that is not an IPv6 address.") from error


def _ipv4(name: str) -> IPv4Address | None:
    """Return the address that a host is, or None for a name.

    As in browsers, a host whose last label is a number is an address.
    """
    labels = name.split(".")
    if not _NUMBER.fullmatch(labels[-1]):
        if not all(map(_LABEL.fullmatch, labels)):
            raise MediaError("A file's URL has a host that is not a name.")
        return None
    try:
        return IPv4Address(name)
    except AddressValueError as error:
        raise MediaError("A file's URL has a host that is not a plain IPv4 address.") from error


def may_fetch(address: Address, *, allow_private: bool) -> bool:
    """Return whether this server may connect to `address`."""
    if isinstance(address, IPv6Address) and address in _NAT64:  # how a network without IPv4 reaches IPv4 hosts
        return may_fetch(IPv4Address(int(address) & 0xFFFFFFFF), allow_private=False)
    if _within(address, _NEVER):
        return False
    if _within(address, _PRIVATE):
        return allow_private
    return isinstance(address, IPv4Address) or address in _GLOBAL_IPV6


def host_allowed(host: str, allowed: Sequence[str]) -> bool:
    """Return whether `host`, in lower case, is one of the names or below one that begins with a dot.

    No names allow any.
    """
    return not allowed or any(
        host.endswith(name) if name.startswith(".") else host == name for name in map(str.lower, allowed)
    )


def _within(address: Address, networks: Sequence[IPv4Network | IPv6Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)
