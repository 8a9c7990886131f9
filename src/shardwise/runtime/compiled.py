"""`torch.compile` for each unit: its computation becomes one graph, our hooks stay outside of it.

What is compiled is a site's `forward`, not its call: PyTorch runs a module's hooks around `forward`, so gathering
and freeing happen before the graph is entered and after it is left, and break nothing in it. Blocks of one
class share a graph. A site that is a single operation (an embedding, a head) has nothing to fuse and is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.errors import ConfigError, nearest
from shardwise.storage import Unit


def check_backend(backend: str | None) -> None:
    """Raise `ConfigError` for a backend that torch.compile does not know; none at all is fine. Changes nothing."""
    if backend is None:
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(f"compile is {backend!r}, which torch.compile does not know. {nearest(backend, known)}")


class CompiledUnits:
    """The compiled forwards of all units that are modules below the root. `remove` puts the originals back."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], backend: str) -> None:
        self._backend = backend
        sites = dict.fromkeys(site for unit in units for site in unit.sites if site is not model)
        inside = {inner for site in sites for inner in site.modules() if inner is not site}
        self._sites = [
            site
            for site in sites
            if site not in inside and any(True for _ in site.children()) and "forward" not in site.__dict__
        ]
        self._are_installed = False

    def install(self) -> None:
        """Compile, from the next call on. Asked twice it does nothing."""
        if self._are_installed:
            return
        self._are_installed = True
        for site in self._sites:
            site.forward = torch.compile(site.forward, backend=self._backend)

    def remove(self) -> None:
        if self._are_installed:
            for site in self._sites:
                site.__dict__.pop("forward", None)
        self._are_installed = False
