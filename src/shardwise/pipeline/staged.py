"""A model of which this rank has some stages: its own forward, from the beginning of a stage to its end.

[Note: a forward cut short] The model's own forward runs on every rank, so that everything else that it computes from a
batch (masks, positions, rotary angles) is available. `Absent` modules replace those of other stages. The ones before
the stage return zeros of the shape that was received, so that shapes are right; results computed from it are discarded,
because the first module of the stage is called with the received activation whatever the forward passes to it. What the
stage returns must not depend on them, say through a skip connection: in a watched forward every operation is followed
(`dependence.py`), and in others a gradient that flows to them is an error (`_guarded`). The first module after the
stage is not called: its input is the stage's output, and the forward ends there with an `EndOfForward` exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelError, StateError
from shardwise.pipeline.layout import StageLayout, refuse_sums_over_layers
from shardwise.pipeline.whole import WholeNames, holders_of
from shardwise.placement import Box
from shardwise.program import UnitSpec
from shardwise.runtime import EndOfForward, tensors_in

if TYPE_CHECKING:
    from shardwise.pipeline.dependence import Dependence, Names

Tensor = torch.Tensor
PLAIN_LOOP = (
    "This engine's plan splits the model into pipeline stages, of which each rank has its own, so the model cannot "
    "be called by itself. Use engine.train_step(batch), engine.forward_backward(batch) or engine.eval_step(batch)."
)


def _refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001  # as torch calls it
    """`keep_vars=True` only asks which parameters are here, and is allowed."""
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
    """The forward reads an attribute of a module on another stage; being an `AttributeError`, it answers `hasattr`."""


class Absent(nn.Module):
    """Stands for a module of another stage. It has the plain attributes of that module, for a forward that reads them.

    It also has the parameters that the module shares with one of this stage, under their own names.
    """

    def __init__(self, name: str, number: int, original: nn.Module, owner: StagedModel, kept: set[Tensor]) -> None:
        super().__init__()
        self._name, self._number, self._owner, self._class = name, number, owner, type(original)
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
            if "_owner" in self.__dict__ and self._owner.is_set_in_forward(self._class, name):
                raise ModelError(
                    f"The model's forward reads {name} of {self._name}, a tensor which that module computes, but it "
                    f"lies on another pipeline stage. Pipeline stages pass on only activations."
                ) from None
            if name in plain:
                return plain[name]
            raise ElsewhereError(
                f"The model's forward reads {name} of {self.__dict__.get('_name')}, which lies on another pipeline "
                f"stage. A pipeline can only call the modules of its stages; list others: pipeline.stages."
            ) from None


def refuse_states(module: nn.Module) -> None:
    """Refuse the module's own `state_dict` and `load_state_dict`, because it is not whole on this rank."""
    module.register_state_dict_pre_hook(_refuse_state)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_refuse_loading)  # type: ignore[no-untyped-call]


@dataclass
class _Running:
    """The stage that is running: the numbers of its first and last module, and the activation that it received."""

    stage: int
    first: int
    last: int
    arrived: Tensor | None
    is_entered: bool = False
    is_in_forward: bool = False
    """Whether the model's own forward runs, rather than a recomputation of some modules in a backward."""
    stand_in: Tensor | None = None
    """What modules of earlier stages return."""
    dependence: Dependence | None = None
    """Follows what is computed from stand-ins, in a forward that is watched."""


@dataclass(frozen=True)
class _Place:
    """Where a module is registered: `holder[key]`. `own` is the module itself if it belongs to this rank."""

    name: str
    holder: dict[str, nn.Module | None]
    key: str
    own: nn.Module | None
    absent: Absent


