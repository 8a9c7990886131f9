"""What routers have counted, in a job that goes on when a rank is lost.

`update_biases` adds up what all ranks have counted. What a lost rank has counted would be lost with it, although the
step that it is of was taken. So here steps add it up, before they count as taken, and `update_biases` sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardwise.parallel.experts.router import routers_of, take_load

Tensor = torch.Tensor
Counted = Mapping[str, tuple[Tensor | None, Tensor | None]]
"""By router: `load` and `counts`."""


class Loads:
    """The loads of the routers of a model that have a bias."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = {name: router for name, router in routers_of(model).items() if router.bias is not None}

    def begin(self, known: Mapping[str, Tensor] | None = None) -> None:
        """Let steps add them up. `known` is what others have added up since the last `update_biases`."""
        for name, router in self._routers.items():
            router.load = None
            found = (known or {}).get(name)
            router.counts = torch.zeros(router.num_experts, device=router.weight.device) if found is None else found

    def end(self) -> None:
        """Let `update_biases` add them up."""
        for router in self._routers.values():
            router.counts = None

    @torch.no_grad()
    def add_up(self) -> None:
        """Add what all ranks have counted in this step. All ranks call."""
        routers = list(self._routers.values())
        if not routers:
            return
        sums = routers[0].total(torch.cat(list(map(take_load, routers))))
        for router, own in zip(routers, sums.split_with_sizes([router.num_experts for router in routers]), strict=True):
            router.counts = own if router.counts is None else router.counts + own

    def known(self) -> dict[str, Tensor]:
        """What steps have added up since the last `update_biases`: the same on all ranks."""
        return {name: router.counts for name, router in self._routers.items() if router.counts is not None}

    def now(self) -> Counted:
        """What is counted now, on this rank and by steps. Later counts do not change it."""
        return {name: (router.load, router.counts) for name, router in self._routers.items()}

    def restore(self, counted: Counted) -> None:
        for name, router in self._routers.items():
            if name in counted:  # else it is of a pipeline stage that this rank has not had
                router.load, router.counts = counted[name]
