"""Lines authenticated with the token of a job: from nobody else, each once, in order."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from shardwise.launch.hosts.host_messages import Outbox, packed, report
from shardwise.launch.hosts.pod_server import PodServer
from shardwise.launch.hosts.sealed_lines import (
    SealedConnection,
    SealedInbox,
    SealedLines,
    SealedSink,
    connect_to_launcher,
)
from shardwise.system.job_token import ForgedError, Seal
from tests.patience import PATIENCE, wait_until


def ends() -> tuple[SealedLines, SealedLines]:
    return SealedLines(Seal("t", "n"), "to host"), SealedLines(Seal("t", "n"), "to host")


def test_lines_come_through_in_order() -> None:
    sent, taken = ends()
    for line in (b"one\n", b"", "\N{SNOWMAN}".encode()):
        assert taken.open(sent.close(line)) == line.rstrip(b"\n")


@pytest.mark.parametrize("what", ["repeated", "left out", "turned back", "another token", "changed", "cut"])
def test_nothing_else_is_taken_for_one(what: str) -> None:
    sent, taken = ends()
    first, second = sent.close(b"first"), sent.close(b"second")
    bad = {
        "repeated": first,
        "left out": sent.close(b"third"),
        "turned back": SealedLines(Seal("t", "n"), "to launcher").close(b"second"),
        "another token": SealedLines(Seal("u", "n"), "to host").close(b"second"),
        "changed": second.replace(b"second", b"sekond"),
        "cut": second[:40],
    }
    assert taken.open(first) == b"first"
    with pytest.raises(ForgedError):
        taken.open(bad[what])


@pytest.fixture
def server() -> Iterator[tuple[PodServer, tuple[str, int], list[str]]]:
    said: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))
    made = PodServer(listener, "token", said.append)
    yield made, listener.getsockname(), said
    made.close()


def call(where: tuple[str, int], name: str = "pod", token: str = "token") -> SealedConnection:
    return connect_to_launcher(socket.create_connection(where), name, token, PATIENCE)


def names(server: PodServer, *wanted: str) -> None:
    wait_until(lambda: server.names() == list(wanted), server.names)


def test_messages_go_both_ways(server: tuple[PodServer, tuple[str, int], list[str]]) -> None:
    made, where, _ = server
    meeting = call(where)
    names(made, "pod")
    caller = made.take("pod")
    Outbox(caller.stdin).send({"do": "end_member", "number": 3})
    inbox = SealedInbox(meeting.connection, meeting.to_host)
    assert inbox.take(PATIENCE) == [{"do": "end_member", "number": 3}]
    Outbox(SealedSink(meeting.connection, meeting.to_launcher)).send({"kind": "beat"})
    assert report(caller.stdout.readline(100)) == {"kind": "beat"}
    meeting.connection.sendall(packed({"kind": "beat"}))  # by somebody in between
    assert caller.stdout.readline(100) == b""
    caller.wait()
    assert inbox.take(PATIENCE) == []
    assert inbox.closed
    meeting.connection.close()
    caller.stdout.close()


def test_an_order_that_is_forged_closes_the_connection(server: tuple[PodServer, tuple[str, int], list[str]]) -> None:
    made, where, _ = server
    meeting = call(where)
    names(made, "pod")
    caller = made.take("pod")
    caller._socket.sendall(packed({"do": "kill"}))
    inbox = SealedInbox(meeting.connection, meeting.to_host)
    assert inbox.take(PATIENCE) == []
    assert inbox.closed
    meeting.connection.close()
    caller.close()


def test_connections_without_the_token_are_refused(server: tuple[PodServer, tuple[str, int], list[str]]) -> None:
    made, where, said = server
    held = [call(where, token="guess"), call(where, name="../x")]
    random.seed(1)
    for length in (0, 1, 64, 500, 5000):
        stranger = socket.create_connection(where)
        with contextlib.suppress(OSError):
            stranger.sendall(os.urandom(length).replace(b"\n", b"x") + b"\n")
        held.append(SealedConnection(stranger, "", *ends()))
    held.append(call(where))
    names(made, "pod")
    assert len(said) == 1
    assert "does not have the token" in said[0]
    other, mine = socket.socketpair()
    other.sendall(b"HTTP/1.1 400\n")
    with pytest.raises(ForgedError, match="not the launcher"):
        connect_to_launcher(mine, "pod", "token", PATIENCE)
    for meeting in held:
        meeting.connection.close()
    other.close()
    mine.close()


def test_a_name_counts_once_and_late_pods_get_the_last_message(
    server: tuple[PodServer, tuple[str, int], list[str]],
) -> None:
    made, where, _ = server
    first = call(where)
    names(made, "pod")
    second = call(where)
    inbox = SealedInbox(first.connection, first.to_host)
    assert inbox.take(PATIENCE) == []
    assert inbox.closed
    made.close_with({"do": "over", "status": 7})
    late = call(where, name="late")
    for meeting in (second, late):
        assert SealedInbox(meeting.connection, meeting.to_host).take(PATIENCE) == [{"do": "over", "status": 7}]
    for meeting in (first, second, late):
        meeting.connection.close()


class InterruptedListener:
    """A listener whose first `accept` fails, as it does while a process has too many open files."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._has_failed = False

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if not self._has_failed:
            self._has_failed = True
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def shutdown(self, how: int) -> None:
        self._listener.shutdown(how)

    def close(self) -> None:
        self._listener.close()


def test_pods_are_accepted_after_an_accept_that_failed() -> None:
    """The server ended at the first error, and no pod could join any more."""
    listener = socket.create_server(("127.0.0.1", 0))
    interrupted: Any = InterruptedListener(listener)
    server = PodServer(interrupted, "token", print)
    try:
        with call(listener.getsockname(), "pod-a").connection:
            names(server, "pod-a")
    finally:
        server.close()
