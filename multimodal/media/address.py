"""The hosts and addresses that files may be fetched from."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

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
