"""Outer steps: what islands have trained apart is brought together. See [Note: islands] in `program/outer_step.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from shardwise.comm import Communicator, Group, Work
from shardwise.memory import Flat, torch_dtype
from shardwise.plan import Islands, OuterOptimizer
from shardwise.plan.placement import SumOfCodes
from shardwise.program import Action, UnitSpec
from shardwise.program.outer_step import OuterStep, build_outer
from shardwise.runtime.codec import EncodedAllReduce, codec_for
from shardwise.runtime.executor import BoundBlock, Executor
from shardwise.runtime.reduction import staging_bytes

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Bound:
    """An outer step as the calls that it makes."""

    step: OuterStep
    begin: BoundBlock
    settle: BoundBlock
    end: BoundBlock


class OuterSteps:
    """Runs the outer steps of one model. All ranks call every method, after the same optimizer steps."""

    def __init__(
        self,
        settings: Islands,
        specs: Sequence[UnitSpec],
        flats: Sequence[Flat],
        executor: Executor,
        collectives: Communicator,
        groups: Mapping[str, Group],
        writing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Inside `writing()` parameters may be written where they rest."""
        gradients = {flat.name: _OuterGradient(flat, collectives, groups) for flat in flats if flat.anchor is not None}
        executor.provide("outer", lambda action: gradients[action.flat].move(action))
        executor.provide("anchor", lambda action: gradients[action.flat].update_anchor(settings.optimizer))
        executor.provide_verb("mix", lambda action: gradients[action.flat].mix(settings.mix))
        self._writing = writing
        self._steps = [_Bound(step, *executor.bind(step.program)) for step in build_outer(specs)]
        self._on_its_way: _Bound | None = None
        """The outer step whose gradients are being sent, and not yet part of the anchor."""
        self.pending: int | None = None
        """The number of the fragment whose outer step has begun, and has not yet taken effect."""

    def after_step(self, num_steps: int) -> None:
        """Begin and end what is due after this many steps."""
        for bound in self._steps:
            fragment = bound.step.fragment
            if fragment.ends > fragment.begins and fragment.ends_after(num_steps):
                self._end(bound)
            if fragment.begins_after(num_steps):
                self._begin(bound)
                if fragment.ends == fragment.begins:
                    self._end(bound)

    def is_due_after(self, num_steps: int) -> bool:
        """Whether `after_step` would do anything."""
        every = (bound.step.fragment for bound in self._steps)
        return any(one.begins_after(num_steps) or one.ends_after(num_steps) for one in every)

    def _begin(self, bound: _Bound) -> None:
        self._on_its_way, self.pending = bound, bound.step.fragment.number
        bound.begin.run()

    def _end(self, bound: _Bound) -> None:
        if self.pending != bound.step.fragment.number:
            return  # resumed between its beginning and its end, from a checkpoint of another plan
        self.settle()
        self.pending = None
        with self._writing():
            bound.end.run()

    def settle(self) -> None:
        """Make outer gradients that are on their way part of the anchor, so that no more is left of them to save.

        It makes no difference whether that is done early: islands take it over when they would have.
        """
        if self._on_its_way is not None:
            bound, self._on_its_way = self._on_its_way, None
            bound.settle.run()


class _OuterGradient:
    """The outer gradient of one flat buffer, while there is one."""

    def __init__(self, flat: Flat, collectives: Communicator, groups: Mapping[str, Group]) -> None:
        assert flat.spec.table.outer is not None
        self._flat = flat
        self._collectives = collectives
        self._groups = groups
        codes = flat.spec.table.outer.codes
        self._wire = torch_dtype(flat.spec.table.outer.wire.dtype)
        self._codec = codec_for(codes, flat.device) if codes is not None else None
        self._num_islands = flat.spec.mesh.num_islands
        self._value: Tensor | None = None
        self._work: Work | None = None
        self._staging_bytes = 0

    def move(self, action: Action) -> None:
        """`subtract`, `all_reduce` or `wait`."""
        {"subtract": self._subtract, "all_reduce": self._all_reduce, "wait": self._wait}[action.verb](action)

    def _subtract(self, _: Action) -> None:
        """The anchor minus the island's master weights, on the device."""
        flat, master = self._flat, self._flat.require_master()
        flat.land()
        assert flat.anchor is not None
        self._value = flat.anchor.to(flat.device, copy=True)
        self._value.sub_(master.detach().to(flat.device))
        flat.meter.hold("working", self._value.nbytes)

    def _all_reduce(self, action: Action) -> None:
        """Start the sum over islands, each of which counts equally."""
        value, group = self._require(), self._groups[action.over]
        if self._codec is not None and action.codes:
            way, name = SumOfCodes.parse(action.verb, action.codes), self._flat.name
            self._work = EncodedAllReduce(self._codec, way, self._collectives, value, value, group, name)
        else:
            self._work = self._collectives.all_reduce(value, value, group, self._wire, self._flat.name)
        self._staging_bytes = staging_bytes(action, value, len(group.ranks), self._wire)
        self._flat.meter.hold("working", self._staging_bytes)

    def _wait(self, _: Action) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._flat.meter.drop("working", self._staging_bytes)

    def update_anchor(self, by: OuterOptimizer) -> None:
        """A step of SGD as `torch.optim.SGD` computes it, where the anchor is."""
        flat = self._flat
        assert flat.anchor is not None
        gradient = self._require().div_(self._num_islands).to(flat.anchor.device)
        if flat.momentum is not None:
            flat.momentum.mul_(by.momentum).add_(gradient)
            gradient = gradient.add_(flat.momentum, alpha=by.momentum) if by.nesterov else flat.momentum
        flat.anchor.add_(gradient, alpha=-by.lr)
        self._drop()

    def mix(self, own: float) -> None:
        """Replace master weights by the anchor, and keep a share of `own`."""
        flat = self._flat
        flat.land()
        flat.reading.land()
        master, anchor = flat.require_master().detach(), flat.anchor
        assert anchor is not None
        if own:
            master.lerp_(anchor.to(master.device), 1 - own)
        else:
            master.copy_(anchor)

    def _require(self) -> Tensor:
        assert self._value is not None, "an outer gradient is subtracted before it is sent"
        return self._value

    def _drop(self) -> None:
        self._flat.meter.drop("working", self._require().nbytes)
        self._value = None
