"""Checks whether a checkpoint belongs to this model and optimizer, before anything of it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.content import Content
from shardwise.checkpoint.index import Index
from shardwise.checkpoint.json_codec import decode, dtype_of
from shardwise.checkpoint.read import Reader
from shardwise.checkpoint.transfer import Read
from shardwise.comm import World
from shardwise.errors import CheckpointError, nearest
from shardwise.optim import AdoptedOptimizer, Cooperative, StateForm, state_keys
from shardwise.plan.placement import Span


def check_same_model(path: Path, reader: Reader, content: Content, world: World) -> None:
    """Raise `CheckpointError` unless names, shapes and ties match."""
    shapes = reader.index.shapes
    for name, shape in content.shapes.items():
        if name in reader.index.ties:
            raise CheckpointError(
                f"In {path} {name} and {reader.index.ties[name]} are tied, but in the model they are two "
                f"tensors. Tie them before shard()."
            )
        if name not in shapes:
            raise CheckpointError(
                f"{path} has no tensor {name}; it is a checkpoint of another model. {nearest(name, shapes)}"
            )
        if tuple(shapes[name]) != shape:
            raise CheckpointError(
                f"{path} has {name} with shape {shapes[name]}, but the model has {list(shape)}. Build the model that "
                f"was saved: `shardwise inspect {path}` lists what it has."
            )
    for name in shapes:
        if name in content.ties:
            _check_tied(path, reader, name, content.ties[name], world)
        elif name not in content.shapes:
            raise CheckpointError(
                f"{path} has a tensor {name} that the model does not have; it is a checkpoint of another model. "
                f"`shardwise inspect {path}` lists what it has."
            )
    for alias, name in content.ties.items():
        if alias in reader.index.ties and reader.index.ties[alias] != name:
            raise CheckpointError(
                f"In {path} {alias} and {reader.index.ties[alias]} are tied, but in the model {alias} and {name} are. "
                f"Tie the same ones before shard()."
            )


def _check_tied(path: Path, reader: Reader, alias: str, name: str, world: World) -> None:
    """Two tensors in the checkpoint can be one in the model only if both are equal; each rank compares a part of
    them."""
    shapes = reader.index.shapes
    numel = math.prod(shapes[alias])
    span = Span(numel * world.rank // world.size, numel * (world.rank + 1) // world.size)
    is_same = shapes[alias] == shapes[name] and torch.equal(_values(reader, alias, span), _values(reader, name, span))
    if not is_same:
        raise CheckpointError(
            f"In the model {alias} and {name} are tied, but {path} has different values for them. Untie them before "
            f"shard(), or make the two equal in the checkpoint."
        )


def _values(reader: Reader, name: str, span: Span) -> torch.Tensor:
    kind = "param" if reader.first_chunk("param", name) is not None else "buffer"
    first = reader.first_chunk(kind, name)
    reads = reader.reads(kind, name, span)
    out = torch.empty(span.numel, dtype=dtype_of(first.dtype) if first is not None else None, device="cpu")
    for read in reads:
        reader.fill(read, out)
    return out


def check_same_groups(path: Path, index: Index, content: Content, optimizer: AdoptedOptimizer | None) -> None:
    """Raise unless the optimizer's groups have the same parameters. A checkpoint of weights alone has no groups."""
    if optimizer is None or not index.groups:
        return
    if len(index.groups) != len(content.groups):
        raise CheckpointError(
            f"The optimizer in {path} has {len(index.groups)} parameter groups, this one has {len(content.groups)}. "
            f"Give it the same groups before: in shard(), or by add_param_group()."
        )
    for number, (saved, own) in enumerate(zip(index.groups, content.groups, strict=True)):
        if "params" not in saved:
            raise CheckpointError(
                f"{path} does not say which parameters group {number} of its optimizer has, so its states cannot be "
                f"loaded into this one. {_weights_alone(path)}"
            )
        odd = sorted(set(saved["params"]) ^ set(own["params"]))
        if odd:
            where = "the checkpoint" if odd[0] in saved["params"] else "this optimizer"
            raise CheckpointError(
                f"Group {number} of the optimizer in {path} has other parameters: {odd[0]} is in it only in {where}. "
                f"Create the optimizer with the same groups."
            )


def check_same_settings(path: Path, index: Index, optimizer: AdoptedOptimizer | None) -> None:
    """Raise unless the settings of the groups, which are the same, are of the same types. Numbers stay numbers, and
    finite. A setting that is `None` on either side may become anything.

    The numbers with which an optimizer of this class was created must be there: this one's would be used instead.
    """
    if optimizer is None:
        return
    for number, saved in enumerate(index.groups):
        group, member = optimizer.groups[number], optimizer.group_owners[number]
        settings = settings_of(saved, member)
        own = member.own_settings if isinstance(member, Cooperative) else frozenset()
        missing = [key for key in member.defaults if _has_numbers(group.get(key)) and key not in settings.keys() | own]
        if missing and index.optimizer == optimizer.kind:
            raise CheckpointError(
                f"Group {number} of the optimizer in {path} has no {missing[0]}, which every {index.optimizer} has: "
                f"the checkpoint was edited, or written by another version of that class. {_weights_alone(path)}"
            )
        for key, value in settings.items():
            if not _fits(value, group.get(key)):
                raise CheckpointError(
                    f"Group {number} of the optimizer in {path} has {key} = {str(value)[:80]!r}, but this one has "
                    f"{group[key]!r}. Create the optimizer with the setting that was saved. {_weights_alone(path)}"
                )


