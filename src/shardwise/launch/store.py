"""The store through which ranks find each other: owned by the launcher, a rendezvous handler of torch elastic."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from shardwise.comm import StartupBarrier, last_status
from shardwise.system.job_token import Seal, new_token


class LauncherStore(RendezvousHandler):
    """One store for all attempts, empty at the start of each.

    Torch elastic's static rendezvous keeps one store too, but also the keys of dead ranks: the next attempt's ranks
    read their addresses and wait for them (torch 2.13 with gloo: 6 of 6 restarts hung). Here all ranks of the last
    attempt are gone when the next rendezvous begins, so their keys can be deleted.
    """

    def __init__(self, listener: socket.socket, run_id: str, token: str = "") -> None:
        """`token` is the job's, if one exists already."""
        self.token = token or new_token()
        self._address, self._port = listener.getsockname()[:2]
        self._run_id = run_id
        self._store = TCPStore(
            self._address,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def port(self) -> int:
        """The port of the store."""
        return int(self._port)

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect as clients; none of them owns the store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the emptied store; there is only this machine to wait for."""
        for key in self._store.list_keys():
            self._store.delete_key(key)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(self._address, self._port))

    def last_status(self, rank: int, attempt: int) -> str:
        """The activity that `rank` last published; `""` if it never did."""
        try:
            return last_status(self._store, rank, f"attempt-{attempt}", Seal(self.token, str(attempt)))
        except RuntimeError:
            return ""

    def cancel_rendezvous(self, attempt: int, ended: list[int], living: list[int]) -> None:
        """Tell `living` ranks that wait in `World.join` for one that has `ended`."""
        if ended and living:
            StartupBarrier(self._store, str(attempt), seal=Seal(self.token, str(attempt))).cancel_without(ended, living)

    def get_backend(self) -> str:
        """A name for elastic's events."""
        return "shardwise"

    def get_run_id(self) -> str:
        """The job's name in the ranks' environment."""
        return self._run_id

    def is_closed(self) -> bool:
        """Never: it ends with the launcher."""
        return False

    def set_closed(self) -> None:
        """There is nothing to do."""

    def num_nodes_waiting(self) -> int:
        """Always 0: the job has only this machine."""
        return 0

    def shutdown(self) -> bool:
        """There is nothing to do: the store ends with the launcher."""
        return True
