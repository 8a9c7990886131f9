"""Where a process listens for others of its job: at the address by which they know it, and at no other."""

from __future__ import annotations

import errno
import ipaddress
import socket

_BACKLOG = 4096  # all ranks connect at the same moment
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


def listen_at(host: str, port: int) -> socket.socket:
    """A listening socket at `port` (0: any) of `host`, by which others reach this one.

    At all addresses if that does not tell which: `host` may lead here by way of another machine, have several
    addresses, or mean the loopback interface here alone, as a host's own name often does. `""` tells nothing.
    Raises `OSError`, for a port that is taken too.
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
                raise  # else the system knows the sixth version, and is forbidden to use it
    return socket.create_server(("", port), backlog=_BACKLOG)


def _address_of(host: str) -> str:
    """The one address that `host` means to everybody; `""` if there is none."""
    if host in _LOOPBACK_NAMES:
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass  # a name
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)} if host else set()
    except OSError:
        return ""
    if len(found) != 1 or ipaddress.ip_address(next(iter(found)).partition("%")[0]).is_loopback:
        return ""
    return found.pop()
