"""Conversions of a model's modules, before its units are chosen.

[Note: conversions] Some modules have to compute otherwise than the plain model's: batch norms over the rows of all
ranks, layers that multiply in fewer bits, heads whose logits never exist whole. They are converted here, once, before
anything asks for the model's modules or parameters. So units, tables, optimizers, rehearsals and checkpoints see the
converted model, and none of them knows of conversions. What splits a model along `tp` and `ep` comes later and is no
conversion: it lies below the table, as boxes, and needs memory that has been laid out.

- *Modules* are converted in place: the object stays, at its path and with its hooks, and gets another class. Rules and
  units name classes by name, so the new one keeps the name that users know, if it can.
- *Parameters and buffers* keep their names, shapes and dtypes, and parameters stay the same objects, because the user's
  optimizer has them. `convert` checks this.
- *Checkpoints*, `state_dict`, `save_pretrained` and images of lost ranks therefore need no translation: the plain model
  loads what the converted one has saved, and the other way round. A conversion that stores other tensors (a frozen base
  as codes and scales) has to bring that translation along, for `Access.state_dict` and `Access.load_state_dict`, where
  whole tensors leave an engine and enter it, and for `checkpoint.content_of`, from which checkpoints are written. Its
  codes need nothing else: as frozen integer parameters they are sharded, gathered, saved and resumed already.
- *Messages* of converted modules are sent along `Line`s, which count and note them, and which `connect` sets anew for
  each mesh. Inside `engine.inference()` ranks run at their own pace, so nothing is sent there (`suspended`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from shardwise.comm import Line
from shardwise.errors import ConfigError, ModelError, some
from shardwise.parallel.batch_norm import SyncedBatchNorms
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh

Lines = tuple[Line, ...]


class Conversion(Protocol):
    """One kind of conversion. A new one is a class like this, and an entry in `conversions_of`."""

    what: str
    """What converted modules are, in words, for reports."""
    communicates: bool
    """Whether a forward sends along the replica axes. Its backward then gives a rank gradients of other ranks'
    losses."""

    def takes(self, path: str, module: nn.Module) -> bool:
        """Whether `module` is to be converted. Raises `ModelError` if it should be and cannot."""
        ...

    def convert(self, module: nn.Module) -> Callable[[], object]:
        """Convert it in place; returns what undoes that."""
        ...

    def check_device(self, device: torch.device) -> None:
        """Raise `ConfigError` if converted modules cannot compute on `device`."""
        ...

    def connect(self, module: nn.Module, lines: Lines) -> None:
        """Let a converted module send along `lines`, from now on; along none, it computes alone."""
        ...

    def note_update(self, module: nn.Module) -> None:
        """A step has updated the parameters of a converted module."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Lines for reports, such as which modules are not converted, and why."""
        ...


def conversions_of(plan: Plan, model: nn.Module) -> tuple[Conversion, ...]:
    """The conversions for `plan`. Raises `ModelError` for one that `model` cannot have, and `ConfigError` for settings
    that do not fit it."""
    found: list[Conversion] = [SyncedBatchNorms()]  # only plans that ask for the others load them
    if plan.fp8.recipe is not None:
        from shardwise.parallel.fp8.conversion import Fp8Layers

        found.append(Fp8Layers(model, plan))
    if plan.loss.logits == "chunked":
        from shardwise.parallel.chunked_logits.conversion import ChunkedHeads

        chunk = plan.loss.chunk
        found.append(ChunkedHeads(model, chunk if isinstance(chunk, int) else None))
    return tuple(found)


@dataclass(frozen=True)
class ConvertedModule:
    """A module, how it was converted, and what undoes that."""

    path: str
    module: nn.Module
    conversion: Conversion
    undo: Callable[[], object]


