"""In a pod: finds the launcher of an elastic job, runs the ranks that it asks for, and finds it again when it is lost.

The pod ends with 0 when the job has ended well, with `JOB_FAILED` when it has ended otherwise, or when there is no
launcher for too long, and with 143 when the pod itself was asked to end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from shardwise.errors import ConfigError
from shardwise.job_token import VARIABLE, ForgedError
from shardwise.launch.elastic.images import Images
from shardwise.launch.environment import Attempt
from shardwise.launch.folder import Folder
from shardwise.launch.hosts.members import MemberAgent
from shardwise.launch.hosts.sealed_lines import Meeting, SealedInbox, SealedSink, introduce
from shardwise.launch.hosts.wire import Message, Outbox
from shardwise.launch.report import say
from shardwise.launch.signals import SignalLog

JOB_FAILED = 3
NAME = "SHARDWISE_POD"
DIAL = "dial"
"""What tells the process in a pod that it opens the connection."""
_DIAL_SECONDS = 900.0
_CONNECT_SECONDS = 10.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 5.0


class PodAgent(MemberAgent):
    """One pod's processes, for one connection."""

    status: int | None = None
    """With which the whole job has ended, if it has."""

    def _attempt(self, said: Message) -> Attempt:
        return replace(super()._attempt(said), token=os.environ[VARIABLE])

    def _do_over(self, status: int) -> None:
        self.status, self._is_done = status, True


def serve(where: str, env: Mapping[str, str], dial_seconds: float = _DIAL_SECONDS) -> int:
    """Take part in the job whose launcher is at `where` (`host:port`); returns the exit status of the pod.

    Raises `ConfigError`.
    """
    host, colon, port = where.rpartition(":")
    token, name = env.get(VARIABLE, ""), env.get(NAME) or socket.gethostname()
    if not colon or not port.isdigit():
        raise ConfigError(f"{where!r} is not an address of a launcher; write host:port.")
    if not token:
        raise ConfigError(f"{VARIABLE} is not set. The launcher accepts only pods that have the token of the job.")
    with SignalLog() as signals, Folder(None) as folder:
        while (meeting := _dial((host, int(port)), name, token, signals, dial_seconds)) is not None:
            inbox = SealedInbox(meeting.connection, meeting.to_host)
            with meeting.connection, Images() as images:
                agent = PodAgent(
                    inbox, Outbox(SealedSink(meeting.connection, meeting.to_launcher)), folder, images, signals
                )
                agent.run()
            if agent.status is not None:
                return JOB_FAILED if agent.status else 0
            if not signals.received:
                say(f"{name} has lost the launcher and is trying to reach it again.")
        return 128 + signals.received[0] if signals.received else JOB_FAILED


def _dial(where: tuple[str, int], name: str, token: str, signals: SignalLog, dial_seconds: float) -> Meeting | None:
    """A connection to the launcher; None if the pod was asked to end, or nobody came to answer."""
    deadline, pause, complaint = time.monotonic() + dial_seconds, _FIRST_PAUSE_SECONDS, ""
    while not signals.received and time.monotonic() < deadline:
        try:
            connection = socket.create_connection(where, timeout=_CONNECT_SECONDS)
            try:
                return introduce(connection, name, token, _CONNECT_SECONDS)
            except BaseException:
                connection.close()
                raise
        except (OSError, ForgedError) as error:
            text = str(error)
        if text != complaint:
            complaint = text
            say(f"{name} cannot reach the launcher at {where[0]}, port {where[1]} ({text}). It retries.")
        _sleep(pause, signals)
        pause = min(_LONGEST_PAUSE_SECONDS, 2 * pause)
    if not signals.received:
        say(f"{name} has not reached the launcher at {where[0]}, port {where[1]}, for {dial_seconds:g} s. It gives up.")
    return None


def _sleep(seconds: float, signals: SignalLog) -> None:
    deadline = time.monotonic() + seconds
    while not signals.received and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(0.1, left))


def main(arguments: list[str]) -> int:
    """The rest of the command line after `dial`."""
    if len(arguments) != 1:
        sys.stderr.write(f"python -m shardwise.launch.hosts {DIAL} HOST:PORT\n")
        return 2
    with contextlib.suppress(BrokenPipeError):
        try:
            return serve(arguments[0], os.environ)
        except ConfigError as error:
            say(str(error))
    return 2
