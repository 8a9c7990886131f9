"""The other ranks of a world of which only rank 0 exists."""

from __future__ import annotations

from torch import Tensor

from shardwise.comm import Done, Work


class EchoTransport:
    """The other ranks say what this one says to all, at once, and add nothing to what it sums.

    So they agree on the model and on every verdict, as real ones would; what it copies counts against us. What is said
    to all is rank 0's chunk, the first of its buffer. A chunk from further on is given away to be summed, and what
    the others would give for it is not that: handed back, it would be a verdict that no ranks ever give.
    """

    name = "echo"

    def __init__(self) -> None:
        self._said: dict[tuple[int, int], Tensor] = {}

    def send(self, tensor: Tensor, rank: int, tag: int) -> Work:
        self._said[rank, tag] = tensor
        return Done()

    def receive(self, tensor: Tensor, rank: int, tag: int) -> Work:
        return _Echo(self._said, tensor, (rank, tag))

    def lost_ranks(self) -> tuple[int, ...]:
        return ()

    def closed_ranks(self) -> tuple[int, ...]:
        return ()

    def end_lost_waits(self) -> None:
        """None is ever lost."""

    def abort(self) -> None:
        """There is nobody whose message one could wait for."""

    def close(self) -> None:
        return


class _Echo:
    def __init__(self, said: dict[tuple[int, int], Tensor], tensor: Tensor, key: tuple[int, int]) -> None:
        self._said = said
        self._tensor = tensor
        self._key = key

    def wait(self) -> None:
        said = self._said.pop(self._key)
        if said.storage_offset() == 0:
            self._tensor.copy_(said)
        else:
            self._tensor.zero_()
