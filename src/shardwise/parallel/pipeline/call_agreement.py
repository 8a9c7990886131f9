"""What ranks tell each other before a call of a model in stages: who makes it, and whether it is the same one.

[Note: calls of all pipelines] If parameters are gathered in a call (see [Note: rounds] in
`runtime/no_grad_forwards.py`), all ranks that have a stage are needed for it, whichever pipeline they are in. A rank
that waited for its own pipeline meanwhile could wait for itself. So pipelines make their calls at the same time, after
a meeting of the whole world, and go through the stages in the same order. One that has made all its calls stands by:
its ranks take part in the rounds of their stages, and ask for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain

from torch import nn

from shardwise.comm import Line
from shardwise.errors import FaultError, StateError

_END, _FAILED = b"end", b"failed"
_NUMBER_BYTES = 2
_ALIKE = "All ranks of a pipeline have to make the same calls, because each has only some stages."

Words = Mapping[int, bytes]
"""By rank: the number of the called module, and a digest of what it is called with; or that there are no more calls."""


class CallAgreement:
    """One rank's agreement on calls: with the ranks of its `own` pipeline, or with those of `all_pipelines`.

    `exchange` is that of the world. `modules` are those that may be called, with their names.
    """

    def __init__(
        self,
        own: Line,
        modules: Mapping[nn.Module, str],
        all_pipelines: Sequence[Sequence[int]] = (),
        exchange: Callable[[bytes], list[bytes]] | None = None,
    ) -> None:
        self._own = own
        self._modules, self._names = list(modules), list(modules.values())
        self.are_common = bool(all_pipelines)
        """Whether all pipelines meet; see [Note: calls of all pipelines]."""
        self._pipelines = all_pipelines or [own.ranks]
        self._ranks = sorted(chain(*self._pipelines)) if self.are_common else own.ranks
        self._exchange = exchange or own.exchange
        self._is_awaited = True
        """Whether the other ranks will wait for this one in a meeting, before anything else."""

    def call(self, model: nn.Module, digest: bytes) -> bool:
        """Announce a call; whether the ranks of this pipeline have the same `digest`.

        Raises `StateError` on all ranks unless those of each pipeline call the same module, or have ended.
        """
        words = self._meet(self._modules.index(model).to_bytes(_NUMBER_BYTES) + digest)
        return len({words[rank] for rank in self._own.ranks}) == 1

    def end(self) -> bool:
        """Announce that there are no more calls; whether no other pipeline makes one either. Raises as `call`."""
        return set(self._meet(_END).values()) == {_END}

    def call_is_over(self) -> None:
        self._is_awaited = True

    def fail(self) -> None:
        """This rank has raised. Tell the other pipelines, unless they know, or wait for something else."""
        if self._is_awaited and self.are_common:
            self._is_awaited = False
            with suppress(FaultError):  # they wait elsewhere, and what this rank raised says more
                self._exchange(_FAILED)

    def _meet(self, word: bytes) -> Words:
        words = dict(zip(self._ranks, self._exchange(word), strict=True))
        self._is_awaited = False
        failed = next((rank for rank, one in words.items() if one == _FAILED), None)
        if failed is not None:
            raise StateError(
                f"Rank {failed} left engine.inference() with an error, so its part of the parameters is no longer "
                f"available; its own report says why."
            )
        for pipeline in self._pipelines:
            self._require_alike({rank: words[rank] for rank in pipeline})
        return words

    def _require_alike(self, words: Words) -> None:
        """Raise unless one pipeline makes one call, but for inputs of this rank's own, which are compared later."""
        first, *others = words
        calling = next((rank for rank, one in words.items() if one != _END), None)
        ended = next((rank for rank, one in words.items() if one == _END), None)
        if calling is None:
            return
        if ended is not None:
            raise StateError(
                f"Rank {ended} has left engine.inference(), and rank {calling} of the same pipeline calls the model "
                f"again. {_ALIKE}"
            )
        numbers = {rank: int.from_bytes(words[rank][:_NUMBER_BYTES]) for rank in words}
        other = next((rank for rank in others if numbers[rank] != numbers[first]), None)
        if other is not None:
            asked, wanted = (self._names[numbers[rank]] for rank in (first, other))
            raise StateError(f"Rank {first} calls {asked}, and rank {other} of the same pipeline {wanted}. {_ALIKE}")
        other = next((rank for rank in others if words[rank] != words[first]), None)
        if other is not None and first not in self._own.ranks:
            raise StateError(
                f"Ranks {first} and {other} of one pipeline call the model with different inputs; their own reports "
                f"say which."
            )
