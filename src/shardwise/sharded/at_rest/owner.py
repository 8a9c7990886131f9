"""What knows the parameters of one engine by name, and handles access to them while they are at rest."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from shardwise.errors import CommError, ModelError, StateError, some
from shardwise.memory import Flat, Unit
from shardwise.plan.placement import Slot
from shardwise.runtime import Agreement, Runner, changed_inside
from shardwise.sharded.access import Access
from shardwise.sharded.at_rest.assigned import Present
from shardwise.sharded.at_rest.handles import Home, Resting, Step, Whole
from shardwise.sharded.at_rest.own_share import OwnShare
from shardwise.sharded.at_rest.stage_names import InStage, StageNames
from shardwise.sharded.at_rest.unsplit import UnsplitSource
from shardwise.sharded.at_rest.use import plainly, use
from shardwise.sharded.gradients import Gradients
from shardwise.system.marked import Marked
from shardwise.system.torch_private import is_transforming

Tensor = torch.Tensor
Result = TypeVar("Result")
CALLED_BY_TORCH = {"torch_function": "an access to a parameter"}
"""See `comm/watch/journal.py`."""


class Owner:
    """Handles access to the parameters of one engine while they are at rest.

    `before_change` is called before a parameter is written to.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        runner: Runner,
        agreement: Agreement,
        access: Access,
        gradients: Gradients,
        before_change: Callable[[], None],
        weights_outside: Mapping[str, float],
        stage: StageNames | None,
    ) -> None:
        """`weights_outside`: how often gradients of these parameters count that do not come through the model, if not
        once; see [Note: terms outside of the model] in `use.py`. `stage`: the parameters, if others are on other
        stages."""
        self.stage = stage
        self.share: OwnShare | None = None
        """What they are of the model's, if not all."""
        self.weights_outside = weights_outside
        self.runner = runner
        self.agreement = agreement
        self.access = access
        self.gradients = gradients
        self.before_change = before_change
        self.is_closed = False
        self.is_void: Callable[[], bool] = lambda: False
        """Whether changes have no effect now."""
        self.leaves_out: Callable[[str], bool] = lambda _: False
        """The same for one that is given in words, and logged."""
        self.on_unfrozen: Callable[[], object] = lambda: None
        self.is_released = False
        self.on_fault: Callable[[CommError], bool] = lambda _: False
        """Called when ranks were lost while a parameter was being gathered for code between two steps. Returns whether
        it can be read now, from its present home."""
        self.has_lost_gradients: Callable[[CommError | None], bool] = lambda _: False
        """Whether gradients mean nothing any more, as the step is taken again: because of a fault that was met before,
        or of this one, which reading one has met. They are zeros then."""
        self.has_lost_backward: Callable[[CommError | None], bool] = lambda _: False
        """The same inside of a backward, which reads a parameter for a term of the loss."""
        self.unfrozen: set[str] = set()
        """Parameters that were frozen when the plan was made and are now meant to train."""
        self.assigned: set[ParamHome] = set()
        """Parameters whose `data` or `grad` was assigned."""
        self._flats = [flat for unit in units for flat in unit.flats]
        self._homes: dict[int, ParamHome] = {
            id(param): ParamHome(self, unit, flat, index)
            for unit in units
            for flat in unit.flats
            for index, param in enumerate(flat.params)
        }
        self._types: dict[type, type] = {}
        for flat in self._flats:
            flat.guard.begin(flat.params, self._resting_type)

    def unless_lost(self, work: Callable[[], Result], lost: Result) -> Result:
        """The result of `work`, or `lost` if gradients mean nothing any more."""
        if self.has_lost_gradients(None):
            return lost
        try:
            return work()
        except CommError as error:
            if not self.has_lost_gradients(error):
                raise
            return lost

    def close(self) -> None:
        """Called when the engine is closed. Parameters that are whole become plain again; accesses to others raise, and
        to those whose last update has failed."""
        self.is_closed = True
        for flat in self._flats:
            if flat.spec.resident and flat.failed_update is None:
                flat.guard.end()
            else:
                flat.guard.rest()

    def release(self) -> None:
        """Restore the original class of all parameters; accesses are not intercepted any more."""
        self.is_released = True
        for flat in self._flats:
            flat.guard.end()

    def note_hooks(self) -> None:
        """Say what hooks get that gradients have already."""
        for home in self._homes.values():
            if home.param._backward_hooks:
                home.note_hook()

    def require_trainable(self) -> None:
        """Raise before a forward if a parameter is meant to train but has no memory planned for its gradient."""
        if self.unfrozen and torch.is_grad_enabled():
            raise StateError(
                f"{some(sorted(self.unfrozen), 1)} was frozen when memory was planned, so there is none for its "
                f"gradient. The next call of the model makes it: unfreeze after a step, or after zero_grad(), and "
                f"before that call."
            )

    def require_params_kept(self) -> None:
        """Raise before a forward if code goes on using what it assigned to a parameter as if it were its memory."""
        for home in self.assigned:
            home.require_kept()

    def require_gradients_kept(self) -> None:
        """The same before a step, for gradients."""
        for home in self.assigned:
            home.require_gradient_kept()

    def home_of(self, param: object) -> ParamHome:
        return self._homes[id(param)]

    def split_home_of(self, param: object) -> ParamHome | None:
        """The home of `param`, if ranks along a model axis have other parts of it."""
        home = self._homes.get(id(param))
        box = home.slot.box if home is not None else None
        return home if box is not None and (box.is_split or box.copies == 1) else None

    def revive(self, home: ParamHome) -> None:
        """Give a parameter of a closed engine its own memory, to be overwritten."""
        param = home.param
        param.__class__ = next(plain for plain, resting in self._types.items() if resting is type(param))
        param.data = torch.empty(home.slot.shape, dtype=param.dtype, device=param.device)

    def _resting_type(self, plain: type) -> type:
        if plain not in self._types:
            self._types[plain] = _resting_type(plain, self)
        return self._types[plain]


