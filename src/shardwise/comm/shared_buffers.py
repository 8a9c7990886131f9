"""Memory that ranks share: for offers in collectives, and for parameters at rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Part:
    """A piece of memory to be shared: its number of bytes, and which of them are this rank's."""

    num_bytes: int
    own_start: int
    own_stop: int


class SharedBuffer(Protocol):
    """One piece of a `SharedBuffers`."""

    @property
    def whole(self) -> Tensor:
        """All ranks' bytes, as uint8. For reading, while the buffers are closed."""
        ...

    @property
    def own(self) -> Tensor:
        """This rank's bytes, as uint8. For writing, while the buffers are open."""
        ...

    def renew(self) -> None:
        """Discard what this rank has written to `whole`, and free its pages."""
        ...

    def relax(self) -> bool:
        """Free pages of `whole` while it is not being read, if this rank has written to none. It stays readable.
        Whether to call `resume` before it is read again."""
        ...

    def resume(self) -> None:
        """All of `whole` is about to be read again."""
        ...

    def wait_closed(self) -> None:
        """Block until `whole` can be read, all of which is about to be."""
        ...

    def let_go(self) -> None:
        """Free the memory of `own`, which no rank reads any more; it is undefined afterwards."""
        ...


class SharedBuffers(Protocol):
    """Pieces that are opened and closed together. All ranks of the line call, in the same order. Created open."""

    @property
    def pieces(self) -> Sequence[SharedBuffer]: ...

    def open(self) -> None:
        """Call before this rank writes: blocks until no other rank reads the old content."""
        ...

    def close(self) -> None:
        """This rank has written; returns at once."""
        ...
