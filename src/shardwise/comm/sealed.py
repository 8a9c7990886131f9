"""A part of a store whose values only the job's own members can have written.

[Note: whom ranks believe] torch's TCPStore asks nobody who he is: whoever reaches its port can read, write and delete
every key. That cannot be changed from here, and scripts connect to it by torch's own means. So what ranks believe of
each other is sealed by the token of the job: a stranger can disturb a job, by deleting keys or counting up, but he
cannot make its ranks believe that one of them has failed, or is another one. Without a token (ranks that others have
started) values are taken as they are; their form is checked all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore, Store

from shardwise.errors import CommError
from shardwise.job_token import ForgedError, Seal

MAX_BYTES = 2**20
"""Of one value: what ranks say of themselves is short."""


class SealedStore:
    """What `PrefixStore` does, with values sealed. Store errors are raised as they come, `RuntimeError`."""

    def __init__(self, prefix: str, store: Store, seal: Seal) -> None:
        self._store = PrefixStore(prefix, store)
        self._prefix, self._seal = prefix, seal

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._closed(key, value))  # type: ignore[arg-type]  # it takes bytes as well

    def get(self, key: str) -> bytes:
        """Raises `CommError` for a value that no member of the job has written."""
        return self._opened(key, self._store.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key`, if it is not there; returns what is there then. `expected` is `""`.

        Raises `CommError` as `get` does.
        """
        assert not expected, "a value that is there is never replaced"
        return self._opened(key, self._store.compare_set(key, "", self._closed(key, desired)))  # type: ignore[arg-type]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there, whoever has written them."""
        return bool(self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Count; anybody can."""
        return int(self._store.add(key, amount))

    def count(self, key: str) -> int:
        """How far it was counted; 0 if nobody has."""
        return self.add(key, 0) if self.check([key]) else 0

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def _closed(self, key: str, value: str) -> bytes:
        return self._seal.close(f"{self._prefix}/{key}", value.encode(errors="replace"))

    def _opened(self, key: str, value: bytes) -> bytes:
        return opened(self._seal, f"{self._prefix}/{key}", value)


def opened(seal: Seal, name: str, value: bytes) -> bytes:
    """The content of a value of the store. Raises `CommError` if no member of the job has written it."""
    try:
        if len(value) > MAX_BYTES:
            raise ForgedError(f"what is at {name!r} has {len(value)} bytes, more than any member of this job writes")
        return seal.open(name, value)
    except ForgedError as error:
        raise CommError(
            f"In the store of this job {error}. Somebody else reaches its port: see SECURITY.md, and start the job "
            f"where only its own ranks do."
        ) from None
