"""Where the elements of each parameter and state are in the files of a DeepSpeed checkpoint, for each stage."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.formats.checked_dicts import CheckedDict, at, expected, shapes_in
from shardwise.checkpoint.formats.opcodes import Made
from shardwise.checkpoint.formats.pickles import plain_items
from shardwise.checkpoint.formats.source import PARAM, Spec
from shardwise.checkpoint.formats.torch_files import load_file
from shardwise.errors import CheckpointError
from shardwise.system.safe_files import inside

Tensor = torch.Tensor
Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Parts:
    """A tensor as ranges of flat ones, in the order of its elements; elements after its end are padding."""

    parts: tuple[Tensor, ...]

    def read(self, spec: Spec) -> Tensor:
        there = sum(part.numel() for part in self.parts)
        if there < spec.numel:
            raise CheckpointError(
                f"{spec.kind} {spec.name} has {there} of {spec.numel} elements; the checkpoint is incomplete."
            )
        whole = torch.empty(spec.numel, dtype=spec.dtype, device="cpu")
        filled = 0
        for part in self.parts:
            taken = min(part.numel(), spec.numel - filled)
            whole[filled : filled + taken] = part.reshape(-1)[:taken]
            filled += taken
        return whole.view(spec.shape)


@dataclass(frozen=True)
class OwnFile:
    """A tensor in a separate file, as in a universal checkpoint."""

    path: Path

    def read(self, spec: Spec) -> Tensor:
        tensor = _universal_tensor(self.path)
        if tensor.numel() != spec.numel or tensor.dtype != spec.dtype:
            raise CheckpointError(f"{self.path} has another shape or dtype than when it was opened.")
        return tensor.reshape(spec.shape).clone()


Pieces = dict[Spec, Parts | OwnFile]


def spec_of(kind: str, name: str, shape: tuple[int, ...], tensor: Tensor) -> Spec:
    return Spec(kind, name, shape, tensor.dtype)


def shape_groups(model: CheckedDict) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes by parameter group; in stage 3 by sub-group."""
    if isinstance(model.values.get("param_shapes"), dict):
        return [shapes_in(model.inner("param_shapes"))]
    return [shapes_in(CheckedDict(group, model.where)) for group in model.each("param_shapes", dict)]


# -- the optimizer --------------------------------------------------------------------------------------


def _hyper(group: CheckedDict, names: list[str]) -> dict[str, Any]:
    """A parameter group as torch has it; `step`, which Apex keeps in groups, is a state of each parameter."""
    settings = {key: value for key, value in group.values.items() if key not in ("params", "step")}
    plain, _ = plain_items(settings)
    return {**plain, **{key: settings[key] for key in plain if isinstance(settings[key], tuple)}, "params": names}


def _scalars(entry: CheckedDict, group: CheckedDict) -> dict[str, Tensor]:
    """States that are one number for all parameters of a group, as tensors, like those of torch's optimizers."""
    found = {key: value for key, value in entry.values.items() if not isinstance(value, Tensor) or value.dim() == 0}
    if "step" not in entry and isinstance(group.values.get("step"), int | float | Tensor):
        found["step"] = group.values["step"]
    numbers = {key: value for key, value in found.items() if isinstance(value, int | float | Tensor)}
    return {
        f"state.{key}": torch.as_tensor(value, dtype=torch.float32, device="cpu")
        for key, value in numbers.items()
        if not isinstance(value, Tensor) or (value.numel() == 1 and not value.is_complex())
    }


def _vectors(entry: CheckedDict, flat: Tensor) -> dict[str, Tensor]:
    """The flat group itself and states of its size, or of its padded size."""
    states = {
        f"state.{key}": value
        for key, value in entry.values.items()
        if isinstance(value, Tensor) and value.dim() == 1 and value.numel() >= flat.numel()
    }
    return {PARAM: flat, **states}


def _flat(tensor: Tensor, where: str) -> Tensor:
    if tensor.dim() != 1:
        raise CheckpointError(f"{where} is damaged: a group of parameters in it is not flat.")
    return tensor


