"""Listens for other processes of a job: only at the address by which they know this host."""

from __future__ import annotations

import errno
import ipaddress
import socket

_BACKLOG = 4096  # all ranks connect at the same moment
_ANY_PORT = 9
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


def listen_at(host: str, port: int) -> socket.socket:
    """A listening socket at `port` (0: any) of `host`, by which others reach this host.

    It listens on all addresses if `host` does not determine one: it may lead here by way of another machine, have
    several addresses, or resolve to loopback on this host alone, as a host's own name often does; or it is `""`. Raises
    `OSError`, also for a port that is taken.
    """
    address = _address_of(host)
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise  # otherwise the system supports IPv6 but forbids its use
    return socket.create_server(("", port), backlog=_BACKLOG)


def own_address(listener: socket.socket) -> str:
    """The address at which this process itself reaches a listening socket."""
    address = str(listener.getsockname()[0])
    return "127.0.0.1" if address in ("::", "0.0.0.0") else address


def address_towards(host: str) -> str:
    """The address by which this host sends to `host`, and so by which `host` reaches it; `""` if that cannot be told.

    Nothing is sent.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _address_of(host: str) -> str:
    """The one address that `host` means on every machine; `""` if there is none."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass  # a name
    found = _addresses_of(host)
    if host in _LOOPBACK_NAMES:
        return "::1" if found == {"::1"} else "127.0.0.1"
    if len(found) != 1 or ipaddress.ip_address(next(iter(found)).partition("%")[0]).is_loopback:
        return ""
    return found.pop()


def _addresses_of(host: str) -> set[str]:
    """Those to which others connect who know this name; none if it is not known here."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)} if host else set()
    except OSError:
        return set()
