"""Parameters of which ranks have built different values, before all take the first rank's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.comm import DataGroup
from shardwise.errors import ModelError, some
from shardwise.init.deferred import is_deferred
from shardwise.init.tape import tensor_bytes

_MARKS = ("tensor_model_parallel", "model_parallel")
"""What Megatron-LM, apex and fairscale set on a parameter of which each rank has a part."""
_MOST_COMPARED = 256
_MOST_SHOWN = 3
_CURE = "build whole layers on all ranks, and let the plan split them (mesh: {tp: 2}, docs/tensor-parallel.md)"


@dataclass(frozen=True)
class Overwritten:
    """What to tell somebody whose ranks have built different values; empty sentences if there is nothing to say."""

    now: str = ""
    if_forward_communicates: str = ""
    """To be said when the model's forward calls a collective of torch.distributed."""


@dataclass(frozen=True)
class _Told:
    """What a rank tells of one parameter."""

    digest: str
    """Of some of its elements."""
    is_constant: bool
    mark: str
    """The attribute that says that it is a part; empty without one."""


def what_is_overwritten(model: nn.Module, data_group: DataGroup) -> Overwritten:
    """What to say of parameters of which ranks have built different values, and will all have the first rank's. All
    ranks must call. Raises `ModelError` on all of them for such parameters that are marked as parts.

    [Note: layers split by hand] Ranks that draw their models with different seeds take the first rank's values, as
    under DistributedDataParallel, and nothing is said. A script that has split layers over ranks itself, as Megatron-LM
    does, has parameters with the same names and shapes and with values of each rank's own, too. Mostly others beside
    them are drawn alike everywhere; that is also how a new head looks that was not seeded, beside weights from a file,
    hence a warning. If nothing is alike, collectives in the forward give it away, though a loss over the features of
    all ranks has them too. If one rank alone has other values than all the rest, it has read them for all.
    """
    mine = [] if _has_no_values(model) else [_told(param) for param in model.parameters()]
    message = json.dumps([vars(one) for one in mine]).encode()
    digests = data_group.exchange(hashlib.sha256(message).digest(), "values")
    if len(set(digests)) == 1:
        return Overwritten()
    ranks = [[_Told(**one) for one in json.loads(told)] for told in data_group.exchange(message, "values of ranks")]
    if not all(ranks):
        return Overwritten()
    different, same = [], []
    for (name, _), told in zip(model.named_parameters(), zip(*ranks, strict=True), strict=True):
        is_different = len({one.digest for one in told}) > 1
        if is_different and (mark := told[0].mark):
            raise _part_refused(name, mark)
        if is_different:
            different.append(name)
        elif not told[0].is_constant:
            same.append(name)
    if not different or _one_alone_differs(ranks):
        return Overwritten()
    built = f"The ranks have built different values of {some(different, _MOST_SHOWN)}"
    then = (
        f"All have rank {data_group.rank_at(0)}'s now, as under DistributedDataParallel. If these were parts of layers "
        f"that the script splits over ranks itself, {_CURE}; if they were drawn at random, seed torch alike on all "
        f"ranks before."
    )
    if same:
        return Overwritten(f"{built}, and the same of {some(same, _MOST_SHOWN)}. {then}")
    return Overwritten(if_forward_communicates=f"{built}, and the model's forward calls collectives. {then}")


def _has_no_values(model: nn.Module) -> bool:
    return any(param.is_meta or is_deferred(param) for param in model.parameters())


def _told(param: nn.Parameter) -> _Told:
    elements = param.detach().reshape(-1)
    some = bytes(tensor_bytes(elements[:: max(1, elements.numel() // _MOST_COMPARED)]))
    first = some[: param.element_size()]
    is_constant = some == first * (len(some) // max(1, len(first)))
    mark = next((mark for mark in _MARKS if getattr(param, mark, False)), "")
    return _Told(hashlib.sha256(some).hexdigest()[:16], is_constant, mark)


def _one_alone_differs(ranks: Sequence[Sequence[_Told]]) -> bool:
    """Whether all ranks but one, of more than two, have the same values."""
    kinds = [tuple(one.digest for one in told) for told in ranks]
    return len(kinds) > 2 and max(kinds.count(kind) for kind in kinds) == len(kinds) - 1


def _part_refused(name: str, mark: str) -> ModelError:
    return ModelError(
        f"Parameter {name} is marked as a part of a layer that is split over ranks ({mark}), and the ranks have "
        f"different values of it. shard() takes the parameters that it is given for whole ones, and would give all "
        f"ranks the part of the first. Leave the splitting out: {_CURE}."
    )
