"""Memory that ranks have in common: what a collective may offer, and what may rest there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Part:
    """A piece of memory to be shared: how many bytes it has, and which of them are this rank's."""

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
        """This rank's, as uint8. For writing, while the buffers are open."""
        ...

    def renew(self) -> None:
        """Forget what this rank has written to `whole`, and let its pages go."""
        ...

    def relax(self) -> None:
        """Let pages of `whole` go while nobody reads it, if this rank has written to none. It can be read as before."""
        ...

    def wait_closed(self) -> None:
        """Blocks until `whole` can be read."""
        ...


class SharedBuffers(Protocol):
    """Pieces that are opened and closed together. All ranks of the line call, in the same order. It is made open."""

    @property
    def pieces(self) -> Sequence[SharedBuffer]: ...

    def open(self) -> None:
        """Before this rank writes: blocks until no other reads what was there."""
        ...

    def close(self) -> None:
        """This rank has written; returns at once."""
        ...
