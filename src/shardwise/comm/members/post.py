"""How letters travel: keys of the store that the launcher owns.

The launcher numbers its news `news/0`, `news/1`, ..., and each member what it says `from/<member>/0`, ...; a count of
all that was said tells the launcher that there is something to read. What a member tells the others (`told`) lies
under a key of its own, and is copied from there into the generation that begins.
"""

from __future__ import annotations

import base64
import datetime
import threading
from collections.abc import Callable, Iterable

from torch._C._distributed_c10d import PrefixStore, Store

from shardwise.comm import compat
from shardwise.comm.members.messages import News, Said, read_told, send_told
from shardwise.comm.sealed import SealedStore
from shardwise.errors import CommError
from shardwise.job_token import Seal

_NUM_SAID = "num-said"
_ALWAYS = datetime.timedelta(days=365)


def prefix_of(attempt: str) -> str:
    """Where the keys of one attempt of a job lie."""
    return f"shardwise/members-{attempt}"


def generation_prefix(attempt: str, generation: int) -> str:
    """Where the keys of one generation lie: what torch, the watch and the devices write."""
    return f"{prefix_of(attempt)}/generation-{generation}"


class Post:
    """The launcher's side. Used by one thread. Store errors are raised as they come, `RuntimeError`."""

    def __init__(self, store: Store, attempt: str, seal: Seal) -> None:
        self._root = store
        self._attempt = attempt
        self._store = SealedStore(prefix_of(attempt), store, seal)
        self._num_read: dict[int, int] = {}
        self._num_said = 0
        self.num_news = 0

    def publish(self, news: News) -> None:
        self._store.set(f"news/{self.num_news}", news.to_json())
        self.num_news += 1

    def read(self, members: Iterable[int]) -> list[Said]:
        """What `members` have said since, in each one's order. Raises `CommError` for what a stranger has written."""
        num_said = self._store.add(_NUM_SAID, 0)
        if num_said == self._num_said:
            return []
        self._num_said = num_said
        found = []
        for member in members:
            while self._store.check([key := f"from/{member}/{self._num_read.get(member, 0)}"]):
                found.append(Said.from_json(self._store.get(key)))
                self._num_read[member] = self._num_read.get(member, 0) + 1
        return found

    def pass_on(self, generation: int, members: Iterable[int], former: Iterable[int]) -> None:
        """Let the `members` of a generation, by rank, know what those of them that are `former` ones have told."""
        knows = set(former)
        told = [self._told(member) if member in knows else b"" for member in members]
        self._store.set(f"told/{generation}", send_told(told))

    def forget(self, generation: int) -> None:
        """Remove the keys of a generation that nobody uses any more."""
        prefix = f"{generation_prefix(self._attempt, generation)}/"
        for key in self._root.list_keys():
            if (at := key.find(prefix)) >= 0:
                self._root.delete_key(key[at:])
        self._store.delete_key(f"told/{generation}")

    def _told(self, member: int) -> bytes:
        key = f"told-by/{member}"
        return base64.b85decode(self._store.get(key)) if self._store.check([key]) else b""


class RanksPost:
    """One member's side. `say` is for the thread that computes."""

    def __init__(self, store: Store, attempt: str, member: int, seal: Seal) -> None:
        """`store` is not to be used by anybody else; it can be cloned."""
        self.member = member
        self._attempt = attempt
        self._seal = seal
        self._root = store
        self._store = SealedStore(prefix_of(attempt), store, seal)
        self._num_said = 0
        self._lock = threading.Lock()

    def has_said(self) -> bool:
        """Whether a process with this number has spoken before."""
        return self._store.check([f"from/{self.member}/0"])

    def say(self, said: Said, told: bytes | None = None) -> None:
        """From any thread, but from no signal handler."""
        with self._lock:
            if told is not None:
                self._store.set(f"told-by/{self.member}", base64.b85encode(told).decode())
            self._store.set(f"from/{self.member}/{self._num_said}", said.to_json())
            self._num_said += 1
            self._store.add(_NUM_SAID, 1)

    def told(self, generation: int) -> tuple[bytes, ...]:
        """What each rank of `generation` told the others when it began."""
        with self._lock:
            return read_told(self._store.get(f"told/{generation}"))

    def store_of(self, generation: int) -> Store:
        """Where its members meet, over a connection of its own."""
        with self._lock:
            return PrefixStore(generation_prefix(self._attempt, generation), compat.twin(self._root))

    def listen(self, first: int, read: Callable[[News], bool]) -> threading.Thread:
        """Let a thread of its own `read` all news from number `first` on, as they come, until that returns false.

        [Note: threads at the end] A thread that comes out of torch's store when Python has begun to end takes the
        process down (`terminate called`). So this one is to be through before: the last letter is for that.
        """
        prefix, twin = prefix_of(self._attempt), compat.twin(self._root)
        plain, store = PrefixStore(prefix, twin), SealedStore(prefix, twin, self._seal)

        def follow() -> None:
            number, goes_on = first, True
            try:
                while goes_on:
                    plain.wait([f"news/{number}"], _ALWAYS)
                    goes_on = read(News.from_json(store.get(f"news/{number}")))
                    number += 1
            except CommError as error:  # a stranger's: whom to follow from here?
                read(News("end", -1, text=str(error)))
            except RuntimeError:
                return  # the launcher is gone, and this process will not be there for long

        thread = threading.Thread(target=follow, name=f"shardwise-news-{self.member}", daemon=True)
        thread.start()
        return thread
