"""A part of a store whose values only members of the job can have written.

[Note: whom ranks believe] torch's TCPStore authenticates nobody: whoever reaches its port can read, write and delete
every key. That cannot be changed from here, and scripts connect to it by torch's own means. So what ranks believe of
each other is sealed with the token of the job: a stranger can disturb a job, by deleting keys or incrementing counters,
but cannot make its ranks believe that one of them has failed, or is another one. Without a token (ranks started by
another launcher) values are accepted as they are; their form is checked all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.comm.compat import PrefixStore, Store
from shardwise.errors import CommError
from shardwise.system.job_token import ForgedError, Seal

MAX_BYTES = 2**20
"""For one value: what ranks report about themselves is short."""


class NotOfJobError(CommError):
    """No member of the job has written this value."""


class SealedStore:
    """Like `PrefixStore`, with sealed values. Store errors are raised as they come, `RuntimeError`."""

    def __init__(self, prefix: str, store: Store, seal: Seal) -> None:
        self._store = PrefixStore(prefix, store)
        self._prefix, self._seal = prefix, seal

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._closed(key, value))  # type: ignore[arg-type]  # it takes bytes as well

    def get(self, key: str) -> bytes:
        """Raises `NotOfJobError` for a value that no member of the job has written."""
        return self._opened(key, self._store.get(key))

    def set_once(self, key: str, value: str) -> bytes:
        """Set `key` if it does not exist; returns its value then. Raises `NotOfJobError` as `get` does."""
        return self._opened(key, self._store.compare_set(key, "", self._closed(key, value)))  # type: ignore[arg-type]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist, whoever has written them."""
        return bool(self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Increment a counter; not protected by the seal."""
        return int(self._store.add(key, amount))

    def count(self, key: str) -> int:
        """The value of a counter; 0 if it does not exist."""
        return self.add(key, 0) if self.check([key]) else 0

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def _closed(self, key: str, value: str) -> bytes:
        return self._seal.close(f"{self._prefix}/{key}", value.encode(errors="replace"))

    def _opened(self, key: str, value: bytes) -> bytes:
        return opened(self._seal, f"{self._prefix}/{key}", value)


def opened(seal: Seal, name: str, value: bytes) -> bytes:
    """The content of a value of the store. Raises `NotOfJobError` if no member of the job has written it."""
    try:
        if len(value) > MAX_BYTES:
            raise ForgedError(f"what is at {name!r} has {len(value)} bytes, more than any member of this job writes")
        return seal.open(name, value)
    except ForgedError as error:
        raise NotOfJobError(
            f"In the store of this job {error}. Somebody else reaches its port: see SECURITY.md, and start the job "
            f"where only its own ranks do."
        ) from None
