"""A launcher's host becomes silent: nothing comes from it any more, and no connection to it breaks. Its ranks follow
the next launcher, whatever they were just asking the last one, or were about to. If only connections to it break, they
connect to it again."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from shardwise.comm.members import Announcement, ChannelMemory, LauncherChannel, MemberMessage, launcher_connection
from shardwise.comm.members.channels import MemberChannel
from shardwise.comm.members.launcher_connection import LauncherConnection
from shardwise.comm.watch.status_board import BoardError, board_of
from shardwise.launch.port import listen
from shardwise.system.job_token import Seal, new_token
from shardwise.system.launcher_address import LauncherAddress
from tests.patience import PATIENCE
from tests.thorough import THOROUGH, varies

SEAL = Seal(new_token(), "0")
NEVER = 10**9


class Cable:
    """To the store at a port: passes so many blocks on, in both directions, and is out then. Like a host that has
    become silent, it closes nothing; and whoever connects later gets no answer, as one that is connected already.

    With `num_breaks`, all connections break instead, and again after as many blocks; later ones are not affected. With
    a `text`, only that one breaks which is the first to carry it: before or after that (`arrives`)."""

    def __init__(self, port: int, last: int, num_breaks: int = 0, text: bytes = b"", *, arrives: bool = False) -> None:
        self.num_passed, self.num_breaks = 0, 0
        self._most_breaks, self._every = num_breaks, last
        self._text, self._arrives = text, arrives
        self.is_out = threading.Event()
        self._last, self._port = last, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ends: list[socket.socket] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed and not self.is_out.is_set():
            for key, _ in self._selector.select(0.01):
                if key.fileobj is self._listener:
                    self._join(self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._port)))
                elif not self.is_out.is_set() and key.fileobj in self._ends:
                    self._pass_on(key)

    def _join(self, one: socket.socket, other: socket.socket) -> None:
        self._ends += [one, other]
        self._selector.register(one, selectors.EVENT_READ, other)
        self._selector.register(other, selectors.EVENT_READ, one)

    def _pass_on(self, key: selectors.SelectorKey) -> None:
        source = key.fileobj
        assert isinstance(source, socket.socket)
        block = source.recv(2**16)
        if not block:
            self._selector.unregister(source)
            with contextlib.suppress(OSError):
                key.data.shutdown(socket.SHUT_WR)
            return
        if self.num_passed == self._last:
            self._end()
            return
        self.num_passed += 1
        is_it = bool(self._text) and self._text in block
        if not is_it or self._arrives:
            with contextlib.suppress(OSError):  # the other end is gone
                key.data.sendall(block)
        if is_it:
            self.num_breaks, self._text = self.num_breaks + 1, b""
            self._break([source, key.data])

    def _end(self) -> None:
        if not self._most_breaks:
            self.is_out.set()
            return
        self.num_breaks += 1
        self._last = self._last + self._every if self.num_breaks < self._most_breaks else NEVER
        self._break(self._ends)

    def _break(self, ends: Sequence[socket.socket]) -> None:
        for end in list(ends):
            with contextlib.suppress(KeyError):  # it was at its end already
                self._selector.unregister(end)
            end.close()
            self._ends.remove(end)

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        for end in (*self._ends, self._listener):
            end.close()
        self._selector.close()


class Launcher:
    """One launcher: it forms a generation of one member, and ends the job when that is ready for the next."""

    def __init__(self, memory: ChannelMemory | None = None) -> None:
        listener = listen(None)
        self.port = int(listener.getsockname()[1])
        self.store = TCPStore(
            "127.0.0.1", self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.channel = LauncherChannel(self.store, "0", SEAL, memory)

    def look(self) -> None:
        for message in self.channel.read([0]):
            self.channel.act_on(message)
            match message.kind:
                case "here":
                    self.channel.share_reports(0, [0], [])
                    self.channel.publish(Announcement("entering", 0, (0,)))
                case "opened":
                    self.channel.publish(Announcement("formed", 0, (0,)))
                case "ready":
                    self.channel.publish(Announcement("end", 0, text="enough"))


class Rank:
    """One that enters a generation, looks at its board, and is ready for the next."""

    def __init__(self, folder: Path, port: int) -> None:
        self.heard: list[str] = []
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._launcher = LauncherConnection(
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SHARDWISE_IMAGES": str(folder)}
        )
        self._is_done = threading.Event()
        for work in (self._live, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def _watch(self) -> None:
        while not self._is_done.wait(0.01):
            self._launcher.leave_the_replaced()

    def _live(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self._is_done.set()

    def _work(self) -> None:
        channel = MemberChannel(self._launcher.connect(), "0", 0, SEAL, self._launcher.again)
        assert not channel.has_sent()
        news = channel.listen(0, self._read)
        channel.send(MemberMessage("here", 0))
        self._wait_for("entering")
        board = None
        while board is None:
            with contextlib.suppress(RuntimeError, BoardError):  # the launcher is silent
                board = board_of(1, SEAL, 60, number=0, stores=channel.stores_of(0))
        channel.send(MemberMessage("opened", 0, 0))
        self._wait_for("formed")
        channel.confirm(0)
        assert channel.reports(0) == (b"",)
        with contextlib.suppress(BoardError):
            assert board.fault() is None
        channel.send(MemberMessage("ready", 0, 0))
        self._wait_for("end")
        news.join()

    def _read(self, announcement: Announcement) -> bool:
        with self._changed:
            self.heard.append(announcement.kind)
            self._changed.notify_all()
        return announcement.kind != "end"

    def _wait_for(self, kind: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: kind in self.heard)

    @property
    def is_done(self) -> bool:
        return self._is_done.is_set()


@contextlib.contextmanager
def cable(port: int, last: int, num_breaks: int, text: bytes, *, arrives: bool) -> Iterator[Cable]:
    made = Cable(port, last, num_breaks, text, arrives=arrives)
    try:
        yield made
    finally:
        made.close()


def run(folder: Path, last: int, num_breaks: int = 0, text: bytes = b"", *, arrives: bool = False) -> int:
    """A job whose first launcher's cable is out after so many blocks, or breaks as `Cable` says; returns how many
    blocks have passed."""
    first, deadline = Launcher(), time.monotonic() + PATIENCE
    with cable(first.port, last, num_breaks, text, arrives=arrives) as line:
        LauncherAddress(0, "127.0.0.1", line.port).write(folder)
        rank, launcher = Rank(folder, line.port), first
        while not rank.is_done:
            assert time.monotonic() < deadline, (last, line.num_passed, rank.heard)
            launcher.look()
            if line.is_out.is_set() and launcher is first:
                launcher = Launcher(first.channel.memory)
                LauncherAddress(1, "127.0.0.1", launcher.port).write(folder)
            time.sleep(0.001)  # this loop is the launcher's own: `wait_until` would look ever less often
        assert (rank.error, rank.heard) == (None, ["entering", "formed", "end"]), last
        assert line.num_breaks == (1 if text else num_breaks), last
        return line.num_passed


@varies
def test_ranks_follow_the_next_launcher_wherever_the_last_one_becomes_silent(tmp_path: Path) -> None:
    num_blocks = run(tmp_path, NEVER)
    assert num_blocks > 30
    for last in range(0, num_blocks, 1 if THOROUGH else 7):
        run(tmp_path, last)


@varies
def test_ranks_connect_again_to_a_launcher_that_lives_however_often_the_connection_breaks(tmp_path: Path) -> None:
    """At first while they follow it, then at once after they have connected again, or while they do."""
    for last in range(10, 40, 1 if THOROUGH else 9):
        run(tmp_path, last, num_breaks=1)
    for every in range(8, 13):
        run(tmp_path, every, num_breaks=3)


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("text", ["from/0/0", "from/0/1", "from/0/2", "sent/from/0/1", "sent/from/0/2"])
def test_a_message_comes_once_if_the_connection_that_sends_it_is_the_only_one_that_breaks(
    text: str, arrives: bool, tmp_path: Path
) -> None:
    """The news still come, so that nothing but the message itself tells of it; it may have been read, or not."""
    run(tmp_path, NEVER, text=text.encode(), arrives=arrives)


def test_a_launcher_that_is_just_dying_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens for a moment longer than it answers. Torch would try to connect to it for twelve seconds, and the rank
    would follow nobody else meanwhile."""
    monkeypatch.setattr(launcher_connection, "TCPStore", lambda *_, **__: pytest.fail("torch connects"))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    LauncherAddress(1, "127.0.0.1", port).write(tmp_path)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SHARDWISE_IMAGES": str(tmp_path)}
    launcher = LauncherConnection(environment)

    def die() -> None:
        accepted, _ = listener.accept()
        listener.close()
        accepted.close()

    dying = threading.Thread(target=die)
    dying.start()
    assert launcher.again() is None
    dying.join(PATIENCE)
    assert launcher.again() is None, "nobody listens there"
