"""Connections over which nothing comes any more: a host has vanished, or a cable is unplugged."""

from __future__ import annotations

import socket


def break_when_silent(connection: socket.socket, seconds: float) -> None:
    """Make a connection break once nothing has come over it for `seconds`, where the system can do that (Linux)."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    often = max(1, int(seconds / 4))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, often)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, often)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
