"""Addresses that media may be fetched from: the public internet without special ranges and cloud metadata services.

Sources: the IANA special-purpose address registries for IPv4 and IPv6 (as of 2025-10), RFC 6052 (IPv4 addresses inside IPv6
ones), and the documentation of the clouds for the addresses of their metadata services.
"""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_REFUSED_V4 = (
    "0.0.0.0/8",  # this network
    "10.0.0.0/8",  # private
    "100.64.0.0/10",  # shared by carriers; Alibaba's metadata service
    "127.0.0.0/8",  # loopback
    "168.63.129.16/32",  # Azure's platform service
    "169.254.0.0/16",  # link-local; metadata services of most clouds
    "172.16.0.0/12",  # private
    "192.0.0.0/24",  # protocol assignments; Oracle's metadata service
    "192.0.2.0/24",  # documentation
    "192.31.196.0/24",  # AS112
    "192.52.193.0/24",  # AMT
    "192.88.99.0/24",  # 6to4 relays
    "192.168.0.0/16",  # private
    "192.175.48.0/24",  # AS112
    "198.18.0.0/15",  # benchmarks
    "198.51.100.0/24",  # documentation
    "203.0.113.0/24",  # documentation
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved, broadcast
)
_REFUSED_V6 = (  # ranges inside 2000::/3; outside it, only 64:ff9b::/96 and IPv4-mapped addresses are allowed
    "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
    "2001:db8::/32",  # documentation
    "2002::/16",  # 6to4
    "2620:4f:8000::/48",  # AS112
    "3fff::/20",  # documentation
)
_V4 = tuple(map(ipaddress.IPv4Network, _REFUSED_V4))
_V6 = tuple(map(ipaddress.IPv6Network, _REFUSED_V6))
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # the well-known prefix of RFC 6052
_NAT64_PREFIXES = (32, 40, 48, 56, 64, 96)  # bits: the lengths of prefixes that RFC 6052 allows
_NULL_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")


def is_public(address: Address) -> bool:
    """Return True if an address is on the public internet, and so is every IPv4 address embedded in it."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _V4)
    if address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    if address in _NAT64:
        return is_public(_low_bits(int(address)))
    if address.scope_id is not None or address not in _GLOBAL_V6 or any(address in network for network in _V6):
        return False
    return all(is_public(inner) for inner in _translated(int(address)))


def _translated(bits: int) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses that a NAT64 gateway with a prefix of its own could read from an IPv6 address (RFC 6052, 2.2).

    Bits 64 to 71 and the bits after the IPv4 address are zero in such an address. Ordinary interface numbers such as ::1 read
    as 0.0.0.1, which no gateway translates.
    """
    if bits >> 56 & 0xFF:
        return []
    inner_addresses = []
    for prefix in _NAT64_PREFIXES:
        if prefix == 96:
            inner_addresses.append(_low_bits(bits))
            continue
        joined = (bits >> 64 << 56) | (bits & (1 << 56) - 1)  # without bits 64 to 71
        after = 120 - prefix - 32
        if not joined & (1 << after) - 1:
            inner_addresses.append(_low_bits(joined >> after))
    return [inner for inner in inner_addresses if inner not in _NULL_NETWORK]


def _low_bits(bits: int) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(bits & 0xFFFFFFFF)
