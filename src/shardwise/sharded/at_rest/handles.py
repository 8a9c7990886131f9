"""Tensors that stand for whole tensors of a sharded model and hold no values; values are gathered when they are needed.

[Note: whole tensors] `param.data`, `param.detach()`, a `state_dict()` and `param.grad` give such a tensor for a
parameter at rest. It has the values at the time of reading, like a tensor that shares the parameter's memory, and what
is written to it reaches every rank. Views of it remember how they were made, and share its `Memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch

from shardwise.errors import CommError, StateError
from shardwise.memory import AtRest
from shardwise.sharded.at_rest.stage_names import InStage
from shardwise.system.torch_private import tree_leaves

Tensor = torch.Tensor
CALLED_BY_TORCH = {"__torch_function__": "an access to a whole tensor"}
"""See `comm/watch/journal.py`."""
_META = torch.device("meta")
_DEVICE = torch.ops.prim.device.default
Step = Callable[[Tensor], Tensor]
"""Makes a view of its base."""


class Source(Protocol):
    """What holds the values of a `Whole`."""

    @property
    def name(self) -> str:
        """In words: `h.0.weight`, `the gradient of h.0.weight`."""
        ...

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of `func` when it is called with a handle of this source."""
        ...

    @property
    def unsplit_shape(self) -> tuple[int, ...] | None:
        """The shape of the unsplit tensor, of which it yields a part; `None` if it yields all of it."""
        ...

    @property
    def in_stage(self) -> InStage | None:
        """The parameter whose values, or those of whose gradient, it has, if the model is in pipeline stages."""
        ...

    def note_counted(self) -> None:
        """A loop has asked how many elements it has."""
        ...

    def opened(self) -> AbstractContextManager[Tensor]:
        """Yields the whole values. All ranks enter."""
        ...

    @property
    def gathers_again(self) -> Home | None:
        """What a backward has to ask for the values that `opened` yields, if their memory goes when it ends."""
        ...

    def recover(self, error: CommError) -> bool:
        """`opened` has raised `error`, and nothing is open: returns whether it can be called again, in a job that goes
        on when ranks are lost."""
        ...

    def take_over(self, values: Tensor) -> None:
        """Take over `values`, as yielded by `opened`, after they were written to. All ranks call it."""
        ...

    def scale(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Apply `func(elements, *args, **kwargs)` to this rank's elements alone; returns False if that is not
        possible."""
        ...

    def norm(self, norm_type: float) -> float | None:
        """The norm, if it can be computed without gathering the values."""
        ...

    def refuse(self, what: str) -> NoReturn:
        """Raise the error for code that asks for `what` of the memory."""
        ...


class Home(Source, Protocol):
    """The source of a parameter."""

    @property
    def param(self) -> torch.nn.Parameter: ...
    @property
    def is_computing(self) -> bool:
        """Whether the model's forward or a backward is running."""
        ...

    @property
    def weight_outside(self) -> float:
        """How often a gradient counts that does not come through the model."""
        ...

    @property
    def has_lost_backward(self) -> Callable[[CommError | None], bool]:
        """See `Owner.has_lost_backward`."""
        ...

    def added_up(self, of_part: Tensor) -> Tensor:
        """The sum over the unsplit tensor, from that over the part that `opened` yields. All ranks call."""
        ...

    def require_open(self) -> None:
        """Raise unless the engine still holds the parameter."""
        ...

    def reach(self) -> None:
        """Called when a computation reads the parameter, which stays whole until that computation is over."""
        ...

    def seen(self, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        """The view that autograd saved of the parameter, while it is whole."""
        ...

    def num_writes(self) -> int:
        """How often the parameter has been written to in place."""
        ...

    def require_gradient(self) -> None:
        """Raise if the parameter is meant to train and has no memory for its gradient."""
        ...

    def require_unwritten(self, num_writes: int) -> None:
        """Raise if the number of writes is not `num_writes` any more: a computation must not write to it."""
        ...

    def whole(self, steps: tuple[Step, ...] = ()) -> Whole: ...
    def assign(self, value: Tensor) -> None:
        """`param.data = value`."""
        ...

    def gradient(self) -> Whole | None: ...
    def set_gradient(self, value: Tensor | None) -> None: ...
    def note_wish(self, *, trains: bool) -> None: ...
    def note_hook(self) -> None:
        """Code has put a hook on its gradient."""
        ...

    def refuse_hook(self) -> NoReturn: ...


class Resting(AtRest):
    """A parameter at rest that knows its `Home`."""

    __slots__ = ()

    def home(self) -> Home:
        raise NotImplementedError


class Memory:
    """What tensors that share memory in plain PyTorch have in common: an assignment gives all of them another source
    at once ([Note: assigned memory] in `assigned.py`)."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.heir: Callable[[Memory], None] | None = None
        """Called, in place of keeping its values, when its source leaves this memory: it was assigned to another."""


def uncounted(values: Tensor) -> Tensor:
    """The step of `.data`: the same memory, but writes are not counted, so that autograd does not see them."""
    return values.data


class Whole(torch.Tensor):
    """A tensor with a shape, a dtype and a device whose values are with the source of `memory`."""

    memory: Memory
    steps: tuple[Step, ...]
    shown_device: torch.device

    @staticmethod
    def __new__(
        cls, memory: Memory, steps: tuple[Step, ...], like: Tensor, device: torch.device | None = None
    ) -> Whole:
        """With the shape, strides and dtype of `like`; on its device unless `device` is given."""
        # To torch it is on the meta device, so that `plain.data = whole`, which asks no subclass, is refused as one of
        # incompatible types; with the device below, `plain` would have the address 0, and its next reader crashes.
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=_META, dispatch_device=True
        )
        assert isinstance(made, Whole)
        made.memory, made.steps, made.shown_device = memory, steps, device or like.device
        return made

    def __init__(self, *_: object) -> None:
        """`__new__` does everything."""

    @property
    def source(self) -> Source:
        return self.memory.source

    @property
    def is_view(self) -> bool:
        """Whether it may be another part or shape than its memory has."""
        return any(step is not uncounted for step in self.steps)

    def seen_in(self, values: Tensor) -> Tensor:
        """This view of the source's `values`."""
        for step in self.steps:
            values = step(values)
        return values

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Involves no other rank, so that debuggers and error messages can show it."""
        about = f"{self.source.name}, {list(self.shape)}, {self.dtype}"
        return f"<{about}, in an engine's memory; .clone(), on all ranks, has the values>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = self.clone()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Whole))
        return first.source.use(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is not typed as it is called
        cls,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> torch.device:
        if func is _DEVICE:
            return args[0].shown_device  # type: ignore[no-any-return]
        if (
            getattr(func, "namespace", "") == "c10d"
        ):  # below torch.distributed's functions, of which 2.11 asks only some
            raise StateError(
                f"{func} is given a tensor of a sharded model that holds no values here, by a collective that does not "
                f"ask tensors first (in torch 2.11 those but all_reduce, all_gather and all_to_all_single; a method of "
                f"a process group). Give it a copy and write that back, on all ranks: values = p.data.clone(); "
                f"dist.broadcast(values, src=0); p.data.copy_(values)."
            )
        raise StateError(
            f"{func} reads a tensor of a sharded model that holds no values here, and does it below the functions of "
            f"PyTorch that know how to gather them. Give it a copy: tensor.clone(), on all ranks. If it is a wrapper "
            f"that spreads a model over ranks by itself (DistributedDataParallel, Trainer, accelerator.prepare), leave "
            f"it out: the engine does that."
        )


def source_of(handle: Resting | Whole) -> Source:
    """What has the values of `handle`."""
    return handle.source if isinstance(handle, Whole) else handle.home()
