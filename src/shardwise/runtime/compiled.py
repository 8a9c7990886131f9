"""`torch.compile` for each unit: its computation becomes one graph, with our hooks outside of it.

A site's `forward` is compiled, not its `__call__`: PyTorch runs a module's hooks around `forward`, so gathers and frees
happen outside the graph and do not break it. Blocks of one class share a graph. A site that is a single operation (an
embedding, a head) has nothing to fuse and is not compiled.

[Note: caches] A decoder of transformers called with `use_cache`, which is the default, passes one cache to all of its
blocks, with a layer for each block. Which layers are filled then becomes part of a graph's guards: every block gets its
own graph, and after 8 graphs of one class torch stops compiling. So as many graphs are allowed as there are blocks, and
a warning says how the blocks could share one.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, nearest
from shardwise.memory import Unit
from shardwise.system.loaded import loaded

_RECORDS_ADDRESSES = "cudagraphs"


def check_backend(backend: str | None, *, stays_whole: bool) -> None:
    """Raise `ConfigError` for a backend that torch.compile does not know. `None` is accepted.

    `stays_whole`: no parameter is freed between steps. A CUDA graph replays reads at the addresses of its recording,
    and parameters that are gathered again lie elsewhere.
    """
    if backend is None:
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(f"compile is {backend!r}, which torch.compile does not know. {nearest(backend, known)}")
    if backend == _RECORDS_ADDRESSES and not stays_whole:
        raise ConfigError(
            f"compile is {backend!r}, whose graphs read parameters where they lay when it recorded them, and this plan "
            f"gathers them anew for each use. Take compile='inductor', or a preset that keeps parameters whole: ddp, "
            f"zero1, zero2."
        )


class WrappedForward:
    """Replaces a module's `forward` and calls the original. A deep copy of the module gets the original forward."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.forward, memo)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of `module` without what a plan wraps around it."""
    forward: Callable[..., Any] = module.forward
    while isinstance(forward, WrappedForward):
        forward = forward.forward
    return forward


