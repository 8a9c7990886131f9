"""Installs treatments by replacing the forwards of modules, and removes them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from shardwise.runtime.activations.activation_offload import Offloading, SavedElsewhere
from shardwise.runtime.activations.choice import Treatment
from shardwise.runtime.activations.recompute import Around, Recomputing


class TreatedSites:
    """Between `install` and `remove` each module's forward is treated as specified.

    The wrappers run inside the module's hooks and are not modules, so names, classes and hooks are unchanged.
    """

    def __init__(
        self,
        by_site: Mapping[nn.Module, tuple[str, Treatment]],
        offloading: Mapping[str, Offloading],
        around: Around = nullcontext,
    ) -> None:
        """`offloading`: the offloader of each policy; `around`: see `Recomputing`."""
        self._by_site = dict(by_site)
        self._offloading, self._around = offloading, around
        self._before: dict[nn.Module, Callable[..., Any] | None] = {}

    def install(self) -> None:
        for site, (unit, treatment) in self._by_site.items():
            self._before[site] = site.__dict__.get("forward")
            forward = site.forward
            site.__dict__["forward"] = (
                Recomputing(unit, site, forward, treatment.operators, self._around)
                if treatment.policy in ("recompute", "selective")
                else SavedElsewhere(unit, site, forward, self._offloading[treatment.policy])
            )

    def remove(self) -> None:
        """Restore the forwards. May be called twice."""
        for site, forward in self._before.items():
            if forward is None:
                site.__dict__.pop("forward", None)
            else:
                site.__dict__["forward"] = forward
        self._before.clear()