class _Found:
    """Ranges of flat tensors by parameter and kind, in rank order."""

    def __init__(self, *, is_padded: bool) -> None:
        self._is_padded = is_padded
        self._parts: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self._scalars: dict[str, dict[str, Tensor]] = defaultdict(dict)

    def add(
        self, name: str, vectors: dict[str, Tensor], start: int, numel: int, scalars: dict[str, Tensor], where: str
    ) -> None:
        for kind, flat in vectors.items():
            if not 0 <= start <= start + numel <= flat.numel():
                raise CheckpointError(f"{where} is damaged: {kind} of {name!a:.200} lies outside its group.")
            self._parts[name][kind].append(flat[start : start + numel])
        self._scalars[name].update(scalars)

    def pieces(self, shapes: dict[str, tuple[int, ...]], folder: Path) -> Pieces:
        pieces: Pieces = {}
        for name, shape in shapes.items():
            if name not in self._parts:
                raise CheckpointError(f"{name} is in no *_optim_states.pt; the checkpoint is incomplete.")
            for kind, parts in self._parts[name].items():
                there, wanted = sum(part.numel() for part in parts), math.prod(shape)
                if there < wanted or (there > wanted and not self._is_padded):
                    raise CheckpointError(
                        f"{folder} has {there} of {wanted} elements of {kind} {name}; the checkpoint is incomplete, or "
                        f"damaged."
                    )
                pieces[spec_of(kind, name, shape, parts[0])] = Parts(tuple(parts))
            for kind, one in self._scalars[name].items():
                pieces[spec_of(kind, name, (), one)] = Parts((one,))
        return pieces


# -- stages 1 and 2 -------------------------------------------------------------------------------------


def stages_1_and_2(folder: Path, model: CheckedDict, optims: list[CheckedDict]) -> tuple[Pieces, Groups]:
    if "param_slice_mappings" not in optims[0]:
        raise CheckpointError(f"{folder} was written by a DeepSpeed older than 0.7; load and save it with a newer one.")
    found = _Found(is_padded=False)
    for optim in optims:
        where = optim.where
        flats = optim.each("single_partition_of_fp32_groups", Tensor)
        groups = _base_groups(optim)
        for number, slices in enumerate(optim.each("param_slice_mappings", dict)):
            group = at(groups, number, where, "parameter groups")
            entry = _base_state(optim, number, group)
            vectors = _vectors(entry, _flat(at(flats, number, where, "groups of weights"), where))
            for name, address in slices.items():
                start, numel = _address(address, where)
                found.add(expected(name, str, where, "a name"), vectors, start, numel, _scalars(entry, group), where)
    listed = shape_groups(model)
    pieces = found.pieces({name: shape for group in listed for name, shape in group.items()}, folder)
    base = _base_groups(optims[0])
    if len(base) != len(listed):
        raise CheckpointError(
            f"{folder} is damaged: it has {len(listed)} groups of parameters and {len(base)} settings."
        )
    return pieces, [_hyper(group, list(owned)) for group, owned in zip(base, listed, strict=True)]


def _address(address: Any, where: str) -> tuple[int, int]:
    made = expected(address, Made, where, "the place of a parameter")
    start, numel = made.field("start"), made.field("numel")
    return expected(start, int, where, "the start of a parameter"), expected(numel, int, where, "its length")


def _base_state(optim: CheckedDict, number: int, group: CheckedDict) -> CheckedDict:
    """The wrapped optimizer's state of a flat group: by its number, or in a list if the checkpoint is elastic."""
    if isinstance(optim.values.get("base_optimizer_state"), list):
        return CheckedDict(at(optim.each("base_optimizer_state", dict), number, optim.where, "states"), optim.where)
    params = group.each("params", int)
    return optim.inner("base_optimizer_state").inner("state").inner_or_empty(at(params, 0, optim.where, "parameters"))


def _base_groups(optim: CheckedDict) -> list[CheckedDict]:
    if isinstance(optim.values.get("base_optimizer_state"), list):  # an elastic checkpoint has no hyper-parameters
        return [CheckedDict({}, optim.where) for _ in optim.values["base_optimizer_state"]]
    base = optim.inner("base_optimizer_state")
    return [CheckedDict(group, optim.where) for group in base.each("param_groups", dict)]


# -- stage 3 --------------------------------------------------------------------------------------------


