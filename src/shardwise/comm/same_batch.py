"""Checks that ranks that share a sample were given the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from shardwise.comm.line import Line
from shardwise.errors import DataError

Tensor = torch.Tensor
_MOST_NAMED = 4


def require_same_batch(tensors: Mapping[str, Tensor], line: Line) -> None:
    """Raise `DataError` on all ranks of `line` unless their tensors have the same names, shapes, dtypes and values.

    All ranks of the line call. Blocks, and reads the values.
    """
    mine = {name: _digest(tensor) for name, tensor in tensors.items()}
    messages = [json.loads(message) for message in line.exchange(json.dumps(mine).encode())]
    other = next((place for place, theirs in enumerate(messages) if theirs != messages[0]), None)
    if other is None:
        return
    names = [name for name in {**messages[0], **messages[other]} if messages[0].get(name) != messages[other].get(name)]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    raise DataError(
        f"Ranks {line.ranks[0]} and {line.ranks[other]} share each sample along the mesh axis {line.axis!r}, but were "
        f"given different batches: {', '.join(names[:_MOST_NAMED])}{more} differ. Deal batches by data axes: "
        f"sw.data.Loader(..., world=engine.data_ranks), or in a loop of your own by engine.data_ranks, which is "
        f"(place, number)."
    )


def _digest(tensor: Tensor) -> str:
    """A short text, equal for equal values of one shape and dtype."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    values = hashlib.blake2b(data, digest_size=8).hexdigest()
    return f"{tensor.dtype} {list(tensor.shape)} {values}"
