"""Which results of modules later stages read, found before the first forward of each kind.

[Note: a survey] A stage knows what it has received only too late: those before it have sent by then. So all ranks first
run their stages once on fake tensors, one after the other, each given the layouts of the one before and stand-ins for
all that earlier modules have returned. Every operation is followed (`dependence.py`). What a stage reads of stand-ins,
in what its modules and the loss return or the next stage is called with, has to be carried to it: see [Note: results
that are carried]. A survey needs memory for the batch alone, and draws no random numbers. A model that cannot run on
fake tensors passes on the arguments of each stage's first module, and what was seen to be read until then, and is
refused if that is not enough.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from shardwise.comm import Exchange
from shardwise.errors import ModelError
from shardwise.memory import Unit
from shardwise.parallel.pipeline.stage_layout import Span, StageLayout
from shardwise.parallel.pipeline.stage_messages import Result, StageMessage, StageMessageLayout
from shardwise.parallel.pipeline.staged_model import Carried, Passing, StagedModel
from shardwise.plan.placement import Dtype
from shardwise.runtime.micro_batches import LossFunction, MicroBatch
from shardwise.runtime.nested import tensors_in
from shardwise.runtime.rehearsal import (
    Around,
    MixedSamples,
    NumbersUsed,
    RehearsedForwards,
    States,
    Twin,
    follow_backward,
    resized,
    runs_other_code,
    unlikely_size,
)

Shares = Sequence[tuple[int, Span]]
"""What runs one after the other: stages, or parts of one, with the numbers of their first and last modules."""


@dataclass(frozen=True)
class Found:
    """What one stage hands over, if it is not the last, and the results that it reads."""

    handed_over: StageMessageLayout | None
    wanted: frozenset[str]
    mixing: str = ""
    """The function by which it mixes samples, if that was asked for and one was seen."""
    why_unknown: str = ""
    """Why it was followed no further, if it was not."""

    def encoded(self) -> bytes:
        """As a message."""
        layout = None if self.handed_over is None else self.handed_over.encoded().decode()
        return json.dumps([layout, sorted(self.wanted), self.mixing, self.why_unknown]).encode()

    @classmethod
    def of_encoded(cls, message: bytes) -> Found:
        layout, wanted, mixing, why_unknown = json.loads(message)
        handed_over = None if layout is None else StageMessageLayout.of_encoded(layout.encode())
        return cls(handed_over, frozenset(wanted), mixing, why_unknown)


@dataclass(frozen=True)
class Surveyor:
    """Surveys the stages of one rank. `units` are those of its parameters, and `around` is entered with the model's
    copy while that computes."""

    staged: StagedModel
    units: Sequence[Unit]
    device: torch.device
    compute: Dtype
    around: Around
    exchange: Exchange

    def survey(
        self,
        part: MicroBatch,
        loss_fn: LossFunction | None,
        shares: Shares,
        called: nn.Module,
        *,
        is_whole: bool,
        num_samples: int | None = None,
    ) -> Carried:
        """The results that later stages read in a forward of `called` on `part`. All ranks of the pipeline call.

        `is_whole`: all that the model returns is wanted, and not its loss alone. With `num_samples`, those of `part`,
        it is also found out whether a share before the last one mixes them, or hands over what is not by samples.
        """
        messages: list[StageMessageLayout | None] = []

        @cache
        def own_stages() -> _OwnStages:
            return _OwnStages(self, part, loss_fn, called, is_whole=is_whole, num_samples=num_samples)

        def find(stage: int, span: Span, arrived: StageMessageLayout | None, *, of_fewer: bool = False) -> Found:
            messages.append(arrived)
            if stage not in self.staged.stages:
                return Found.of_encoded(self.exchange(b"{}")[self.staged.layout.pp_rank_of(stage)])
            try:
                found = own_stages().found(stage, span, arrived, of_fewer=of_fewer)
            except ModelError as error:  # it cannot be copied
                found = Found(None, frozenset(), why_unknown=str(error))
            self.exchange(found.encoded())
            return found

        known = carried(self.staged.layout, shares, find)
        last = messages[-1]
        if num_samples is None or known.why_unknown or last is None:
            return known
        odd = next((one.shape for one in last.tensors if one.shape[:1] != (num_samples,)), None)
        if odd is not None:
            return replace(
                known, mixing=f"what {num_samples} of them become begins with another dimension: {list(odd)}"
            )
        if known.mixing:
            return known
        of_fewer = carried(self.staged.layout, shares, partial(find, of_fewer=True))
        return replace(known, mixing=of_fewer.mixing, why_unknown=of_fewer.why_unknown)


class _OwnStages:
    """Surveys what a call runs on this rank, all of it on one copy of the model."""

    def __init__(
        self,
        surveyor: Surveyor,
        part: MicroBatch,
        loss_fn: LossFunction | None,
        called: nn.Module,
        *,
        is_whole: bool,
        num_samples: int | None,
    ) -> None:
        self._surveyor = surveyor
        self._part = part
        self._loss_fn = loss_fn
        self._called = called
        self._is_whole = is_whole
        self._num_samples = num_samples
        self._trains = num_samples is not None and torch.is_grad_enabled()
        self._used: dict[Span, NumbersUsed] = {}
        self._hooked: set[Span] = set()
        """What has registered hooks on what it has computed."""
        own, given = surveyor.staged, replace(part, args=(part.args, part.target))
        with _unanswered(own):
            self._forwards = RehearsedForwards(
                own.model, surveyor.units, given, device=surveyor.device, compute=surveyor.compute
            )
            self._forwards.rehearse(lambda twin, *_: twin.copied(own).attach())

    def found(self, stage: int, span: Span, arrived: StageMessageLayout | None, *, of_fewer: bool) -> Found:
        """What a forward of one stage on fake tensors hands over and reads, as far as it can be followed: a loss may
        match what was predicted with what is right by its values, after all modules have run. `of_fewer`: the numbers
        with which it computes for fewer samples are compared with those of the forward before."""
        wanted: set[str] = set()
        layouts: list[StageMessageLayout] = []
        mixing: list[str] = []

        def run(twin: Twin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            num, message = self._num_samples, None if arrived is None else empty(arrived, self._surveyor.device)
            if num is None:
                layouts.extend(self._forward(stage, span, twin, args, kwargs, message, wanted))
                return
            states, mixed, count = States(twin.model), MixedSamples(num), num
            if of_fewer:
                count = unlikely_size((self._part.args, self._part.kwargs), fewer=True)
                args, kwargs = resized((args, kwargs), 0, num, count)
            used = NumbersUsed(count, also_of_sums=True)
            used.given([*tensors_in((args, kwargs)), *twin.resting])
            with used, nullcontext() if of_fewer else mixed:
                layouts.extend(self._forward(stage, span, twin, args, kwargs, message, wanted, mixed))
            before = self._used.setdefault(span, used)
            name = before.difference(used)
            of_number = f"{name} with a number that depends on how many there are" if name else ""
            mixing.append(of_number if of_fewer else mixed.found or states.changed() or used.numbering)

        try:
            self._forwards.rehearse(run)
        except ModelError as error:
            return Found(None, frozenset(wanted), why_unknown=str(error))
        return Found(layouts[0] if layouts else None, frozenset(wanted), "".join(mixing))

    def _forward(
        self,
        stage: int,
        span: Span,
        twin: Twin,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        message: StageMessage | None,
        wanted: set[str],
        mixed: MixedSamples | None = None,
    ) -> list[StageMessageLayout]:
        """A forward of one stage on fake tensors, and a backward if it would run Python code of the model's: the layout
        of what it hands over, if it is not the last."""
        surveyor = self._surveyor
        staged: StagedModel = twin.copied(surveyor.staged)
        model, passing = twin.copied(self._called), Passing(wanted=wanted)
        given, target = args
        is_last = surveyor.staged.ends(self._called, span[1])
        copied = replace(self._part, args=given, kwargs=kwargs, target=target, weighing=None, compute=None)
        with torch.set_grad_enabled(self._trains), surveyor.around(twin.model):
            with (
                staged.catching(model),
                staged.running(stage, message, is_watched=True, called=model, span=span, passing=passing),
            ):
                takes_loss = is_last and not self._is_whole
                output = copied.loss_by(model, self._loss_fn) if takes_loss else model(*given, **kwargs)
                staged.require_own(output)
                layouts = [] if is_last else [staged.handed_over]
            outputs = [one for one in output if one.requires_grad] if layouts else []
            if mixed is None or not outputs:
                return layouts
            if mixed.has_hooks:
                self._hooked.add(span)
            if span in self._hooked or runs_other_code(outputs):
                with staged.running(stage, message, is_backward=True, span=span), mixed.given_back():
                    arrivals = [] if message is None else message.tensors
                    follow_backward(outputs, [*twin.model.parameters(), *arrivals])
        return layouts


def carried(
    layout: StageLayout, shares: Shares, find: Callable[[int, Span, StageMessageLayout | None], Found]
) -> Carried:
    """The results that some of `shares` read; `find` surveys one, given what the one before has handed over."""
    numbers = {name: number for number, name in enumerate(layout.pieces)}
    readers: dict[Result, tuple[int, int]] = {}
    arrived: StageMessageLayout | None = None
    mixing = ""
    for place, (stage, span) in enumerate(shares):
        found = find(stage, span, arrived)
        arrived = found.handed_over
        for result in sorted(filter(None, map(Result.of, found.wanted))):
            readers[result] = numbers[result.module], span[0]
        if found.why_unknown:
            return Carried(readers, found.why_unknown)
        if found.mixing and not mixing and place + 1 < len(shares):
            mixing = f"{found.mixing} in stage {stage} ({', '.join(layout.pieces[span[0] : span[1] + 1])})"
    return Carried(readers, mixing=mixing)


def empty(layout: StageMessageLayout, device: torch.device) -> StageMessage:
    """A message of this layout whose tensors have no values."""
    tensors = [torch.empty(one.shape, dtype=one.dtype, device=device) for one in layout.tensors]
    return StageMessage(tensors, layout).expecting_gradients()


@contextmanager
def _unanswered(staged: StagedModel) -> Iterator[None]:
    """A context in which what answers calls of the model, and leads to all that trains it, is not copied with it."""
    answer, staged.answer = staged.answer, None
    try:
        yield
    finally:
        staged.answer = answer