def stage_3(folder: Path, model: CheckedDict, optims: list[CheckedDict]) -> tuple[Pieces, Groups]:
    if optims[0].values.get("ds_zero_partition_groups"):
        raise CheckpointError("The checkpoint has experts split over ranks (AutoEP), which cannot be imported.")
    sub_groups = shape_groups(model)
    owners = {sub: group for group in _z3_groups(optims[0]) for sub in group.each("params", int)}
    found = _Found(is_padded=True)
    for optim in optims:
        flats = optim.each("fp32_flat_groups", Tensor)
        states = optim.inner("optimizer_state_dict").inner("state")
        for number, shapes in enumerate(sub_groups):
            entry = states.inner_or_empty(number)
            flat = _flat(at(flats, number, optim.where, "groups of weights"), optim.where)
            scalars = _scalars(entry, owners.get(number, CheckedDict({}, optim.where)))
            for name, start, numel in _walk(shapes, len(optims)):
                found.add(name, _vectors(entry, flat), start, numel, scalars, optim.where)
    pieces = found.pieces({name: shape for group in sub_groups for name, shape in group.items()}, folder)
    return pieces, _groups_of_stage_3(model, optims[0])


def _walk(shapes: dict[str, tuple[int, ...]], num_ranks: int) -> Iterator[tuple[str, int, int]]:
    """Where each parameter's part begins in a rank's flat sub-group, and its length."""
    start = 0
    for name, shape in shapes.items():
        numel = -(-math.prod(shape) // num_ranks)
        yield name, start, numel
        start += numel


def _z3_groups(optim: CheckedDict) -> list[CheckedDict]:
    return [CheckedDict(group, optim.where) for group in optim.inner("optimizer_state_dict").each("param_groups", dict)]


def _groups_of_stage_3(model: CheckedDict, optim: CheckedDict) -> Groups:
    """A parameter group consists of several sub-groups in stage 3, given by their numbers."""
    sub_groups = shape_groups(model)
    return [
        _hyper(
            group,
            [name for sub in group.each("params", int) for name in at(sub_groups, sub, optim.where, "sub-groups")],
        )
        for group in _z3_groups(optim)
    ]


# -- universal ------------------------------------------------------------------------------------------


def universal(folder: Path, model: CheckedDict) -> tuple[Pieces, Groups, CheckedDict]:
    """One folder for each parameter, with a file for the master weight and for each state; and the optimizer's own.

    Frozen parameters have such a folder only if the checkpoint was of stage 1 or 2.
    """
    home = inside(folder, "zero")
    groups = shape_groups(model)
    pieces: Pieces = {}
    frozen = shapes_in(model.inner_or_empty("frozen_param_shapes"))
    trained = {name: shape for group in groups for name, shape in group.items()}
    for name, shape in (*trained.items(), *frozen.items()):
        place = inside(home, name)
        if not (place / "fp32.pt").is_file():
            if name in frozen:
                continue
            raise CheckpointError(f"{place} has no fp32.pt; the checkpoint is incomplete.")
        for file in sorted(place.glob("*.pt")):
            tensor = _universal_tensor(inside(place, file.name))
            kind = PARAM if file.stem == "fp32" else f"state.{file.stem}"
            if tensor.dim() and tensor.numel() != math.prod(shape):
                raise CheckpointError(f"{file} has {tensor.numel()} elements instead of {math.prod(shape)}.")
            pieces[spec_of(kind, name, shape if tensor.dim() or kind == PARAM else (), tensor)] = OwnFile(file)
    path = inside(home, "optimizer_state.pt")
    state = CheckedDict.of(load_file(path), str(path))
    if "fp32_flat_groups" in state:
        return pieces, _groups_of_stage_3(model, state), state
    settings = [CheckedDict(group, state.where) for group in state.each("param_groups", dict)]
    if len(settings) != len(groups):
        raise CheckpointError(f"{path} is damaged: it has {len(settings)} settings for {len(groups)} groups.")
    return pieces, [_hyper(group, list(owned)) for group, owned in zip(settings, groups, strict=True)], state


def _universal_tensor(file: Path) -> Tensor:
    held = load_file(file)
    tensor = held.get("param") if isinstance(held, dict) else held
    if isinstance(tensor, int | float):
        return torch.tensor(float(tensor), device="cpu")
    return expected(tensor, Tensor, str(file), "its tensor")
