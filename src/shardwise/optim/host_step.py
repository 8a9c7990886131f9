"""A step of torch's Adam or AdamW over pieces on the host, by the one-pass kernel of `host_adam.py`.

States are created and kept in torch's form, so that updates by either may follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.memory import Flat, torch_dtype
from shardwise.optim.host_adam import TORCHS_ADAMS, AdamTensors, HostAdam
from shardwise.optim.piece import Piece, span_in_masters
from shardwise.program import step_parameters

Tensor = torch.Tensor


def takes(member: torch.optim.Optimizer, pieces: Sequence[Piece]) -> bool:
    """Whether the kernel applies: to torch's Adam or AdamW with `fused=True`, or with the choice of kernel left to
    torch."""
    if type(member) not in TORCHS_ADAMS:
        return False
    if any(getattr(member, name, None) is not None for name in ("grad_scale", "found_inf")):  # by torch's GradScaler
        return False
    if any(piece.tensor.dtype not in (torch.float32, torch.float64) for piece in pieces):
        return False
    return all(
        not group.get("foreach")
        and group.get("fused") in (None, True)
        and (group.get("fused") or group.get("foreach") is None)
        and not group.get("capturable")
        and not group.get("differentiable")
        for group in member.param_groups
    )


def step(
    member: torch.optim.Optimizer, pieces: Sequence[Piece], adam: HostAdam, outgoing: Tensor | None = None
) -> None:
    """Update those of `pieces` that have a gradient, with the settings of their groups.

    `outgoing`, as long as their flat buffer's master weights, receives the updated values, cast, in the same pass over
    memory.
    """
    wanted: dict[Tensor, Piece] = {piece.tensor: piece for piece in pieces if piece.tensor.grad is not None}
    for group in member.param_groups:
        by_step: dict[int, list[AdamTensors]] = {}
        for param in (param for param in group["params"] if param in wanted):
            state = member.state[param]
            if not state:
                _begin(state, wanted[param], group)
            state["step"] += 1
            by_step.setdefault(int(state["step"]), []).append(_tensors(wanted[param], state, outgoing))
        for number, every in by_step.items():
            adam.update(every, group, step=number)


def _begin(state: dict[str, Any], piece: Piece, group: dict[str, Any]) -> None:
    """States that lie on a disk are created in the buffer from which they are written there."""
    param, rows = piece.tensor, piece.flat.rows
    state["step"] = torch.tensor(0.0, device="cpu")
    for key in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())):
        if rows is None or not piece.flat.spec.updates_from_disk:
            state[key] = torch.zeros_like(param)
        else:
            state[key] = rows.view(piece.index, key, param.numel(), param.dtype).zero_()


def _tensors(piece: Piece, state: dict[str, Any], outgoing: Tensor | None) -> AdamTensors:
    param = piece.tensor
    assert param.grad is not None
    out = None if outgoing is None else outgoing[piece.in_masters.as_slice]
    maxima = state.get("max_exp_avg_sq")
    return AdamTensors(param.detach(), param.grad, state["exp_avg"], state["exp_avg_sq"], maxima, out)


def outgoing_of(flat: Flat, pieces: Sequence[Piece]) -> Tensor | None:
    """Memory for the cast of `flat` after an update of all of it; `None` if nothing has to be cast, or not all is
    updated."""
    if not any((action.verb, action.subject) == ("cast", "outgoing") for action in step_parameters(flat.spec)):
        return None
    stop = 0
    for span in sorted(
        (piece.in_masters for piece in pieces if piece.tensor.grad is not None), key=lambda one: one.start
    ):
        if span.start != stop:
            return None
        stop = span.stop
    if any(span.numel and span.stop > stop for span in (span_in_masters(flat, slot.span) for slot in flat.slots)):
        return None
    if flat.outgoing is None:
        flat.outgoing = flat.host.buffer(flat.optim_span.numel, torch_dtype(flat.spec.table.param.dtype))
    flat.outgoing[stop:].zero_()
    return flat.outgoing