class CompiledUnits:
    """The compiled forwards of units that are modules below the root. `remove` puts the originals back.

    A site with another one inside is not compiled, for Dynamo would trace the hooks of that one, and with them gathers.
    If a module has parameters in a unit of their own, what is compiled is the part of it that has not.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], backend: str) -> None:
        self._backend = backend
        self._model = model
        self._units = units
        self._originals: dict[nn.Module, Callable[..., Any]] = {}
        self._are_installed = False

    def _compilable(self) -> list[nn.Module]:
        """Sites are known once a pass has been watched."""
        sites = dict.fromkeys(site for unit in self._units for site in unit.sites)
        return [
            site
            for site in sites
            if site is not self._model
            and any(True for _ in site.children())
            and not any(inner in sites for inner in site.modules() if inner is not site)
            and isinstance(site.__dict__.get("forward"), WrappedForward | None)
        ]

    def install(self) -> None:
        """Compile from the next call on. Idempotent."""
        if self._are_installed:
            return
        self._are_installed = True
        sites = self._compilable()
        if not sites:
            warnings.warn(
                f"compile: {self._backend} finds nothing to compile, because every unit is a single operation or has "
                f"other units inside. Say which blocks are units: units: {{class: Block}}.",
                UserWarning,
                stacklevel=2,
            )
        num_alike = Counter(_code_of(site) for site in sites)
        looked_at = set()
        for site in sites:
            code = _code_of(site)
            wrapper = site.__dict__.get("forward")
            holder = wrapper if isinstance(wrapper, WrappedForward) else site
            self._originals[site] = holder.forward
            holder.forward = _compiled(holder.forward, self._backend, num_alike[code])
            if num_alike[code] > 1 and code not in looked_at:
                looked_at.add(code)
                holder.forward = _looks_for_cache(site, holder, holder.forward, num_alike[code])

    def remove(self) -> None:
        if self._are_installed:
            for site, original in self._originals.items():
                wrapper = site.__dict__.get("forward")
                if isinstance(wrapper, WrappedForward):
                    wrapper.forward = original
                else:
                    site.__dict__.pop("forward", None)
            self._originals.clear()
        self._are_installed = False


def _code_of(site: nn.Module) -> object:
    """The key under which torch caches graphs: one for all sites of a class."""
    return getattr(type(site).forward, "__code__", type(site))


def _compiled(forward: Callable[..., Any], backend: str, num_alike: int) -> Callable[..., Any]:
    """`forward` compiled, with a recompile limit that allows a graph for each of the `num_alike` sites; see
    [Note: caches]."""
    limit = torch._dynamo.config.recompile_limit + num_alike
    has_option = "recompile_limit" in inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"recompile_limit": limit} if has_option else {}
    compiled: Any = torch.compile(forward, backend=backend, **options)
    if has_option:
        return compiled  # type: ignore[no-any-return]  # torch's own
    within: Any = torch._dynamo.config.patch(recompile_limit=limit)(compiled)
    within._torchdynamo_orig_callable = forward
    return within  # type: ignore[no-any-return]  # likewise


def _looks_for_cache(
    site: nn.Module, holder: nn.Module | WrappedForward, compiled: Callable[..., Any], num_alike: int
) -> Callable[..., Any]:
    """A forward that at its first call warns if an argument is a cache, then replaces itself with `compiled`."""

    def first_call(*args: Any, **kwargs: Any) -> Any:
        holder.forward = compiled
        for value in (*args, *kwargs.values()):
            if isinstance(value, loaded("transformers.cache_utils", "Cache") or ()):
                warnings.warn(
                    f"{type(site).__name__} is given a {type(value).__name__}, for which torch.compile makes a graph "
                    f"for each of {num_alike} blocks instead of one for all. The results are right. To train, call the "
                    f"model with use_cache=False, or set model.config.use_cache = False.",
                    UserWarning,
                    stacklevel=2,
                )
        return compiled(*args, **kwargs)

    first_call._torchdynamo_orig_callable = compiled  # type: ignore[attr-defined]  # marks the forward as compiled
    return first_call


_COMPILED_CALL = ("compile_wrapper", "torch._dynamo.eval_frame")
"""The function through which `torch.compile` calls its target. Outside of a graph torch tells nothing that it calls
whether it does (`torch.compiler.is_compiling()` is false there); if this is renamed, test_compile.py says so."""


_NOT_ONE_GRAPH = (
    "a part of a sharded model cannot be one graph, as torch.compile(..., fullgraph=True) wants it: parameters come "
    "and go at its units, and its first pass is watched operator by operator. Have each unit compiled by the plan: "
    "compile: inductor"
)


class OuterCompile:
    """Warns once that a `torch.compile` around the model, or around one of its units, has no effect."""

    def __init__(self, model: nn.Module, sites: Iterable[nn.Module]) -> None:
        self._has_warned = False
        self._num_checks = 2
        self._warn_untraced = torch.compiler.disable(self._warn, reason=_NOT_ONE_GRAPH)
        wraps = hasattr(model, "_orig_mod")  # torch.compile(model): the hooks of what is inside end each graph
        calls = [site._compiled_call_impl for site in (model, *sites)]
        if wraps or any(call is not None and not hasattr(call, "compiles_nothing") for call in calls):
            self._warn()

    def check_callers(self) -> None:
        """Called when the root is entered, the first two times; while operations are watched nothing is traced."""
        if self._num_checks > 0 and not self._has_warned:
            self._num_checks -= 1
            frame = sys._getframe()
            while (outer := frame.f_back) is not None:
                frame = outer
                if (frame.f_code.co_name, frame.f_globals.get("__name__")) == _COMPILED_CALL:
                    self._warn()
                    return

    def warn_of_tracing(self) -> None:
        """Called from a hook that Dynamo traces. Its flag is true in such a hook only, whatever other threads do. Where
        the graph must not end, torch's error gives the reason that is said here."""
        self._warn_untraced()

    @staticmethod
    def explain(error: BaseException) -> None:
        """Add to torch's error what to do, if a part of the model was to be one graph (`fullgraph=True`): in the first
        pass, whose operations are watched, torch compiles nothing, and says no more than that."""
        if "fullgraph=True" in str(error):
            error.add_note(f"{_NOT_ONE_GRAPH[0].upper()}{_NOT_ONE_GRAPH[1:]}.")

    def _warn(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            "torch.compile around a sharded model compiles next to nothing: parameters come and go at its units, and "
            "each of them ends the graph. The results are right. Call the plain model, and have each unit compiled by "
            "the plan: compile: inductor.",
            UserWarning,
            stacklevel=2,
        )
