"""In a pod: connects to the launcher of an elastic job, runs its ranks, and connects again when the launcher is lost.

The exit status is 0 if the job has succeeded, `JOB_FAILED` if it has failed or the launcher cannot be reached for too
long, and 143 if the pod itself got SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from shardwise.errors import ConfigError
from shardwise.launch.elastic.image_folder import Images
from shardwise.launch.environment import Attempt
from shardwise.launch.hosts.host_messages import Message, Outbox
from shardwise.launch.hosts.members import MemberAgent
from shardwise.launch.hosts.sealed_lines import SealedConnection, SealedInbox, SealedSink, connect_to_launcher
from shardwise.launch.hosts.server import Order
from shardwise.launch.job_report import say
from shardwise.launch.log_folder import Folder
from shardwise.launch.signals import SignalLog
from shardwise.system.job_token import VARIABLE, ForgedError

JOB_FAILED = 3
NAME = "SHARDWISE_POD"
CONNECT = "connect"
"""The argument with which the process in a pod opens the connection."""
_RETRY_SECONDS = 900.0
_CONNECT_SECONDS = 10.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 5.0


class PodAgent(MemberAgent):
    """One pod's processes. If its launcher is lost, and that has said what it has decided, they go on until the next
    one is there."""

    status: int | None = None
    """The exit status of the whole job, if it has ended."""

    def __init__(
        self,
        sealed: SealedConnection,
        folder: Folder,
        images: Images,
        signals: SignalLog,
        connect: Callable[[float], SealedConnection | None],
    ) -> None:
        """`connect` connects to the launcher within so many seconds, or returns `None`."""
        outbox = Outbox(SealedSink(sealed.connection, sealed.to_launcher))
        super().__init__(SealedInbox(sealed.connection, sealed.to_host), outbox, folder, images, signals)
        self._connection, self._connect = sealed.connection, connect
        self._give_up_at: float | None = None
        """If the launcher was lost, and no other one has adopted the ranks."""

    def close(self) -> None:
        self._connection.close()

    def _attempt(self, message: Message) -> Attempt:
        return replace(super()._attempt(message), token=os.environ[VARIABLE])

    def _orders(self) -> dict[str, Order]:
        return super()._orders() | {"over": self._do_over}

    def _do_over(self, status: int) -> None:
        self.status, self._is_done = status, True

    def _do_bye(self) -> None:
        if self._lives:  # the launcher goes on without them
            self._end_alone()
        super()._do_bye()

    def _do_adopt(self, members: list[int]) -> None:
        self._give_up_at = None
        super()._do_adopt(members)

    def _follow_the_next(self) -> bool:
        """Connect to the launcher that is started in the place of the last one, which has the same name, and tell it
        what that had decided."""
        kept, now = self._kept, time.monotonic()
        if kept is None:
            return False
        if self._give_up_at is None:
            self._give_up_at = now + kept.seconds
            seconds = f"{kept.seconds:g} s"
            say(f"this pod has lost the launcher. Its ranks go on, and end after {seconds} without another one.")
        self._connection.close()
        sealed = self._connect(self._give_up_at - now)
        if sealed is None:
            return False
        self._connection, self._inbox = sealed.connection, SealedInbox(sealed.connection, sealed.to_host)
        self._outbox.send_by(SealedSink(sealed.connection, sealed.to_launcher))
        self._say(kind="returning", label=kept.label, state=kept.state, **kept.voice())
        return True

    def _watch(self) -> None:
        super()._watch()
        if self._give_up_at is not None and time.monotonic() > self._give_up_at:
            say("no launcher has taken over the ranks of this pod. They end.")
            self._end_alone()
            self._is_done = True


def serve(where: str, env: Mapping[str, str]) -> int:
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
        connect = partial(_connect, (host, int(port)), name, token, signals)
        while (sealed := connect(_RETRY_SECONDS)) is not None:
            with Images() as images, contextlib.closing(PodAgent(sealed, folder, images, signals, connect)) as agent:
                agent.run()
            if agent.status is not None:
                return JOB_FAILED if agent.status else 0
            if not signals.received:
                say(f"{name} has lost the launcher and is trying to reach it again.")
        return 128 + signals.received[0] if signals.received else JOB_FAILED


def _connect(
    where: tuple[str, int], name: str, token: str, signals: SignalLog, seconds: float
) -> SealedConnection | None:
    """A connection to the launcher; None if the pod was asked to end, or none could be made."""
    deadline, pause, complaint = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS, ""
    while not signals.received and time.monotonic() < deadline:
        try:
            connection = socket.create_connection(where, timeout=_CONNECT_SECONDS)
            try:
                return connect_to_launcher(connection, name, token, _CONNECT_SECONDS)
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
        say(f"{name} has not reached the launcher at {where[0]}, port {where[1]}, for {seconds:g} s. It gives up.")
    return None


def _sleep(seconds: float, signals: SignalLog) -> None:
    deadline = time.monotonic() + seconds
    while not signals.received and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(0.1, left))


def main(arguments: list[str]) -> int:
    """The rest of the command line after `connect`."""
    if len(arguments) != 1:
        sys.stderr.write(f"python -m shardwise.launch.hosts {CONNECT} HOST:PORT\n")
        return 2
    with contextlib.suppress(BrokenPipeError):
        try:
            return serve(arguments[0], os.environ)
        except ConfigError as error:
            say(str(error))
    return 2
