"""Attention over split sequences in a rehearsal: with this rank's shapes, and without communication."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.comm import Group, Line
from shardwise.parallel.sequence import hugging_face
from shardwise.parallel.sequence.attention import Attention, Sample
from shardwise.parallel.sequence.refusals import check_model, is_ring
from shardwise.parallel.sequence.routing import Routing
from shardwise.parallel.sequence.token_layout import Layout
from shardwise.plan import Plan
from shardwise.plan.mesh import SEQUENCE_AXIS, Mesh
from shardwise.runtime.activations.recompute import Recomputing
from shardwise.system.telemetry import Ledger

Tensor = torch.Tensor
ROUTED = "routed"
"""What a ledger is told of a call of a function."""


class RehearsedAttention(Attention):
    """Sends nothing. It takes the sample's length from this rank's tokens, without padding or documents."""

    def __init__(self, line: Line, *, is_ring: bool) -> None:
        super().__init__(copy.deepcopy(line), is_ring=is_ring)

    def _sample_of(self, query: Tensor, key: Tensor, *, recomputed: bool) -> Sample:  # noqa: ARG002  # each is the same
        num_ranks = self.line.num_ranks
        return Sample(Layout(query.shape[-2] * num_ranks, num_ranks, is_zigzag=self.is_ring))


class RehearsedRouting(Routing):
    """Tells a ledger of each call that training routes. It looks at none: training does, or the forward before has."""

    def __torch_function__(self, *args: Any, **kwargs: Any) -> Any:
        self._attention.line.note_call(ROUTED)
        return super().__torch_function__(*args, **kwargs)


def rehearsed_by(
    model: nn.Module, plan: Plan, mesh: Mesh, ledger: Ledger | None
) -> Callable[[nn.Module], AbstractContextManager[None]]:
    """`rehearsed` for copies of `model`, as a plan splits its sequences; `ledger` counts what attention would send.
    Raises the same errors as sharding would."""
    check_model(model, plan)
    line = Line(None, Group(SEQUENCE_AXIS, mesh.group(0, SEQUENCE_AXIS), 0), ledger)
    num_cuts = math.prod(mesh.size(axis) for axis in mesh.same_params_axes)
    return partial(rehearsed, line=line, is_ring=is_ring(model, plan, line.num_ranks * num_cuts))


@contextmanager
def rehearsed(twin: nn.Module, line: Line, *, is_ring: bool) -> Iterator[None]:
    """A context in which attention of a copy `twin` is that of split sequences, also when recomputed in a backward."""
    attention = RehearsedAttention(line, is_ring=is_ring)
    outermost: list[object] = []
    inside = ExitStack()

    def enter(module: nn.Module, _: object) -> None:
        if not outermost:
            outermost.append(module)
            inside.enter_context(RehearsedRouting(attention, None))

    def leave(module: nn.Module, _: object, __: object) -> None:
        if outermost and outermost[0] is module:
            outermost.clear()
            inside.close()

    @contextmanager
    def recomputing() -> Iterator[None]:
        """A module is computed again, without its hooks."""
        outermost.append(recomputing)
        try:
            with RehearsedRouting(attention, None):
                yield
        finally:
            outermost.clear()

    with ExitStack() as hooks:
        hooks.callback(inside.close)
        hooks.callback(hugging_face.route(twin, attention))
        for module in twin.modules():
            hooks.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
            forward = module.__dict__.get("forward")
            if isinstance(forward, Recomputing):
                forward.around = recomputing
        yield