class StagedModel:
    """Removes the modules of other ranks' stages from `model` when it is constructed.

    `sequence_parts`: by stage, into how many parts the sequence that it receives is split, if it is.
    """

    def __init__(
        self, model: nn.Module, layout: StageLayout, place: int, sequence_parts: Mapping[int, int] | None = None
    ) -> None:
        self.model = model
        self._sequence_parts = dict(sequence_parts or {})
        self.layout = layout
        self.stages = layout.at(place)
        self._names = layout.pieces
        self._running_stage: _Running | None = None
        own = {name for stage in self.stages for name in layout.stages[stage]}
        modules = dict(model.named_modules(remove_duplicate=False))
        self.params = layout.params_at(model, place)
        """The parameters of this rank's stages."""
        self.whole = WholeNames.of(model)
        self.place = place
        self.holders = holders_of(model, layout, modules)
        """The places along the axis at which each parameter lies, by its first name: several if stages share it."""
        self.group_names: list[list[str]] = []
        """The names of the parameters in each optimizer group before other stages' parameters were removed."""
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

    def named_modules_of(self, stage: int) -> dict[str, nn.Module]:
        """As `modules_of`, with their names in the model."""
        return dict(zip(self.layout.stages[stage], self.modules_of(stage), strict=True))

    def by_stage(self, units: Sequence[tuple[UnitSpec, Sequence[nn.Parameter]]]) -> dict[int, list[UnitSpec]]:
        """The `units` that each of this rank's stages uses. Each unit comes with its parameters."""
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
        """This rank's boxes of its parameters, if it has parts of them or other ranks of the pipeline have copies.

        `within` are the boxes along the other model axes, inside one stage.
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
        """Remove the parameters of other ranks' stages from the optimizers; groups stay, even if they are empty."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self.group_names.append([self._name_of[param] for param in group["params"] if param in self._name_of])
                for param in group["params"]:
                    if param not in self.params:
                        optimizer.state.pop(param, None)
                group["params"] = [param for param in group["params"] if param in self.params]
        self._name_of.clear()

    def attach(self) -> None:
        """Replace the model's forward. Call it after other hooks are registered, so that they see the received
        activation.

        It also works on a copy of this object and the model, which has none of our hooks.
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
        """Restore the model's forward. Modules of other stages stay absent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.model.__dict__.pop("forward", None)

    # -- running one stage ------------------------------------------------------------------------------

    @contextmanager
    def running(self, stage: int, arrived: Tensor | None, *, is_watched: bool = False) -> Iterator[None]:
        """A context in which forwards of the model, and recomputations of them in a backward, run `stage`. If it is
        watched, what follows may ask `require_own`."""
        now = _Running(stage, self._firsts[stage], self._lasts[stage], arrived)
        if is_watched:
            from shardwise.pipeline.dependence import Dependence  # only ranks with a pipeline load it

            now.dependence = Dependence(lambda names: self._refuse_dependence(stage, names, "reads a number from"))
        others = [one for one in self._places if one.own is not None and not now.first <= self._number(one) <= now.last]
        for one in others:
            one.holder[one.key] = one.absent
        self._running_stage = now
        try:
            with now.dependence or nullcontext():
                yield
        finally:
            self._running_stage = None
            for one in others:
                one.holder[one.key] = one.own

    def require_own(self, output: object) -> None:
        """In a watched forward: raise `ModelError` if `output`, or a buffer, depends on what earlier stages computed,
        other than through the received activation."""
        now = self._running_stage
        assert now is not None
        assert now.dependence is not None
        names = now.dependence.names(list(tensors_in(output)))
        if names:
            self._refuse_dependence(now.stage, names, "uses")
        for name, buffer in self.model.named_buffers():
            names = now.dependence.names(buffer)
            if names:
                self._refuse_dependence(now.stage, names, f"changes the buffer {name} by")

    def _number(self, place: _Place) -> int:
        return place.absent._number

    def _run(self, original: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        now = self._running_stage
        if now is None:
            raise StateError(PLAIN_LOOP)
        refuse_sums_over_layers(kwargs, "The batch")
        now.is_in_forward = True
        try:
            output = original(*args, **kwargs)
        except EndOfForward as end:
            return end.output
        finally:
            now.is_in_forward = False
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
        """Pre-forward hook of the first module of a stage: replace its first argument by the received activation."""
        now = self._running_stage
        if now is None:
            return None
        if now.is_entered and now.is_in_forward:
            raise ModelError(
                f"The forward calls {self._names[now.first]}, with which pipeline stage {now.stage} begins, more than "
                f"once, and each call there would get what the stage received. Begin the stage with another module: "
                f"pipeline.stages."
            )
        now.is_entered = True
        if now.arrived is None:
            return None
        if args:
            return (now.arrived, *args[1:]), kwargs
        key = _first_tensor(kwargs)
        return args, {**kwargs, key: now.arrived} if key else kwargs

    def pass_by(self, name: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The forward of a module that is not in the running stage."""
        now = self._running_stage
        if now is None:
            raise StateError(PLAIN_LOOP)
        if number < now.first:
            if now.is_entered and now.is_in_forward:  # reentrant checkpointing recomputes in the reverse order
                self._refuse_order(name, now)
            return self._stand_in(now, name)
        self._check_entered(now)
        raise EndOfForward(_stage_output(name, args, kwargs))

    def _stand_in(self, now: _Running, name: str) -> Tensor:
        """What modules of earlier stages return: zeros of the shape that whole sequences have. Masks and positions are
        made from that shape, and the model may write to it."""
        assert now.arrived is not None
        if now.stand_in is not None and now.dependence is None:
            return now.stand_in
        shape = list(now.arrived.shape)
        if now.stage in self._sequence_parts:
            shape[-2] *= self._sequence_parts[now.stage]
        needs_grad = now.arrived.requires_grad
        now.stand_in = self._guarded(now, shape) if needs_grad else now.arrived.new_zeros(shape)
        if now.dependence is not None:
            now.dependence.mark(now.stand_in, name)
        return now.stand_in

    def _guarded(self, now: _Running, shape: list[int]) -> Tensor:
        """Zeros that raise if a gradient flows back to them: then the stage's output depends on them.

        As the activation they stand for, they need gradients: reentrant checkpointing asks its arguments.
        """
        assert now.arrived is not None
        stage = now.stage  # the hook refers to nothing else of `now`, which refers to the tensor

        def refuse(gradient: Tensor | None) -> None:
            if gradient is None or isinstance(gradient, FakeTensor):  # rehearsed: it has no values
                return
            if bool(gradient.count_nonzero()):
                self._refuse_dependence(stage, frozenset(), "uses")

        with torch.enable_grad():
            stand_in = now.arrived.new_zeros(()).requires_grad_().expand(shape).clone()
        stand_in.register_hook(refuse)  # type: ignore[no-untyped-call]
        return stand_in

    def _refuse_dependence(self, stage: int, names: Names, does: str) -> NoReturn:
        """`names` are the modules on whose outputs something depends, if they are known."""
        known = [name for name in self._names if name in names]
        what = f"what {_listed(known)} returned" if known else "what modules of earlier stages returned"
        first = self._names[self._firsts[stage]]
        raise ModelError(
            f"In pipeline stage {stage}, which begins with {first}, the forward {does} {what} (a skip connection, or a "
            f"sum over layers), but stages pass on only the input of their first module. Put the modules between which "
            f"it is used in one stage: pipeline.stages."
        )

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
            f"pipeline.stages."
        )


def _stage_output(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The one tensor that a stage sends to the next stage, which begins with `name`."""
    key = _first_tensor(kwargs)
    given = args[0] if args else kwargs.get(key) if key else None
    if not isinstance(given, Tensor) or not given.is_floating_point():
        shown = f"a tensor of {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
        raise ModelError(
            f"{name} is called with {shown} first, but stages pass on one floating-point tensor. Cut the model "
            f"elsewhere: pipeline.stages."
        )
    if any(other.requires_grad and other is not given for other in tensors_in((args, kwargs))):
        raise ModelError(
            f"{name} is called with a second tensor through which gradients flow, but pipeline stages pass on only "
            f"the first. Cut the model elsewhere: pipeline.stages."
        )
    return given


def _listed(names: Sequence[str]) -> str:
    """Such as `tokens, blocks.0 and blocks.1`, or `blocks.0 and 5 more modules`."""
    if len(names) > 3:
        return f"{names[0]} and {len(names) - 1} more modules"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _first_tensor(kwargs: dict[str, Any]) -> str:
    if "hidden_states" in kwargs:
        return "hidden_states"
    return next((key for key, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point()), "")
