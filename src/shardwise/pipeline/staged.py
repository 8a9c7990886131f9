"""A model of which this rank has some stages: its own forward, from where a stage begins to where it ends.

[Note: a forward cut short] The model's own forward runs on every rank, so that whatever it makes of a batch besides
hidden states (masks, positions, rotary angles) is there. In the place of modules of other stages stand `Absent` ones.
Those before the stage return what has arrived, so that shapes are right; what comes of that is thrown away, for the
first module of the stage is given what has arrived whatever the forward calls it with. The first module behind the
stage is not called: what it would have been given is what the stage hands over, and the forward ends there, by an
exception that `EndOfForward` is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelError, StateError
from shardwise.pipeline.layout import StageLayout, refuse_sums_over_layers
from shardwise.pipeline.whole import WholeNames, holders_of
from shardwise.placement import Box
from shardwise.program import UnitSpec
from shardwise.runtime import EndOfForward, tensors_in

Tensor = torch.Tensor
PLAIN_LOOP = (
    "This engine's plan cuts the model into pipeline stages, of which each rank has its own, so the model cannot be "
    "called by itself. Use engine.train_step(batch), engine.forward_backward(batch) or engine.eval_step(batch)."
)


def _refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001  # as torch calls it
    """With `keep_vars` it is asked which parameters are here."""
    if not keep_vars:
        raise StateError(
            "model.state_dict() would have no more than this rank's pipeline stages. Call engine.state_dict(), on all "
            "ranks: it has the whole model's. engine.save(folder) writes checkpoints."
        )


def _refuse_loading(*_: object) -> NoReturn:
    raise StateError(
        "model.load_state_dict() would reach no more than this rank's pipeline stages. Call "
        "engine.load_state_dict(state), on all ranks, with the whole model's state."
    )


class ElsewhereError(ModelError, AttributeError):
    """Something is read of a module that lies on another stage; who only asks whether it is there gets an answer."""


class Absent(nn.Module):
    """Stands for a module of another stage. Plain attributes are those of the module, for a forward that reads them.

    A parameter that the module shares with one of this stage is here too, under its own name.
    """

    def __init__(self, name: str, number: int, original: nn.Module, owner: StagedModel, kept: set[Tensor]) -> None:
        super().__init__()
        self._name, self._number, self._owner = name, number, owner
        self._plain = {
            key: value
            for key, value in original.__dict__.items()
            if not key.startswith("_") and not isinstance(value, nn.Module | Tensor) and not callable(value)
        }
        self.training = original.training
        for path, param in original.named_parameters(remove_duplicate=False):
            if param in kept:
                self._keep(path, param)
        if original.state_dict(keep_vars=True):
            refuse_states(self)

    def _keep(self, path: str, param: nn.Parameter) -> None:
        *above, short = path.split(".")
        module: nn.Module = self
        for part in above:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part] or self
        module.register_parameter(short, param)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._owner.pass_by(self._name, self._number, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            plain = self.__dict__.get("_plain", {})
            if name in plain:
                return plain[name]
            raise ElsewhereError(
                f"The model's forward reads {name} of {self.__dict__.get('_name')}, which lies on another pipeline "
                f"stage. A pipeline can only call the modules that it deals out; list others: pipeline.stages."
            ) from None


def refuse_states(module: nn.Module) -> None:
    """Of a module that is not whole here nobody is given a state by its own methods."""
    module.register_state_dict_pre_hook(_refuse_state)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_refuse_loading)  # type: ignore[no-untyped-call]


@dataclass
class _Now:
    """The stage that is running: its modules by their numbers, and what has arrived for it."""

    stage: int
    first: int
    last: int
    arrived: Tensor | None
    is_entered: bool = False


@dataclass(frozen=True)
class _Place:
    """Where a module hangs: `holder[key]`; itself, if it is of this rank."""

    name: str
    holder: dict[str, nn.Module | None]
    key: str
    own: nn.Module | None
    absent: Absent


class StagedModel:
    """Takes the modules of other ranks' stages out of `model` when it is made."""

    def __init__(self, model: nn.Module, layout: StageLayout, place: int) -> None:
        self.model = model
        self.layout = layout
        self.stages = layout.at(place)
        self._names = layout.pieces
        self._now: _Now | None = None
        own = {name for stage in self.stages for name in layout.stages[stage]}
        modules = dict(model.named_modules(remove_duplicate=False))
        self.params = layout.params_at(model, place)
        """Of this rank's stages."""
        self.whole = WholeNames.of(model)
        self.place = place
        self.holders = holders_of(model, layout, modules)
        """The places along the axis at which each parameter lies, by its first name: several if stages share it."""
        self.group_names: list[list[str]] = []
        """The parameters of the optimizers' groups when those were whole."""
        self._name_of = {param: name for name, param in model.named_parameters()}
        self._places = [self._placed(model, number, name, modules, own) for number, name in enumerate(self._names)]
        self._firsts = {stage: self._names.index(layout.stages[stage][0]) for stage in self.stages}
        self._lasts = {stage: self._names.index(layout.stages[stage][-1]) for stage in self.stages}
        for one in self._places:
            if one.own is None:
                one.holder[one.key] = one.absent
        refuse_states(model)
        self._handles: list[RemovableHandle] = []
        self._forward = model.forward

    def _placed(self, model: nn.Module, number: int, name: str, modules: dict[str, nn.Module], own: set[str]) -> _Place:
        above, _, key = name.rpartition(".")
        holder = modules[above]._modules if above else model._modules
        module = modules[name]
        is_own = name in own
        absent = Absent(name, number, module, self, set() if is_own else self.params)
        return _Place(name, holder, key, module if is_own else None, absent)

    def own_modules(self) -> list[nn.Module]:
        """The modules of this rank's stages."""
        return [one.own for one in self._places if one.own is not None]

    def modules_of(self, stage: int) -> list[nn.Module]:
        """The modules of one of this rank's stages."""
        first, last = self._firsts[stage], self._lasts[stage]
        return [one.own for one in self._places[first : last + 1] if one.own is not None]

    def by_stage(self, units: Sequence[tuple[UnitSpec, Sequence[nn.Parameter]]]) -> dict[int, list[UnitSpec]]:
        """Which of `units`, with their parameters, each of this rank's stages uses."""
        own = {stage: {param for one in self.modules_of(stage) for param in one.parameters()} for stage in self.stages}
        return {
            stage: [unit for unit, held in units if any(param in params for param in held)]
            for stage, params in own.items()
        }

    def is_first_with(self, name: str) -> bool:
        """Whether no lower place along the axis has this parameter or buffer."""
        if name in self.holders:
            return self.holders[name][0] == self.place
        is_in_stage = any(name.startswith(f"{piece}.") for piece in self._names)
        return is_in_stage or self.place == 0

    def boxes(self, within: Mapping[nn.Parameter, Box]) -> dict[nn.Parameter, Box]:
        """This rank's parts of its parameters, where it has parts or other ranks of the pipeline have copies.

        `within` are the parts that ranks of one stage have.
        """
        if not within and not any(len(places) > 1 for places in self.holders.values()):
            return {}
        boxes = {}
        for name, param in self.model.named_parameters():
            places, box = self.holders[name], within.get(param) or Box.whole(tuple(param.shape))
            place = places.index(self.place) * box.copies + box.place
            boxes[param] = replace(box, copies=box.copies * len(places), place=place)
        return boxes

    def take_from(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Parameters of other ranks' stages leave the optimizers; groups stay, empty ones too."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self.group_names.append([self._name_of[param] for param in group["params"] if param in self._name_of])
                for param in group["params"]:
                    if param not in self.params:
                        optimizer.state.pop(param, None)
                group["params"] = [param for param in group["params"] if param in self.params]
        self._name_of.clear()

    def attach(self) -> None:
        """Take over the model's forward; after other hooks have been hung, so that they see what arrives.

        Also of a copy of this and the model, which has none of our hooks.
        """
        model, original = self.model, self._forward

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(original, args, kwargs)

        model.__dict__["forward"] = forward
        for stage in self.stages:
            first = self._places[self._firsts[stage]].own
            assert first is not None
            self._handles.append(first.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))

    def release(self) -> None:
        """Give the model its forward back. Modules of other stages stay away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.model.__dict__.pop("forward", None)

    # -- running one stage ------------------------------------------------------------------------------

    @contextmanager
    def running(self, stage: int, arrived: Tensor | None) -> Iterator[None]:
        """Inside, a forward of the model, or what a backward recomputes of one, is of `stage`."""
        now = _Now(stage, self._firsts[stage], self._lasts[stage], arrived)
        others = [one for one in self._places if one.own is not None and not now.first <= self._number(one) <= now.last]
        for one in others:
            one.holder[one.key] = one.absent
        self._now = now
        try:
            yield
        finally:
            self._now = None
            for one in others:
                one.holder[one.key] = one.own

    def _number(self, place: _Place) -> int:
        return place.absent._number

    def _run(self, original: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        now = self._now
        if now is None:
            raise StateError(PLAIN_LOOP)
        refuse_sums_over_layers(kwargs, "The batch")
        try:
            output = original(*args, **kwargs)
        except EndOfForward as end:
            return end.output
        if now.last + 1 < len(self._names):
            raise ModelError(
                f"The forward of {type(self.model).__name__} ended without calling {self._names[now.last + 1]}, with "
                f"which the next pipeline stage begins. List the modules in the order of the forward: pipeline.stages."
            )
        self._check_entered(now)
        return output

    def _enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The first module of a stage is called: with what has arrived."""
        now = self._now
        if now is None:
            return None
        now.is_entered = True
        if now.arrived is None:
            return None
        if args:
            return (now.arrived, *args[1:]), kwargs
        key = _first_tensor(kwargs)
        return args, {**kwargs, key: now.arrived} if key else kwargs

    def pass_by(self, name: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A module that is not of the stage that runs is called."""
        now = self._now
        if now is None:
            raise StateError(PLAIN_LOOP)
        if number < now.first:
            if now.is_entered:
                self._refuse_order(name, now)
            assert now.arrived is not None
            return now.arrived.detach()
        self._check_entered(now)
        raise EndOfForward(_handed_over(name, args, kwargs))

    def _check_entered(self, now: _Now) -> None:
        if not now.is_entered:
            self._refuse_order(self._names[now.first], now)

    def _refuse_order(self, name: str, now: _Now) -> NoReturn:
        around = self._names[now.first], self._names[now.last]
        raise ModelError(
            f"{name} does not run where pipeline stage {now.stage} ({around[0]} to {around[1]}) has it in the order of "
            f"the forward. List the modules in the order in which {type(self.model).__name__} calls them: "
            f"pipeline.stages."
        )


def _handed_over(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The one tensor that a stage gives to the next, which begins with `name`."""
    key = _first_tensor(kwargs)
    given = args[0] if args else kwargs.get(key) if key else None
    if not isinstance(given, Tensor) or not given.is_floating_point():
        shown = f"a tensor of {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
        raise ModelError(
            f"{name} is called with {shown} first, but stages hand one floating-point tensor over. Cut the model "
            f"elsewhere: pipeline.stages."
        )
    if any(other.requires_grad and other is not given for other in tensors_in((args, kwargs))):
        raise ModelError(
            f"{name} is called with a second tensor through which gradients flow, but pipeline stages hand only the "
            f"first over. Cut the model elsewhere: pipeline.stages."
        )
    return given


def _first_tensor(kwargs: dict[str, Any]) -> str:
    if "hidden_states" in kwargs:
        return "hidden_states"
    return next((key for key, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point()), "")