class ParamHome:
    """The `Home` of one parameter."""

    def __init__(self, owner: Owner, unit: Unit, flat: Flat, index: int) -> None:
        self._owner_ref = weakref.ref(owner)
        self._unit = unit
        self._flat = flat
        self._index = index
        self.use = use
        self._present = Present(flat.params[index])
        self._unsplit = Present()
        self._gradient: tuple[tuple[int, int], Present] | None = None
        """That of the gradient which code has last read or assigned, after its epoch."""

    @property
    def _owner(self) -> Owner:
        """Held weakly, so that an old plan's buffers are freed with it rather than at the next garbage collection."""
        return _resolve(self._owner_ref)

    @property
    def slot(self) -> Slot:
        return self._flat.slots[self._index]

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def param(self) -> torch.nn.Parameter:
        return self._flat.params[self._index]

    @property
    def gathers_again(self) -> Home | None:
        if self._is_left:
            return self.param.home().gathers_again if isinstance(self.param, Resting) else None
        return None if self._flat.spec.resident else self

    @property
    def is_computing(self) -> bool:
        return self._owner.runner.is_computing

    @property
    def unsplit_shape(self) -> tuple[int, ...] | None:
        return self.slot.whole_shape if self.slot.is_split else None

    @property
    def in_stage(self) -> InStage | None:
        owner = self._owner_ref()
        return None if owner is None or owner.stage is None else InStage(owner.stage, self.name)

    def note_hook(self) -> None:
        owner = self._owner
        if owner.share is not None and (owner.stage is not None or self.slot.is_split):
            owner.share.note_hook(self.name)

    def note_counted(self) -> None:
        owner = self._owner_ref()
        if owner is not None and owner.share is not None and not owner.runner.is_computing:
            owner.share.note_counted(self.name)

    def _note_written(self) -> None:
        if self._owner.share is not None:
            self._owner.share.note_written(self.name)

    @property
    def weight_outside(self) -> float:
        return self._owner.weights_outside.get(self.name, 1.0)

    @property
    def has_lost_backward(self) -> Callable[[CommError | None], bool]:
        return self._owner.has_lost_backward

    def require_open(self) -> None:
        if self._owner.is_closed:
            raise StateError(
                f"{self.name} is not whole on any rank: its engine was closed. Take engine.state_dict() before "
                f"engine.close(); a model built anew, or this one, can load it."
            )
        self.require_kept()

    # -- values -----------------------------------------------------------------------------------------

    @contextmanager
    def opened(self) -> Iterator[Tensor]:
        if is_transforming():
            raise StateError(
                f"{self.name} is read inside a torch.func transform (grad, vmap, jvp, ...), which would keep "
                f"references to its memory. Take param.detach().clone() before, on all ranks, and use that inside."
            )
        if not self._is_left:
            with self._owner.runner.gathering.borrowed([self._unit]):
                values = plainly(Tensor.detach, [self.param], {})
                # whole parameters are computed with where they are, so a write that is left out goes to a copy
                yield values.clone() if self._owner.is_void() else values
        elif isinstance(self.param, Resting):
            with self.param.home().opened() as values:
                yield values
        else:
            yield plainly(Tensor.detach, [self.param], {})

    @property
    def _is_left(self) -> bool:
        """Whether the parameter has another home by now, because ranks were lost."""
        owner = self._owner_ref()
        return owner is None or owner.is_released

    def recover(self, error: CommError) -> bool:
        """Go on without the ranks that `error` says were lost; returns whether `opened` can be called again."""
        return not self._is_left and self._owner.on_fault(error)

    def reach(self) -> None:
        self._owner.runner.reach(self._unit)

    def require_gradient(self) -> None:
        if self.name in self._owner.unfrozen:
            self._owner.require_trainable()

    def seen(self, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        return self._flat.full.as_strided(tuple(size), tuple(stride), offset)

    def num_writes(self) -> int:
        return self._unit.num_writes()

    def require_unwritten(self, num_writes: int) -> None:
        if self.num_writes() != num_writes:
            raise changed_inside(self._unit.name)

    def take_over(self, values: Tensor) -> None:
        """Copy rank 0's `values` to all ranks."""
        if self._is_left and isinstance(self.param, Resting):
            self.param.home().take_over(values)
            return
        owner, flat = self._owner, self._flat
        if owner.leaves_out(f"A write to {self.name}"):
            return
        self._note_written()
        owner.before_change()
        owner.runner.step.open_params()
        flat_values = values.reshape(-1)
        owner.agreement.broadcast(flat, flat_values, self.slot)
        flat.accept_edit(self._index, flat_values)
        owner.runner.gathering.note_written(self._unit)
        owner.runner.step.close_params()

    def whole(self, steps: tuple[Step, ...] = ()) -> Whole:
        return Whole(self._present.memory(self), steps, plainly(Tensor.detach, [self.param], {}))

    def assign(self, value: Tensor) -> None:
        self._require_alike(value)
        if isinstance(value, Whole) and value.memory is self._present.memory(self) and not value.is_view:
            return
        self._note_written()
        self._present.leave(self, lambda: self.whole().clone())
        self._unsplit.leave(UnsplitSource(self), lambda: self.unsplit().clone())
        self.param.copy_(value)
        self._present.enter(self, value)
        self._owner.assigned.add(self)

    def require_kept(self) -> None:
        """Raise if code goes on using what it assigned as if it were this parameter's memory."""
        self._present.require_kept(self)
        self._present.require_untied(self)

    def assembled(self, part: Tensor) -> Tensor:
        """The tensor of the unsplit model, of which this rank has `part`."""
        return self._owner.agreement.assembled(self._flat, self.slot, part)

    def added_up(self, of_part: Tensor) -> Tensor:
        return self._owner.agreement.added_up(self._flat, self.slot, of_part)

    def unsplit(self) -> Whole:
        """A tensor that stands for the one of the unsplit model."""
        param = self.param
        like = torch.empty(self.slot.whole_shape, dtype=param.dtype, device="meta")
        return Whole(self._unsplit.memory(UnsplitSource(self)), (), like, param.device)

    def scale(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:  # noqa: ARG002
        return False  # the stored copy may have a wider dtype, so only whole values are written

    def norm(self, norm_type: float) -> float | None:  # noqa: ARG002
        return None

    # -- its gradient -----------------------------------------------------------------------------------

    def gradient(self) -> Whole | None:
        """A loop that reads it behind its backward expects one, also where ranks have been lost since."""
        owner, flat = self._owner, self._flat
        has = owner.unless_lost(lambda: owner.gradients.has(flat, self._index), None)
        if has is None:
            return self._whole_gradient(self.param.dtype) if flat.spec.trainable else None
        if not has:
            return None
        self.require_gradient_kept()
        return self._whole_gradient(owner.gradients.piece(flat, self._index).dtype)

    def _whole_gradient(self, dtype: torch.dtype) -> Whole:
        like = torch.empty(self.slot.shape, dtype=dtype, device="meta")
        source, present = self._present_gradient()
        return Whole(present.memory(source), (), like, self._flat.device)

    def _present_gradient(self) -> tuple[GradSource, Present]:
        epoch = self._owner.gradients.epoch_of(self._flat, self._index)
        if self._gradient is None or self._gradient[0] != epoch:
            self._gradient = epoch, Present()
        return GradSource(self._owner, self._flat, self._index, epoch), self._gradient[1]

    def require_gradient_kept(self) -> None:
        """Raise if code goes on using what it assigned as if it were this gradient's memory."""
        if self._gradient is not None:
            source, present = self._present_gradient()
            present.require_kept(source)

    def set_gradient(self, value: Tensor | None) -> None:
        if not self._flat.spec.trainable:
            if value is None:  # it has none, and loops drop that of all parameters
                return
            raise StateError(
                f"{self.name} is frozen, so a gradient that it is given would not be used. Unfreeze it before the "
                f"forward, on all ranks: requires_grad_(True)."
            )
        if value is not None and tuple(value.shape) != self.slot.shape:
            raise ModelError(
                f"{self.name} has shape {list(self.slot.shape)}, but the gradient {list(value.shape)}. Give the whole "
                f"gradient, on all ranks."
            )
        if value is not None and not value.is_floating_point():
            raise ModelError(
                f"{self.name} is {self.param.dtype}, but the gradient {value.dtype}. Give a floating-point one."
            )
        self._owner.unless_lost(lambda: self._set_gradient(value), None)

    def _set_gradient(self, value: Tensor | None) -> None:
        gradients = self._owner.gradients
        source, present = self._present_gradient()
        if isinstance(value, Whole) and value.memory is present.memory(source) and not value.is_view:
            return
        if value is not None and gradients.has(self._flat, self._index):
            present.leave(source, lambda: self._whole_gradient(gradients.piece(self._flat, self._index).dtype).clone())
        given = value.plain() if isinstance(value, Marked) else value
        gradients.assign(self._flat, self._index, given.clone() if isinstance(given, Resting | Whole) else given)
        if value is not None:
            source, present = self._present_gradient()
            present.enter(source, value.home().whole() if isinstance(value, Resting) else value)
            self._owner.assigned.add(self)

    # -- what is refused --------------------------------------------------------------------------------

    def _require_alike(self, value: Tensor) -> None:
        param = self.param
        if (tuple(value.shape), value.dtype, value.device) == (self.slot.shape, param.dtype, param.device):
            return
        raise StateError(
            f"{self.name} is {list(self.slot.shape)}, {param.dtype} on {param.device}, in the engine's memory; it was "
            f"to become {list(value.shape)}, {value.dtype} on {value.device}. Say precision and device before: in the "
            f"plan (`precision: bf16`, engine.reshard(plan) changes it), and with shard(..., device=...)."
        )

    def note_wish(self, *, trains: bool) -> None:
        self._owner.unfrozen.discard(self.name)
        if trains and not self._flat.spec.trainable:
            self._owner.unfrozen.add(self.name)
            self._owner.on_unfrozen()

    def refuse_hook(self) -> NoReturn:
        raise StateError(
            f"A hook on {self.name}, or on its node in autograd's graph, that is called once its gradient is added up "
            f"would see that of this rank alone, before it is averaged, and what it does to it would be lost. Read "
            f"gradients between backward and step instead: param.grad, or engine.get({self.name!r}, 'grad')."
        )

    def refuse(self, what: str) -> NoReturn:
        if self._flat.spec.resident:
            why = "what is written through it would change it on this rank alone, and the engine would not know"
        else:
            why = "it is whole in memory only while a computation uses it"
        raise StateError(
            f"{self.name} belongs to an engine, and {what} cannot be had: {why}. param.detach().clone() or "
            f"engine.get({self.name!r}), called by all ranks, gives the values, and engine.state_dict() those of all "
            f"parameters."
        )


@dataclass(frozen=True)
class GradSource:
    """The gradient of one parameter, between a backward and `zero_grad`: a `Source`."""

    owner: Owner
    flat: Flat
    index: int
    epoch: tuple[int, int]

    @property
    def name(self) -> str:
        return f"the gradient of {self.flat.slots[self.index].name}"

    @property
    def unsplit_shape(self) -> tuple[int, ...] | None:
        slot = self.flat.slots[self.index]
        return slot.whole_shape if slot.is_split else None

    @property
    def in_stage(self) -> InStage | None:
        return None if self.owner.stage is None else InStage(self.owner.stage, self.flat.slots[self.index].name)

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return use(func, args, kwargs)

    def note_counted(self) -> None:
        if self.owner.share is not None:
            self.owner.share.note_counted(self.flat.slots[self.index].name)

    def _note_written(self) -> None:
        if self.owner.share is not None:
            self.owner.share.note_written(self.flat.slots[self.index].name)

    def recover(self, error: CommError) -> bool:
        return self.owner.has_lost_gradients(error)

    @property
    def gathers_again(self) -> None:
        return None

    @contextmanager
    def opened(self) -> Iterator[Tensor]:
        if self.owner.has_lost_gradients(None):
            slot = self.flat.slots[self.index]
            yield torch.zeros(slot.shape, dtype=self.flat.params[self.index].dtype, device=self.flat.device)
            return
        self._require_current()
        whole = self.owner.access.read_part(self.flat.slots[self.index].name, "grad")
        assert whole is not None
        yield whole

    def take_over(self, values: Tensor) -> None:
        self._note_written()
        self.owner.unless_lost(lambda: self.owner.gradients.assign(self.flat, self.index, values), None)

    def scale(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return self.owner.unless_lost(lambda: self._scaled(func, args, kwargs), lost=True)

    def _scaled(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        self._require_current()
        self._note_written()
        piece = self.owner.gradients.piece(self.flat, self.index)
        if self.flat.spec.updates_below:  # the piece is on the host, and a factor may be on the device
            args = tuple(arg.to(piece.device) if isinstance(arg, Tensor) else arg for arg in args)
        func(piece, *args, **kwargs)
        self.owner.gradients.changed()
        return True

    def norm(self, norm_type: float) -> float | None:
        return self.owner.unless_lost(lambda: self._norm(norm_type), 0.0) if norm_type > 0 else None

    def _norm(self, norm_type: float) -> float:
        self._require_current()
        return self.owner.gradients.norms(self.flat, self.index, norm_type)

    def refuse(self, what: str) -> NoReturn:
        raise StateError(
            f"{self.name} belongs to an engine, and {what} cannot be had; .clone(), on all ranks, gives the values."
        )

    def _require_current(self) -> None:
        gradients = self.owner.gradients
        if gradients.epoch_of(self.flat, self.index) != self.epoch or not gradients.has(self.flat, self.index):
            raise StateError(
                f"{self.name} is gone: gradients were zeroed since it was taken from param.grad. Clone what is to stay."
            )


_UNASKED = {
    "set_": "other memory by set_(), as for a parametrization (add and remove those before shard()),",
    "as_subclass": "its memory, as a tensor of another class,",
    "_use_count": "an exchange of its memory by torch.utils.swap_tensors (param.copy_(values) gives it others)",
}
"""Methods that ask no `__torch_function__`, and what they take; `swap_tensors` calls the last one first."""


def _resolve(known: weakref.ref[Owner]) -> Owner:
    owner = known()
    if owner is None:
        raise StateError(
            "The engine that held this parameter is gone. Build the model anew, and load a state or a checkpoint into "
            "it."
        )
    return owner


def _resting_type(plain: type, owner: Owner) -> type:
    """A subclass of `plain` for `owner`'s parameters at rest, under the same name, which users see."""

    known = weakref.ref(owner)  # weak, because every class is part of a reference cycle

    def home(self: Any) -> ParamHome:
        return _resolve(known).home_of(self)

    def torch_function(
        cls: type,  # noqa: ARG001
        func: Callable[..., Any],
        types: Sequence[type],  # noqa: ARG001
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        owner = known()
        if owner is not None and owner.is_closed and func is Tensor.copy_ and isinstance(args[0], Resting):
            owner.revive(owner.home_of(args[0]))
            return func(*args, **(kwargs or {}))
        return use(func, args, kwargs or {})

    def shown(self: Any) -> str:
        """Involves no other rank, so that debuggers and error messages can show it."""
        slot, dtype = _resolve(known).home_of(self).slot, self.dtype
        about = f"{slot.name} {list(slot.shape)}, {dtype}"
        return f"Parameter {about}, in an engine's memory; engine.get({slot.name!r}) has the values"

    def refuse_copy(self: Any, *_: object) -> NoReturn:
        raise StateError(
            f"{_resolve(known).home_of(self).name} is in an engine's memory, so the model cannot be copied or pickled "
            f"as it is. Build another and load engine.state_dict() into it, on all ranks; engine.save(folder) writes "
            f"checkpoints."
        )

    def refuses(what: str) -> Callable[..., NoReturn]:
        def refuse(self: Any, *_: object, **__: object) -> NoReturn:
            _resolve(known).home_of(self).refuse(what)

        return refuse

    members: dict[str, Any] = {
        **{name: refuses(what) for name, what in _UNASKED.items()},
        "home": home,
        "__torch_function__": classmethod(torch_function),
        "__repr__": shown,
        "__deepcopy__": refuse_copy,
        "__reduce_ex__": refuse_copy,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
    }
    return type(plain)(plain.__name__, (Resting, plain), members)
