"""What becomes of tensors that share memory when code assigns one: `param.data = x`, `param.grad = x`.

[Note: assigned memory] In plain PyTorch an assignment gives a parameter, or its gradient, other memory: `x` is that
memory from then on, and what code has of the former one keeps its values. Here the memory belongs to the engine, and an
assignment writes to it. So `Whole`s of the former memory get a copy of its values as their source before, one for all
of them, and if `x` is the former memory of anything, tensors of it have the new owner as their source afterwards. If
`x` is a plain tensor it is copied. A write to it that should have reached the parameter cannot be undone or followed,
but torch counts it, so it is found and refused. A graph made before an assignment needs the former memory: the
assignment counts as a write, which torch finds in the backward, unless the parameter has its memory back by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch

from shardwise.errors import CommError, StateError
from shardwise.sharded.at_rest.handles import Memory, Source, Whole
from shardwise.sharded.at_rest.stage_names import InStage
from shardwise.system.torch_private import set_version

Tensor = torch.Tensor


class Former:
    """Values that a parameter, or a gradient, had before it was given other memory: a `Source`."""

    def __init__(self, before: Source, values: Tensor, version: int) -> None:
        self.before = before
        self.name = f"former values of {before.name}"
        self.use = before.use
        self.values = values
        self._begun_at = values._version
        self._version = version

    def version_in(self, source: Source) -> int | None:
        """How often `source` had been written to when it had this memory, if nobody has written to it since."""
        return self._version if source is self.before and self.values._version == self._begun_at else None

    @property
    def unsplit_shape(self) -> None:
        return None

    @property
    def in_stage(self) -> InStage | None:
        return self.before.in_stage

    @property
    def gathers_again(self) -> None:
        return None

    def note_counted(self) -> None:
        self.before.note_counted()

    @contextmanager
    def opened(self) -> Iterator[Tensor]:
        yield self.values

    def recover(self, error: CommError) -> bool:  # noqa: ARG002
        return False

    def take_over(self, values: Tensor) -> None:  # noqa: ARG002
        """They were written to in place, which `.data` does not count."""
        torch.autograd.graph.increment_version(self.values)

    def scale(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:  # noqa: ARG002
        return False

    def norm(self, norm_type: float) -> float | None:  # noqa: ARG002
        return None

    def refuse(self, what: str) -> NoReturn:
        raise StateError(f"Code asks for {what} of {self.name}. Take a copy with .clone(), which is a plain tensor.")


class Present:
    """The memory that a source has at present, as far as code has tensors of it, and what it was last assigned. `param`
    is the parameter, if it is one's.

    The source has this object, and is given to each call: if they held each other, the buffers of an old plan would
    wait for a garbage collection."""

    def __init__(self, param: Tensor | None = None) -> None:
        self._param = param
        self._memory: weakref.ref[Memory] | None = None
        self._given: list[tuple[weakref.ref[Tensor], int]] = []
        """Plain tensors that would be its memory, and how often they had been written to."""
        self._tied: tuple[Memory, Source] | None = None
        """The memory of another parameter, and that parameter."""

    def memory(self, source: Source) -> Memory:
        known = self._known()
        if known is None:
            known = Memory(source)
            self._memory = weakref.ref(known)
        return known

    def _known(self) -> Memory | None:
        return None if self._memory is None else self._memory()

    def leave(self, source: Source, values: Callable[[], Tensor]) -> None:
        """Called before it is given other memory. `values` gathers a copy of those that it has, on all ranks."""
        memory = self._known()
        self._memory = None
        if memory is None:
            return
        heir, memory.heir = memory.heir, None
        if heir is None:
            version = 0 if self._param is None else self._param._version
            memory.source = Former(source, values(), version)
        else:
            heir(memory)

    def enter(self, source: Source, value: Tensor) -> None:
        """Called after the values of `value`, which it was assigned, have been copied."""
        self._given, self._tied = [], None
        if not isinstance(value, Whole):
            self._watch(value)
        elif isinstance(value.source, Former):
            if value.is_view:
                self._watch(value.source.values)
            else:
                self._take(source, value.memory)
        else:
            self._tied = value.memory, value.source
            if not value.is_view:
                value.memory.heir = partial(self._take, source)

    def _take(self, source: Source, memory: Memory) -> None:
        version = memory.source.version_in(source) if isinstance(memory.source, Former) else None
        if self._param is not None and version is not None:  # graphs made then can be sent back again
            set_version(self._param, version)
        memory.source = source
        self._memory = weakref.ref(memory)

    def _watch(self, value: Tensor) -> None:
        if not value.is_inference():
            shared = [value] if value._base is None else [value, value._base]
            self._given = [(weakref.ref(one), one._version) for one in shared]

    def require_kept(self, source: Source) -> None:
        """Raise, once, if what it was assigned has been written to since, as if that reached it."""
        given = [(ref(), version) for ref, version in self._given]
        if any(tensor is not None and tensor._version != version for tensor, version in given):
            self._given = []
            raise StateError(
                f"Code wrote to a tensor after assigning it as {source.name}. In plain PyTorch the two are the "
                f"same memory from then on; here an assignment copies, so {source.name} has the values of that "
                f"moment. Write first and assign then, or write to the parameter: param.copy_(tensor) under "
                f"torch.no_grad()."
            )

    def require_untied(self, source: Source) -> None:
        """Raise, once, if it was assigned the memory of a parameter that still has it."""
        tied, self._tied = self._tied, None
        if tied is not None and tied[0].source is tied[1]:
            tied[0].heir = None
            raise StateError(
                f"{source.name} was assigned the memory of {tied[1].name}. In plain PyTorch they share it from "
                f"then on; here an assignment copies, and each is trained by itself. To copy, use "
                f"param.copy_(other) under torch.no_grad(); to share, assign the parameter before shard(): "
                f"module.weight = other.weight."
            )
