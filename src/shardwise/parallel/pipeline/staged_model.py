"""A model of which this rank has some stages: its own forward, from the beginning of a stage to its end.

[Note: a forward cut short] The model's own forward runs on every rank, so that everything else that it computes from a
batch (masks, positions, rotary angles) is available. `PlaceholderModule` modules replace those of other stages. The
ones before the stage return stand-ins for what they have returned on their own stage; results computed from them are
discarded, because modules of the stage are called with the received tensors whatever the forward passes to them. What
the stage returns must not depend on stand-ins (see [Note: stand-ins]): results that it reads in another way, say
through a skip connection, are received as such (see [Note: results that are carried]). The first module after the stage
is not called: its arguments are the stage's output, and the forward ends there with an `EndOfForward` exception.

Calling blocks one after the other instead would need code for each model that computes something beside its blocks.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from traceback import walk_tb
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelError, StateError
from shardwise.parallel.pipeline.placeholder_modules import (
    BatchNormElsewhere,
    PlaceholderModule,
    asked_for_parameters,
    refuse_states,
)
from shardwise.parallel.pipeline.placeholder_values import Placeholders, TensorFacts
from shardwise.parallel.pipeline.stage_layout import Span, StageLayout, params_between, refuse_sums_over_layers
from shardwise.parallel.pipeline.stage_messages import (
    DTYPES,
    Layout,
    Result,
    StageMessage,
    StageMessageLayout,
    are_leaves,
    argument_leaves,
    described,
    numbered,
)
from shardwise.parallel.pipeline.whole_model import WholeNames, holders_of
from shardwise.plan.placement import Box
from shardwise.program import UnitSpec
from shardwise.runtime import EndOfForward, tensors_in
from shardwise.system.own_hooks import hook
from shardwise.system.torch_private import CALL_CODE
from shardwise.system.whose_code import whose_class

Tensor = torch.Tensor
_log = logging.getLogger("shardwise")
Forward = Callable[..., Any]
Answer = Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any]
_CALL = "_compiled_call_impl"
"""What torch's `Module.__call__` calls in the place of forward and hooks, if it is there."""
PLAIN_LOOP = (
    "This engine's plan splits the model into pipeline stages, of which each rank has its own. Call the whole model as "
    "model(batch) or engine(batch), on all ranks of the pipeline, and not its forward or parts of it. In a job that "
    "goes on when ranks are lost, use engine.train_step(batch), engine.forward_backward(batch) or "
    "engine.eval_step(batch), or call it inside engine.inference()."
)


class _Adapters(Protocol):
    """Saves adapters of the peft library, of all stages."""

    def attach(self, model: nn.Module) -> None: ...

    def detach(self, model: nn.Module) -> None: ...


@dataclass(frozen=True)
class Carried:
    """The results that later stages read: for each the number of the module that returns it, and of the first module
    of the last stage that reads it. `why_unknown`: the survey that finds them was impossible. `mixing`: see
    `Found.mixing`."""

    readers: Mapping[Result, tuple[int, int]] = field(default_factory=dict)
    why_unknown: str = ""
    mixing: str = field(default="", compare=False)

    def past(self, last: int) -> list[Result]:
        """Those that what ends with module `last` passes on."""
        return [result for result, (made, read) in self.readers.items() if made <= last < read]


NOTHING = Carried()


@dataclass
class Surveys:
    """What surveys have found (see [Note: a survey] in `survey.py`), by kind of forward, in the order in which all
    ranks of a pipeline have made them."""

    carried: dict[Hashable, Carried] = field(default_factory=dict)
    mixing: dict[Hashable, str] = field(default_factory=dict)
    """By kind of call, how it mixes samples."""

    def agree(self, exchange: Callable[[bytes], list[bytes]]) -> None:
        """Forget what not all ranks of the pipeline know: some may have been interrupted in a survey, and one that has
        joined them has made none. All of them call."""
        own: list[dict[Hashable, Any]] = [self.carried, self.mixing]
        known = [json.loads(one) for one in exchange(json.dumps(list(map(len, own))).encode())]
        for found, *numbers in zip(own, *known, strict=True):
            for form in list(found)[min(numbers) :]:
                del found[form]


@dataclass(frozen=True)
class Passing:
    """What a stage passes on."""

    sends: tuple[int, ...] | None = None
    """The arguments of the next stage (see `StageMessageLayout`), if a watched forward has found them out."""
    sends_others: bool = False
    """Whether a forward that calls the next stage with another number of tensors than the watched one passes on all of
    them. Otherwise it is refused."""
    carried: Carried = NOTHING
    wanted: set[str] | None = None
    """In a survey: receives the names of the results of earlier stages that this one reads."""
    known: StageMessageLayout | None = None
    """What the next stage has been told of what it gets, and of what modules have returned, if that is always so."""
    varies: bool = False
    """Whether a watched forward has found that it is not."""


