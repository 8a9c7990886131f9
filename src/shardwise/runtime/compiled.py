"""`torch.compile` for each unit: its computation becomes one graph, our hooks stay outside of it.

What is compiled is a site's `forward`, not its call: PyTorch runs a module's hooks around `forward`, so gathering
and freeing happen before the graph is entered and after it is left, and break nothing in it. Blocks of one
class share a graph. A site that is a single operation (an embedding, a head) has nothing to fuse and is left alone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence

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


_COMPILED_CALL = ("compile_wrapper", "torch._dynamo.eval_frame")
"""The function that calls what `torch.compile` was given."""


class OuterCompile:
    """Says once that a `torch.compile` around the model, or around some of its units, is in vain."""

    def __init__(self, model: nn.Module, sites: Iterable[nn.Module]) -> None:
        self._was_said = False
        self._num_looks = 2
        wraps = hasattr(model, "_orig_mod")  # torch.compile(model): the hooks of what is inside end each graph
        if wraps or any(site._compiled_call_impl is not None for site in (model, *sites)):
            self._say()

    def look_around(self) -> None:
        """Called as the root is entered, the first few times: while all operations are watched nothing is traced."""
        if self._num_looks > 0 and not self._was_said:
            self._num_looks -= 1
            frame = sys._getframe()
            while (outer := frame.f_back) is not None:
                frame = outer
                if (frame.f_code.co_name, frame.f_globals.get("__name__")) == _COMPILED_CALL:
                    self._say()
                    return

    def notice(self) -> None:
        """Called from a hook: true in one that is being traced, false elsewhere, whatever other threads do."""
        if torch.compiler.is_dynamo_compiling() and not self._was_said:
            torch.compiler.disable(self._say)()  # type: ignore[no-untyped-call]  # torch's own

    def _say(self) -> None:
        self._was_said = True
        warnings.warn(
            "torch.compile around a sharded model compiles next to nothing: parameters come and go at its units, and "
            "each of them ends the graph. The results are right. Call the plain model, and have each unit compiled by "
            "the plan: compile: inductor.",
            UserWarning,
            stacklevel=2,
        )
