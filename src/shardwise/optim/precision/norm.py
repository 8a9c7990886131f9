"""Norms other than the 2-norm. The verdict of every step has that one; these take a message of their own."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence

import torch

from shardwise.comm import Exchange
from shardwise.errors import ConfigError, ModelError
from shardwise.memory import Flat
from shardwise.optim.precision.verdict import copies_of, due_parts

_APART = 1e-2
"""Copies that compute the same differ only by rounding; gradients of parts of a split tensor differ arbitrarily."""


def norm_of(flats: Sequence[Flat], norm_type: float, exchange: Exchange) -> float:
    """The global `norm_type`-norm of the gradients, once they are where the update needs them. All ranks call it, and
    `exchange` is among all of them.

    `inf` gives the largest absolute value. Computes what `torch.nn.utils.get_total_norm` does for a plain model.
    """
    _require_summable(flats, norm_type)
    dues = due_parts(flats)
    if math.isinf(norm_type):
        mine = [float(torch.linalg.vector_norm(due, math.inf)) for due, _ in dues if due.numel()]
        values = _values_of_ranks(max(mine, default=0.0), exchange)
        return math.nan if any(map(math.isnan, values)) else max(values)
    powers = [
        float(torch.linalg.vector_norm(due, norm_type, dtype=torch.float64)) ** norm_type / copies
        for due, copies in dues
    ]
    return float(sum(_values_of_ranks(sum(powers), exchange)) ** (1 / norm_type))


def norms_of(flats: Sequence[Flat], norm_type: float, exchange: Exchange) -> list[float]:
    """The `norm_type`-norm of each parameter's gradient, in the order of `flats` and their parameters. All ranks call
    it, and `exchange` is among those with the same list of parameters.

    Zero for a parameter without a gradient.
    """
    _require_summable(flats, norm_type)
    is_largest = math.isinf(norm_type)
    mine = []
    for flat in flats:
        for index in range(len(flat.slots)):
            piece = flat.grads.due_piece(index) if flat.grads.touched_anywhere[index] else None
            if piece is None or not piece.numel():
                mine.append(0.0)
                continue
            norm = float(torch.linalg.vector_norm(piece.double(), norm_type))
            mine.append(norm if is_largest else norm**norm_type / copies_of(flat, index))
    values = [struct.unpack(f"<{len(mine)}d", message) for message in exchange(struct.pack(f"<{len(mine)}d", *mine))]
    if is_largest:
        return [math.nan if any(map(math.isnan, every)) else max(every) for every in zip(*values, strict=True)]
    return [sum(every) ** (1 / norm_type) for every in zip(*values, strict=True)]


def check_copies(
    flats: Sequence[Flat], copied: Collection[str], among_data: Exchange, among_peers: Exchange
) -> frozenset[str]:
    """Raise `ModelError` on all ranks if copies along a model axis of one of the parameters `copied` have different
    gradients. Returns those that have none yet that would tell: behind a matrix of zeros, or layer scales that begin
    close to zero, all are next to nothing.

    `among_data` is among the ranks that hold the same part of the model, `among_peers` among all ranks with the same
    list of parameters.
    """
    mine = norms_of(flats, 2.0, among_data)
    values = [struct.unpack(f"<{len(mine)}d", message) for message in among_peers(struct.pack(f"<{len(mine)}d", *mine))]
    slots = [slot for flat in flats for slot in flat.slots]
    negligible = 1e-6 * max(math.hypot(*every) for every in values)  # the same on all ranks, which must agree
    untold = set()
    for slot, every in zip(slots, zip(*values, strict=True), strict=True):
        if slot.name in copied and max(every) * _APART <= negligible:
            untold.add(slot.name)
        if slot.name in copied and max(every) - min(every) > _APART * max(every) + negligible:
            raise ModelError(
                f"The gradient of {slot.name} has norms from {min(every):.3g} to {max(every):.3g} on ranks that have "
                f"copies of it. Either they were given different batches, or it works on split tensors: then give "
                f"its module the style summed in tensor.plan, or, if that has others inside, put the parameter into a "
                f"module of its own with that style."
            )
    return frozenset(untold)


def _values_of_ranks(value: float, exchange: Exchange) -> list[float]:
    return [struct.unpack("<d", message)[0] for message in exchange(struct.pack("<d", value))]


def _require_summable(flats: Sequence[Flat], norm_type: float) -> None:
    """See [Note: norms of summands] in `program/spec.py`."""
    if not norm_type > 0:
        raise ConfigError(f"A norm of type {norm_type} cannot be summed over ranks; give a positive one, or inf.")
    if norm_type != 2 and any(flat.spec.num_summands > 1 for flat in flats):
        raise ConfigError(
            f"A norm of type {norm_type} needs the sum of the ranks' gradients, which an optimizer that sends one bit "
            f"per element never forms. Take the 2-norm: its bound is the root mean square of the ranks' norms."
        )