@dataclass
class _Running:
    """The stage that is running: the numbers of its first and last module, and what it received."""

    called: nn.Module
    """The module whose forward is cut short: the model, or one in it that has all stages."""
    stage: int
    first: int
    last: int
    arrived: StageMessage | None
    has_received: bool
    """Whether there are tensors in what it received."""
    stand_ins: Placeholders
    passing: Passing = Passing()
    notes_returns: bool = True
    """Whether anybody asks what the stage's modules have returned."""
    is_backward: bool = False
    """Whether modules are called only to recompute what they have saved."""
    unwinds: bool = False
    """Whether the end of the stage also ends the code that has called the model."""
    is_called: bool = False
    is_entered: bool = False
    """Whether one of its modules has been called. If the forward calls none, as that of an encoder-decoder model that
    is given the encoder's states, and there are no gradients, the next stage begins it."""
    is_in_forward: bool = False
    """Whether the model's own forward runs, rather than its loss, or a recomputation of some modules in a backward."""
    returned: dict[str, list[Any]] = field(default_factory=dict)
    """Descriptions of what this stage's modules have returned, by name and call."""
    results: dict[Result, tuple[Tensor, int]] = field(default_factory=dict)
    """Those that are carried on, with their versions."""
    handed_over: StageMessageLayout | None = None


@dataclass(frozen=True)
class _Slot:
    """Where a module is registered: `holder[key]`. `own` is the module itself if it belongs to this rank, `other` if it
    belongs to another one and can be put back."""

    name: str
    holder: dict[str, nn.Module | None]
    key: str
    own: nn.Module | None
    other: nn.Module | None
    absent: PlaceholderModule

    def __deepcopy__(self, memo: dict[int, Any]) -> _Slot:
        """In a copy for a rehearsal nobody puts others back. Their buffers have values, which are not to be copied."""
        holder, own, absent = copy.deepcopy((self.holder, self.own, self.absent), memo)
        return replace(self, holder=holder, own=own, other=None, absent=absent)


_OF_WHOLE_MODEL = ("layout", "_names", "whole", "holders", "group_names", "surveys", "_whole_groups")
"""Of a `StagedModel`: what it knows of all stages."""