def _has_numbers(value: Any) -> bool:
    """Whether it is a number that an update depends on, or several."""
    if isinstance(value, tuple | list):
        return any(map(_has_numbers, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(value: Any, own: Any) -> bool:
    if _is_not_finite(value) and not (isinstance(own, float) and own == value):  # an infinite limit is none
        return False
    if value is None or own is None:
        return True
    if isinstance(own, bool | int | float) or (isinstance(own, torch.Tensor) and own.numel() == 1):
        is_one = isinstance(value, torch.Tensor) and value.numel() == 1
        return is_one or isinstance(value, bool | int | float)
    if isinstance(own, torch.Tensor):
        return isinstance(value, torch.Tensor) and value.shape == own.shape
    if isinstance(own, tuple | list):
        is_as_long = isinstance(value, tuple | list) and len(value) == len(own)
        return is_as_long and all(map(_fits, value, own))
    return not isinstance(own, str) or isinstance(value, str)


def _is_not_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not bool(torch.isfinite(value).all())
    return isinstance(value, float) and not math.isfinite(value)


def check_same_optimizer(path: Path, reader: Reader, content: Content, optimizer: AdoptedOptimizer | None) -> None:
    """Raise unless this optimizer, with the settings of the checkpoint that it knows, keeps exactly the states that are
    there.

    So `Adam` takes what `AdamW` wrote, and our AdamW what torch's did, but no optimizer silently starts over, or lacks
    a moment.
    """
    index = reader.index
    if optimizer is None or not index.groups:
        return
    is_stateless = True
    given_whole = {piece.name for piece in optimizer.pieces if piece.flat.spec.updates_whole(piece.slot.span)}
    for saved, group, member in zip(index.groups, optimizer.groups, optimizer.group_owners, strict=True):
        known = {key: value for key, value in settings_of(saved, member).items() if _fits(value, group.get(key))}
        settings = {**group, **known}
        dims = {name: len(index.shapes[name]) for name in saved["params"]}
        every = {num_dims: state_keys(member, settings, num_dims) for num_dims in set(dims.values())}
        for name in saved["params"]:
            needed = every[dims[name]]
            there = _keys_there(reader, name)
            if needed is not None and name in given_whole:  # its other states may happen to have its shape
                there, needed = dict.fromkeys(there, "elements"), dict.fromkeys(needed, "elements")
            is_stateless = is_stateless and not there
            if there and needed is not None and there != needed:
                raise _other_optimizer(path, index, content, f"{_describe(there)} for {name}", _describe(needed))
    is_other = index.optimizer not in ("", content.optimizer)
    if is_stateless and is_other and decode(index.state)["num_steps"]:
        raise _other_optimizer(path, index, content, "nothing", "other states")


def settings_of(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The settings of a group that are restored from a checkpoint, decoded."""
    own = optimizer.own_settings if isinstance(optimizer, Cooperative) else frozenset()
    return {key: decode(value) for key, value in saved.items() if key != "params" and key not in own}


def _keys_there(reader: Reader, name: str) -> dict[str, StateForm]:
    """The states of a parameter, and the form of each."""
    numbers = reader.index.numbers.get(name, {})
    kinds = [kind for kind in reader.kinds_of(name) if kind.startswith("state.")]
    keys = {kind.removeprefix("state."): _form_of(reader.whole(kind, name)) for kind in kinds}
    return keys | {key: "number" for key, value in numbers.items() if value is not None}


def _form_of(whole: Read | None) -> StateForm:
    if whole is None:
        return "elements"
    return "whole" if whole.chunk.shape else "number"


def _other_optimizer(path: Path, index: Index, content: Content, there: str, needed: str) -> CheckpointError:
    return CheckpointError(
        f"{path} was written with another optimizer: {index.optimizer or 'it'} kept {there}, but this engine has "
        f"{content.optimizer}, which with those settings keeps {needed}. Give shard() the optimizer that it was. "
        f"{_weights_alone(path)}"
    )


def _weights_alone(path: Path) -> str:
    return f"To start a new run from its weights: shardwise convert {path} NEW --to shardwise --weights-only."


def _describe(keys: Mapping[str, StateForm]) -> str:
    return ", ".join(key + " (not a number)" * (form == "whole") for key, form in sorted(keys.items())) or "nothing"