@dataclass
class Converted:
    """The converted modules of one model."""

    modules: tuple[ConvertedModule, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    """All that were asked for, with modules or without."""
    _lines: Lines = ()

    @property
    def communicates(self) -> bool:
        """Whether backwards bring gradients of other ranks' losses."""
        return any(one.conversion.communicates for one in self.modules)

    @property
    def lines(self) -> Lines:
        """Along which the modules send."""
        return self._lines

    def within(self, model: nn.Module) -> Converted:
        """Those that a rank with some stages of the model has; the others become plain again."""
        present = set(model.modules())
        for one in reversed(self.modules):
            if one.module not in present:
                one.undo()
        return Converted(tuple(one for one in self.modules if one.module in present), self.conversions)

    def of_copy(self, model: nn.Module) -> Converted:
        """Those of a copy of the model, for rehearsals."""
        modules = tuple(replace(one, module=model.get_submodule(one.path)) for one in self.modules)
        return Converted(modules, self.conversions)

    def connect(self, mesh: Mesh, line_of: Callable[[str], Line]) -> None:
        """Let the modules send to the ranks of `mesh` that have other rows of the batch, or other tokens; `line_of`
        makes the line along an axis."""
        self._connect(tuple(line_of(axis) for axis in mesh.replica_axes if mesh.size(axis) > 1))

    def note_update(self) -> None:
        """A step has updated parameters."""
        for one in self.modules:
            one.conversion.note_update(one.module)

    def _connect(self, lines: Lines) -> None:
        self._lines = lines
        for one in self.modules:
            one.conversion.connect(one.module, lines)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the modules compute alone."""
        lines = self._lines
        self._connect(())
        try:
            yield
        finally:
            self._connect(lines)

    def undo(self) -> None:
        """Make the modules plain again."""
        for one in reversed(self.modules):  # a module may have been converted twice
            one.undo()
        self.modules = ()

    def __str__(self) -> str:
        """One line for each kind, such as `batch norms over the rows of all ranks: bn1 and 2 more`, and its notes."""
        paths: dict[str, list[str]] = {}
        for one in self.modules:
            paths.setdefault(one.conversion.what, []).append(one.path)
        kinds = (f"{what}: {some(which, 1)}" for what, which in paths.items())
        notes = (note for conversion in self.conversions for note in conversion.notes())
        return "".join(f"{line}\n" for line in (*kinds, *notes))


def convert(model: nn.Module, conversions: Sequence[Conversion]) -> Converted:
    """Convert the modules of the plain `model` in place; see [Note: conversions].

    Raises `ModelError` if that is impossible, and leaves the model as it was.
    """
    found = [
        (path, module, conversion)
        for path, module in model.named_modules()
        for conversion in conversions
        if conversion.takes(path, module)
    ]
    converted = Converted(conversions=tuple(conversions))
    try:
        for path, module, conversion in found:
            before = _state(module)
            one = ConvertedModule(path, module, conversion, conversion.convert(module))
            converted.modules += (one,)
            _require_same_state(one, before, _state(module))
    except BaseException:
        converted.undo()
        raise
    return converted


def check_plan(converted: Converted, plan: Plan) -> None:
    """Raise `ConfigError` for a plan that the converted modules cannot follow."""
    path = next((one.path for one in converted.modules if one.conversion.communicates), None)
    if plan.compile is not None and path is not None:
        raise ConfigError(
            f"compile needs units whose modules do not communicate, and {path} sums over ranks. Leave compile out of "
            f"the plan, or give {path} the rows of its rank alone (nn.BatchNorm2d in the place of nn.SyncBatchNorm)."
        )


def check_device(converted: Converted, device: torch.device) -> None:
    """Raise `ConfigError` for a device on which the converted modules cannot compute."""
    for conversion in converted.conversions:
        conversion.check_device(device)


State = dict[str, tuple[object, tuple[int, ...], torch.dtype]]


def _state(module: nn.Module) -> State:
    """Shapes and dtypes of its own parameters and buffers by name, and the parameters themselves."""
    params = {name: param for name, param in module._parameters.items() if param is not None}
    buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
    return {
        **{name: (param, tuple(param.shape), param.dtype) for name, param in params.items()},
        **{name: (None, tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()},
    }


def _require_same_state(one: ConvertedModule, before: State, after: State) -> None:
    odd = [name for name in {**before, **after} if not _is_same(before.get(name), after.get(name))]
    if odd:
        raise ModelError(
            f"The conversion of {one.path} to {one.conversion.what} changes {', '.join(odd)}. A conversion keeps "
            f"names, shapes, dtypes and parameters, so that optimizers and checkpoints are those of the plain model."
        )


def _is_same(
    before: tuple[object, tuple[int, ...], torch.dtype] | None,
    after: tuple[object, tuple[int, ...], torch.dtype] | None,
) -> bool:
    return before is not None and after is not None and before[0] is after[0] and before[1:] == after[1:]