class StagedModel:
    """Removes the modules of other ranks' stages from `model` when it is constructed.

    `sequence_parts`: by stage, into how many parts the sequence that it receives is split, if it is. With
    `keeps_others` the removed modules are kept, so that `undo` can put them back; `free_others` frees their memory.
    """

    refers_only = True
    """For `tensors_in`, which a rehearsal asks of every module: each that stands for another stage's refers to this,
    with all parameters of the rank and the names of the whole model, which took most of a rehearsal's time."""

    def __init__(
        self,
        model: nn.Module,
        layout: StageLayout,
        pp_rank: int,
        sequence_parts: Mapping[int, int] | None,
        *,
        keeps_others: bool = False,
    ) -> None:
        self._tells_of_parts = False
        self.model = model
        self._keeps_others = keeps_others
        self._sequence_parts = dict(sequence_parts or {})
        self.layout = layout
        self.stages = layout.at(pp_rank)
        self._names = layout.pieces
        self._running_stage: _Running | None = None
        own = {name for stage in self.stages for name in layout.stages[stage]}
        modules = dict(model.named_modules(remove_duplicate=False))
        self.params = layout.params_at(model, pp_rank)
        """The parameters of this rank's stages."""
        self.between = params_between(modules, self._names)
        """The parameters that every stage has, whether or not it uses them, by name."""
        self.whole = WholeNames.of(model)
        self._adapters: _Adapters | None = None
        if hasattr(model, "peft_config"):
            from shardwise.parallel.pipeline.saved_adapters import AdaptersOfAllStages  # few models load it

            self._adapters = AdaptersOfAllStages(model)
        self.pp_rank = pp_rank
        self.holders = holders_of(model, layout)
        """The pipeline ranks that have each parameter, by its first name: several if stages share it."""
        self.surveys = Surveys()
        """Of these stages, whichever world they are in: where ranks are lost beside them, others would find the same
        again, in the time of a forward through all stages."""
        self.group_names: list[list[str]] = []
        """The names of the parameters in each optimizer group before other stages' parameters were removed."""
        self._name_of = {param: name for name, param in model.named_parameters()}
        self._whole_groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        """The optimizers' groups with all their parameters, if other stages can be put back."""
        self._slots = [self._placed(model, number, name, modules, own) for number, name in enumerate(self._names)]
        self._firsts = {stage: self._names.index(layout.stages[stage][0]) for stage in self.stages}
        self._lasts = {stage: self._names.index(layout.stages[stage][-1]) for stage in self.stages}
        for one in self._slots:
            if one.own is None:
                one.holder[one.key] = one.absent
        self._refusals = refuse_states(model)
        self._dtypes = {param.dtype: param for param in model.parameters()}
        """An own parameter by its dtype, which may change."""
        self.answer: Answer | None = None
        """Answers calls of a module with all stages while no stage is running, given its forward; without it they are
        refused."""
        self.gathers_in_calls = False
        """Whether parameters, of any rank, are whole only in calls that are answered."""
        self.wholes = [one for name, one in model.named_modules() if _has_all(name, self._names)]
        """The model and the modules in it that have all stages, such as those that peft wraps, from outside inwards."""
        self.extents = {**_parts_of(model, self._names, layout.guests), **dict.fromkeys(self.wholes, layout.span)}
        """What answers calls, with the numbers of its first and last module in the stages: these, and inside
        `engine.inference()` others, such as an encoder or a head."""
        self._first_here: dict[nn.Module, int] = {}
        self._handles: list[RemovableHandle] = []
        self._forwards = [one.forward for one in self.wholes]
        self._tells_of_parts = True
        if not any(map(_has_batch_norm, self.own_modules())):
            for one in self._slots:
                if _has_batch_norm(modules[one.name]):
                    one.absent.add_module("batch_norm", BatchNormElsewhere())

    def __deepcopy__(self, memo: dict[int, Any]) -> StagedModel:
        """For a rehearsal, which puts no other stages back: to copy the parameters that wait for that in an elastic
        job, and the names of the whole model, took longer than to copy the stages."""
        copied = memo[id(self)] = object.__new__(type(self))
        for name, value in vars(self).items():
            vars(copied)[name] = value if name in _OF_WHOLE_MODEL else copy.deepcopy(value, memo)
        return copied

    def _placed(self, model: nn.Module, number: int, name: str, modules: dict[str, nn.Module], own: set[str]) -> _Slot:
        above, _, key = name.rpartition(".")
        holder = modules[above]._modules if above else model._modules
        if name in self.layout.guests:  # the module that contains it, or what stands for that, has it
            holder = {}
        module = modules[name]
        is_own = name in own
        guests = own & self.layout.guests.keys()
        absent = PlaceholderModule(name, number, module, self, set() if is_own else self.params, guests)
        kept = module if self._keeps_others and not is_own else None
        return _Slot(name, holder, key, module if is_own else None, kept, absent)

    @contextmanager
    def receiving_whole_sequences(self) -> Iterator[None]:
        """Inside, stages receive whole sequences, also where training gives them parts."""
        parts, self._sequence_parts = self._sequence_parts, {}
        try:
            yield
        finally:
            self._sequence_parts = parts

    def own_modules(self) -> list[nn.Module]:
        """The modules of this rank's stages."""
        return [one.own for one in self._slots if one.own is not None]

    def modules_of(self, stage: int) -> list[nn.Module]:
        """The modules of one of this rank's stages."""
        first, last = self._firsts[stage], self._lasts[stage]
        return [one.own for one in self._slots[first : last + 1] if one.own is not None]

    def span_of(self, stage: int) -> Span:
        """The modules of one of this rank's stages."""
        return self._firsts[stage], self._lasts[stage]

    def names_of_called(self) -> dict[nn.Module, str]:
        """What answers calls, in words."""
        names = {module: name for name, module in self.model.named_modules()}
        return {one: f"the {type(one).__name__}" if one in self.wholes else names[one] for one in self.extents}

    def shares_here(self, called: nn.Module) -> list[tuple[int, Span]]:
        """What a call of `called` runs of this rank's stages."""
        return [share for share in self.layout.shares(self.extents[called]) if share[0] in self.stages]

    def first_here(self, called: nn.Module) -> int:
        """The number of the first module of this rank's stages that a call of `called` runs."""
        if called not in self._first_here:
            _, (self._first_here[called], _) = self.shares_here(called)[0]
        return self._first_here[called]

    def ends(self, called: nn.Module, last: int) -> bool:
        """Whether what ends with module `last` ends a call of `called`."""
        return last == self.extents[called][1]

    def spans_of_last(self) -> tuple[Span | None, Span]:
        """The last stage in two: see `StageLayout.spans_of`."""
        return self.layout.spans_of(self.layout.num_stages - 1)

    def named_modules_of(self, stage: int) -> dict[str, nn.Module]:
        """As `modules_of`, with their names in the model."""
        return dict(zip(self.layout.stages[stage], self.modules_of(stage), strict=True))

    def params_of(self, stage: int) -> set[Tensor]:
        """The parameters that one of this rank's stages uses."""
        own = {param for one in self.modules_of(stage) for param in one.parameters()}
        return own.union(self.between.values())

    def by_stage(self, units: Sequence[tuple[UnitSpec, Sequence[nn.Parameter]]]) -> dict[int, list[UnitSpec]]:
        """The `units` that each of this rank's stages uses. Each unit comes with its parameters."""
        own = {stage: self.params_of(stage) for stage in self.stages}
        return {
            stage: [unit for unit, held in units if any(param in params for param in held)]
            for stage, params in own.items()
        }

    def is_first_with(self, name: str) -> bool:
        """Whether no lower pipeline rank has this parameter or buffer."""
        if name in self.holders:
            return self.holders[name][0] == self.pp_rank
        is_in_stage = any(name.startswith(f"{piece}.") for piece in self._names)
        return is_in_stage or self.pp_rank == 0

    def boxes(self, within: Mapping[nn.Parameter, Box]) -> dict[nn.Parameter, Box]:
        """This rank's boxes of its parameters: see `stage_boxes`."""
        return stage_boxes(dict(self.model.named_parameters()), self.holders, self.pp_rank, within)

    def take_from(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Remove the parameters of other ranks' stages from the optimizers; groups stay, even if they are empty."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if self._keeps_others:
                    self._whole_groups.append((group, list(group["params"])))
                self.group_names.append([self._name_of[param] for param in group["params"] if param in self._name_of])
                for param in group["params"]:
                    if param not in self.params:
                        optimizer.state.pop(param, None)
                group["params"] = [param for param in group["params"] if param in self.params]
        self._name_of.clear()

    def attach(self) -> None:
        """Replace the forward of the model and of others with all stages. Call it after other hooks are registered, so
        that they see the received activation.

        It also works on a copy of this object and the model, which has none of our hooks.
        """
        self._stop_taking()  # a LightningModule is copied with all its attributes
        for module, original in zip(self.wholes, self._forwards, strict=True):
            module.__dict__["forward"] = self._answering(module, original)
        if self._adapters is not None:
            self._adapters.attach(self.model)
        for one in self._slots:
            if one.own is not None:
                number = self._number(one)
                self._handles += [
                    one.own.register_forward_pre_hook(hook(self._take, number), prepend=True, with_kwargs=True),
                    one.own.register_forward_hook(hook(self._returned, number)),
                ]

    def take_calls(self, take: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Until `release`, `take(called, args, kwargs)` answers calls of the model, or of one in it that has all
        stages, outside of `engine.inference()`, before any hook of theirs: what it calls in turn has them."""
        for module in self.wholes:
            if module is self.model or module._compiled_call_impl is None:
                module.__dict__[_CALL] = self._taking(module, take)

    def _taking(self, module: nn.Module, take: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._running_stage is None and self.answer is None:
                return take(module, args, kwargs)
            return module._call_impl(*args, **kwargs)

        call.compiles_nothing = True  # type: ignore[attr-defined]  # what OuterCompile asks
        return call

    @contextmanager
    def catching(self, *modules: nn.Module) -> Iterator[None]:
        """A context in which calls of `modules` are calls of stages, also of those that have only some. Hooks of theirs
        run in the stages."""
        caught = [one for one in modules if one not in self.wholes and not isinstance(one, PlaceholderModule)]
        before = [module.__dict__.get(_CALL) for module in caught]
        for module, compiled in zip(caught, before, strict=True):
            module.__dict__[_CALL] = self._answering(module, compiled or module._call_impl)
        try:
            yield
        finally:
            for module, compiled in zip(caught, before, strict=True):
                if compiled is None:
                    del module.__dict__[_CALL]
                else:
                    module.__dict__[_CALL] = compiled

    def _answering(self, module: nn.Module, original: Forward) -> Forward:
        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(module, original, args, kwargs)

        return forward

    def release(self) -> None:
        """Restore the forwards. Modules of other stages stay absent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self.wholes:
            module.__dict__.pop("forward", None)
        self._stop_taking()

    def _stop_taking(self) -> None:
        for module in self.wholes:
            if hasattr(module._compiled_call_impl, "compiles_nothing"):
                module.__dict__.pop(_CALL)

    def free_others(self, device: torch.device) -> None:
        """Give kept parameters of other stages one zero on `device` in place of their values, and kept buffers memory
        there if they have none yet."""
        for module in (inner for one in self._slots if one.other is not None for inner in one.other.modules()):
            for param in module._parameters.values():
                if param is not None and param not in self.params:
                    param.data = torch.zeros((), dtype=param.dtype, device=device).expand(param.shape)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.untyped_storage().nbytes() < buffer.nbytes:
                    module._buffers[name] = torch.empty_like(buffer, device=device)

    def undo(self) -> None:
        """Put the modules of other stages back, and their parameters into the optimizers' groups: shapes without
        values. For a model that was made with `keeps_others`, after `release`."""
        assert self._keeps_others
        for one in self._slots:
            one.holder[one.key] = one.own if one.own is not None else one.other
        for refusal in self._refusals:
            refusal.remove()
        if self._adapters is not None:
            self._adapters.detach(self.model)
        for group, params in self._whole_groups:
            group["params"] = params

    # -- running one stage ------------------------------------------------------------------------------

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of the model, or its loss, is being computed."""
        return self._running_stage is not None and not self._running_stage.is_backward

    @property
    def ends_here(self) -> bool:
        """Whether what runs ends with the last module of what is called, so that its output is that of the call."""
        return self._running_stage is not None and self.ends(self._running_stage.called, self._running_stage.last)

    @property
    def handed_over(self) -> StageMessageLayout:
        """The layout of what the running stage, which is not the last, has passed on."""
        assert self._running_stage is not None
        assert self._running_stage.handed_over is not None
        return self._running_stage.handed_over

    @contextmanager
    def running(
        self,
        stage: int,
        arrived: StageMessage | None,
        *,
        is_watched: bool = False,
        passing: Passing = Passing(),  # it is frozen
        is_backward: bool = False,
        called: nn.Module | None = None,
        span: Span | None = None,
        remaking: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Iterator[None]:
        """A context in which forwards of the model, or of `called`, and recomputations of them in a backward, run
        `stage`, or only the modules `span` of it. If it is watched, what follows may ask `require_own`; `remaking`: see
        `Placeholders`."""
        first, last = self.span_of(stage) if span is None else span
        parts = self._sequence_parts.get(stage, 1) if first == self._firsts[stage] else 1  # the last block joins them
        why = passing.carried.why_unknown
        param = next(iter(self._dtypes.values()), None)
        device = None if param is None else param.device
        stand_ins = Placeholders(stage, self._names, first, arrived, device, parts, why)
        called = self.model if called is None else called  # a module may have a length, of zero too
        is_asked = passing.known is None and last + 1 < len(self._names)
        notes_returns = is_asked or is_watched or bool(passing.carried.readers) or passing.wanted is not None
        has_received = arrived is not None and bool(arrived.tensors)
        stand_ins.remaking = remaking
        now = _Running(
            called, stage, first, last, arrived, has_received, stand_ins, passing, notes_returns, is_backward
        )
        others = [one for one in self._slots[:first] + self._slots[last + 1 :] if one.own is not None]
        for one in others:
            one.holder[one.key] = one.absent
        hooked = self._slots if others and not is_backward else ()
        self._running_stage = now
        try:
            if others or is_watched:
                with _same_hooks(hooked), stand_ins.watched() if is_watched else nullcontext():
                    yield
            else:
                yield
        finally:
            self._running_stage = None
            for one in others:
                one.holder[one.key] = one.own

    def until_handed_over(self, work: Callable[[], object]) -> tuple[Tensor, ...]:
        """What the running stage, which is not the last, passes on when `work` calls the model, which ends `work`."""
        assert self._running_stage is not None
        self._running_stage.unwinds = True
        try:
            work()
        except EndOfForward as end:
            return end.output
        finally:
            self._running_stage.unwinds = False
        raise ModelError(
            f"compute_loss has returned on a rank without the last pipeline stage: it has not called the "
            f"{type(self.model).__name__}, or has caught the exception that ends it there. Let it call the model once."
        )

    def require_own(self, output: object) -> None:
        """In a watched forward: raise `ModelError` if `output`, or a buffer, depends on what earlier stages computed,
        other than through the received tensors."""
        now = self._running_stage
        assert now is not None
        if now.passing.wanted is not None:
            now.passing.wanted.update(now.stand_ins.foreign_in(list(tensors_in(output))))
            return
        now.stand_ins.require_none(list(tensors_in(output)), "uses")
        for name, buffer in self.model.named_buffers():
            now.stand_ins.require_none(buffer, f"changes the buffer {name} by")

    def stand_in_for(self, facts: TensorFacts) -> Tensor:
        """A stand-in for a parameter or buffer of another stage, of the dtype and on the device that own ones have."""
        assert self._running_stage is not None
        like = self._dtypes.get(facts.dtype)
        device = next((param.device for param in self._dtypes.values()), facts.device)
        dtype = facts.dtype if like is None or not facts.is_param else like.dtype
        return self._running_stage.stand_ins.of_param(facts, dtype, device)

    def _number(self, one: _Slot) -> int:
        return one.absent._number

    def _run(self, module: nn.Module, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = self._running_stage
        if now is None:
            if self.answer is None:
                raise StateError(PLAIN_LOOP)
            return self.answer(module, self._answering(module, original), args, kwargs)
        if module is not now.called:
            # the hooks of the whole model also run around a call of one in it
            return now.called(*args, **kwargs) if module is self.model else original(*args, **kwargs)
        refuse_sums_over_layers(kwargs, "The batch")
        if now.is_called:
            raise ModelError(
                f"compute_loss calls the {type(module).__name__} more than once for a micro-batch, but a stage runs "
                f"once for each. Call it once, or write a loop that calls the model and engine.backward(loss)."
            )
        now.is_called = now.is_in_forward = True
        try:
            output = original(*args, **kwargs)
        except EndOfForward as end:
            if now.unwinds:
                raise
            return end.output
        except Exception as error:
            self._refuse_exit(error)
            raise
        finally:
            now.is_in_forward = False
        if not self.ends_here:
            raise ModelError(
                f"The forward of {type(module).__name__} ended without calling {self._names[now.last + 1]}, with "
                f"which the next pipeline stage begins. List the modules in the order of the forward: pipeline.stages. "
                f"If it computes with parameters of that module without calling it, do this in the module's own "
                f"forward."
            )
        self._check_entered(now)
        return output

    def _refuse_exit(self, error: Exception) -> None:
        """Raise in place of an exception of the script's own class that comes out of a module of a stage, such as one
        by which a hook leaves the forward with features. Code that catches it would go on alone: the other ranks have
        no such hook, and wait for what follows."""
        kind = type(error)
        if whose_class(kind) != "the user's" or (name := self._raised_in(error)) is None:
            return
        text = str(error).partition("\n")[0]  # it may be a tensor's
        raise StateError(
            f"{kind.__name__} was raised in {name}: {text[:80]}. A forward in pipeline stages cannot be left early, as "
            f"other ranks wait for what this one sends. Let a hook keep what it wants and the forward go on, or let "
            f"the model return that."
        ) from error

    def _raised_in(self, error: Exception) -> str | None:
        """The name of the stage's module out of whose call `error` comes."""
        own = {one.own: one.absent._name for one in self._slots if one.own is not None}
        called = [frame.f_locals["self"] for frame, _ in walk_tb(error.__traceback__) if frame.f_code is CALL_CODE]
        return next((own[one] for one in called if one in own), None)

    def _take(
        self, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pre-forward hook of the modules of a stage: the one that is called first gets the received activation, and
        the others get it where they are called with what it has replaced."""
        now = self._running_stage
        if now is None or (self.layout.guests and self._is_at_home(number, now)):
            return None
        if number > now.last and now.is_in_forward:
            self.pass_by(self._names[number], number, args, kwargs)
        is_entered, now.is_entered, arrived = now.is_entered, True, now.arrived
        if arrived is None:
            return None
        if arrived.entry is None:
            arrived.entry = number
        if number != arrived.entry:
            return arrived.within(args, kwargs)
        if is_entered and now.is_in_forward:
            arrived.note_later_call(args, kwargs)
            return arrived.within(args, kwargs)
        if arrived.is_entered_once:
            return arrived.entering(args, kwargs, self._names[number])
        if arrived.is_known_call(args, kwargs):  # it is computed again
            return arrived.within(args, kwargs)
        raise ModelError(
            f"{self._names[number]}, with which pipeline stage {now.stage} begins, is called several times in the "
            f"forward, and is computed again with other tensors than in any of these calls. Recompute it by "
            f"`activations: recompute` in the plan, or by torch's checkpoint(..., use_reentrant=False)."
        )

    def _is_at_home(self, number: int, now: _Running) -> bool:
        """Whether a module is called by the one that contains it, and not by itself."""
        home = self.layout.guests.get(self._names[number])
        return home is not None and now.first <= self._names.index(home) <= now.last

    def _returned(self, number: int, _: nn.Module, args: object, output: object) -> None:  # noqa: ARG002  # torch's
        """Forward hook of the modules of a stage: later stages make stand-ins for what they return."""
        now, name = self._running_stage, self._names[number]
        if now is None or not now.is_in_forward or (self.layout.guests and self._is_at_home(number, now)):
            return
        if now.passing.known is not None:
            now.passing.known.require_same(name, output)
        if not now.notes_returns:
            return
        calls, tensors = now.returned.setdefault(name, []), list[Tensor]()
        calls.append(described(output, tensors))
        results = {Result(name, len(calls) - 1, place): tensor for place, tensor in enumerate(tensors)}
        now.results |= {
            result: (results[result], results[result]._version)
            for result in now.passing.carried.past(now.last)
            if result in results
        }
        if now.passing.wanted is not None:
            now.passing.wanted.update(now.stand_ins.foreign_in(output))
        now.stand_ins.note_own(output)

    def pass_by(self, name: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of a module that is not in the running stage."""
        now = self._running_stage
        if now is None:
            absent = self._slots[number].absent
            if self.answer is None or absent not in self.extents:
                raise StateError(PLAIN_LOOP if self.answer is None else _part_of(name, self.model))
            return self.answer(absent, absent, args, kwargs)
        if number < now.first:
            # reentrant checkpointing recomputes in the reverse order
            is_given = now.has_received or now.passing.wanted is not None  # a survey finds out what is carried
            if (now.is_entered and now.is_in_forward) or not is_given:
                self._refuse_order(name, now)
            return now.stand_ins.of_module(name)
        if now.has_received or torch.is_grad_enabled():
            self._check_entered(now)
        if now.arrived is not None:
            args, kwargs = now.arrived.within(args, kwargs) or (args, kwargs)
        raise EndOfForward(_handed_over(now, name, args, kwargs))

    def note_asked(self) -> None:
        """Say once if a loop goes through the parameters of a module of which this rank has not all: `zip` would pair
        those of a second one with others, or with none, and no operation shows that."""
        if not self._tells_of_parts:
            return
        asked = asked_for_parameters()
        if asked is None or asked in self.wholes:
            return
        for name, module in self.model.named_modules():
            if module is asked:
                self._tells_of_parts = False
                _log.warning(
                    "A loop goes through the parameters of %s, of which this rank has those of its pipeline stages "
                    "alone. What is done with each of them is right. Pairs with those of another module, as by zip(), "
                    "would be others, or none: pair them by name, engine.set(name, value) and engine.get(name), called "
                    "by all ranks.", name,
                )  # fmt: skip

    def is_set_in_forward(self, kind: type[nn.Module], name: str) -> bool:
        """Whether this rank's modules of a class have set an attribute to a tensor, such as an auxiliary loss."""
        return any(type(one) is kind and isinstance(one.__dict__.get(name), Tensor) for one in self.own_modules())

    def _check_entered(self, now: _Running) -> None:
        if not now.is_entered:
            self._refuse_order(self._names[now.first], now)

    def _refuse_order(self, name: str, now: _Running) -> NoReturn:
        around = self._names[now.first], self._names[now.last]
        raise ModelError(
            f"{name} does not run where pipeline stage {now.stage} ({around[0]} to {around[1]}) has it in the order of "
            f"the forward. List the modules in the order in which {type(self.model).__name__} calls them: "
            f"pipeline.stages. If it calls {name} twice, as the embedding of an encoder and a decoder, let it call two "
            f"modules that share the weight: second.weight = first.weight."
        )


def stage_boxes(
    params: Mapping[str, nn.Parameter],
    holders: Mapping[str, Sequence[int]],
    pp_rank: int,
    within: Mapping[nn.Parameter, Box],
) -> dict[nn.Parameter, Box]:
    """The boxes of one rank of a pipeline for those of `params` that it has, if it has parts of them or other ranks of
    the pipeline have copies. `within` are the boxes along the other model axes, inside one stage."""
    if not within and not any(len(pp_ranks) > 1 for pp_ranks in holders.values()):
        return {}
    boxes = {}
    for name, param in params.items():
        pp_ranks, box = holders[name], within.get(param) or Box.whole(tuple(param.shape))
        if pp_rank in pp_ranks:
            number = pp_ranks.index(pp_rank) * box.copies + box.place
            boxes[param] = replace(box, copies=box.copies * len(pp_ranks), place=number)
    return boxes


def _has_all(module: str, pieces: Sequence[str]) -> bool:
    """Whether the module of that name, "" for the model itself, has all `pieces`."""
    return not module or all(piece.startswith(f"{module}.") for piece in pieces)


def _parts_of(model: nn.Module, pieces: Sequence[str], guests: Collection[str]) -> dict[nn.Module, Span]:
    """The modules of the stages, and those that have several of them in a row, with the numbers of their first and
    last. Those in a module of another stage have no place of their own in the row."""
    numbers: dict[str, list[int]] = {}
    for number, piece in enumerate(pieces):
        above = piece.split(".") if piece not in guests else []
        for depth in range(1, len(above) + 1):
            numbers.setdefault(".".join(above[:depth]), []).append(number)
    in_rows = {name: (own[0], own[-1]) for name, own in numbers.items() if own[-1] - own[0] + 1 == len(own)}
    return {model.get_submodule(name): span for name, span in in_rows.items()}


@contextmanager
def _same_hooks(slots: Sequence[_Slot]) -> Iterator[None]:
    """A context in which forward hooks that are registered on a module of this rank, or on what stands for it while
    another of its stages runs, are registered on both. Models of transformers register those that capture hidden states
    in the first forward that asks for them, once for all."""
    own = [(one.own, one.absent) for one in slots if one.own is not None]
    pairs: list[tuple[nn.Module, nn.Module]] = [*own, *((absent, present) for present, absent in own)]
    known = [tuple(module._forward_hooks) for module, _ in pairs]
    try:
        yield
    finally:
        now = [tuple(module._forward_hooks) for module, _ in pairs]
        if now != known:
            new = [set(after).difference(before) for after, before in zip(now, known, strict=True)]
            for (module, other), hooks in zip(pairs, new, strict=True):
                for hook in sorted(hooks):
                    nn.Module.register_forward_hook(other, module._forward_hooks[hook])


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in module.modules())


def _part_of(name: str, model: nn.Module) -> str:
    return (
        f"{name} lies on another pipeline stage, inside of a module of this one, and cannot be called by itself. Call "
        f"{type(model).__name__}, on all ranks of the pipeline."
    )


def _handed_over(now: _Running, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The tensors that a stage sends to the next stage, which begins with `name`; sets their layout."""
    tensors = argument_leaves(args, kwargs)
    with_grads = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    if not are_leaves(args, kwargs) and len({id(tensors[index]) for index in with_grads}) < len(
        {id(tensor) for tensor in tensors_in((args, kwargs)) if tensor.requires_grad}
    ):
        raise ModelError(
            f"{name}, with which the next pipeline stage begins, is called with an object that holds tensors with "
            f"gradients, but stages pass on only tensors, in tuples, lists and dicts. Cut the model elsewhere: "
            f"pipeline.stages."
        )
    sends = now.passing.sends
    if sends is None:
        sent = [index for index, tensor in enumerate(tensors) if tensor.requires_grad or now.stand_ins.marks(tensor)]
    elif now.passing.sends_others and len(tensors) != len(sends):  # with a mask, say, which each stage has anyway
        sent = list(range(len(tensors)))
    else:
        sent = [index for index, number in enumerate(sends) if number >= 0]
        if len(tensors) != len(sends) or not set(with_grads) <= set(sent):
            raise ModelError(
                f"{name}, with which the next pipeline stage begins, is called with other tensors, or others with "
                f"gradients, than in the first step with such a batch. The arguments of a stage's first module must "
                f"not depend on values or on the number of the step."
            )
    chosen, arguments = numbered(tensors, sent)
    results = _carried_on(now, chosen)
    if now.passing.wanted is not None:
        now.passing.wanted.update(now.stand_ins.foreign_in(chosen))
    elif not chosen and now.is_entered:
        raise ModelError(
            f"{name}, with which the next pipeline stage begins, is called with nothing that the modules before it "
            f"computed. Begin the stage with another module: pipeline.stages."
        )
    arrived = StageMessageLayout((), ()) if now.arrived is None else now.arrived.layout
    varies = arrived.varies or now.passing.varies or now.stand_ins.batch_decides_sizes
    returned = {**arrived.returned, **now.returned}
    now.handed_over = StageMessageLayout(_layouts(chosen, name), arguments, returned, results, varies)
    return tuple(chosen)


def _carried_on(now: _Running, chosen: list[Tensor]) -> dict[Result, int]:
    """The results that a stage passes on, with their numbers among the `chosen` tensors, to which they are appended."""
    numbers = {id(tensor): number for number, tensor in enumerate(chosen)}
    results = {}
    for result in now.passing.carried.past(now.last):
        received = None if now.arrived is None else now.arrived.result(result)
        tensor, version = now.results.get(result, (received, None))
        if tensor is None:
            raise ModelError(
                f"The forward does not call {result.module} as often as in the first step with such a batch, and a "
                f"later pipeline stage reads what it returned then. Which modules are called must not depend on values "
                f"or on the number of the step."
            )
        if version is not None and tensor._version != version:
            raise ModelError(
                f"What {result.module} returned is changed in place, and a later pipeline stage reads it. Let the "
                f"forward make a new tensor there (x = x + y, not x += y), or put the modules between which it is used "
                f"in one stage: pipeline.stages."
            )
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(chosen)
            chosen.append(tensor)
        results[result] = numbers[id(tensor)]
    return results


def _layouts(tensors: Sequence[Tensor], name: str) -> tuple[Layout, ...]:
    """The layouts of tensors that are sent. What needs no gradient, such as the output of frozen layers, gets none."""
    for tensor in tensors:
        if tensor.dtype not in DTYPES.values() or tensor.layout is not torch.strided:
            raise ModelError(
                f"{name}, with which the next pipeline stage begins, is called with a tensor of {tensor.dtype} and "
                f"layout {tensor.layout}, which cannot be sent. Cut the model elsewhere: pipeline.stages."
            )
    return tuple(map(Layout.of, tensors))
