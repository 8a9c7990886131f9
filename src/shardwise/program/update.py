"""What the update of a parameter requires: its states, and how much of it must be in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.plan.placement import WIDTH, Dtype, Span


@dataclass(frozen=True)
class States:
    """What an optimizer keeps for one parameter.

    `copies` tensors of its size in the dtype of the row `optim` (Adam: 2), plus `element_bytes` per element, plus
    `block_bytes` per block of `block` elements, counted from the parameter's first, plus `whole_bytes` on every rank
    with elements of it.
    """

    copies: int = 0
    element_bytes: int = 0
    block: int = 1
    block_bytes: int = 0
    whole_bytes: int = 0

    def num_bytes(self, span: Span, dtype: Dtype) -> int:
        """Bytes for elements `span` of the parameter."""
        if not span.numel:
            return 0
        blocks = -(-span.stop // self.block) - span.start // self.block
        by_element = self.copies * WIDTH[dtype] + self.element_bytes
        return span.numel * by_element + blocks * self.block_bytes + self.whole_bytes


@dataclass(frozen=True)
class Update:
    """How one parameter is updated. The default is elementwise, wherever its elements lie.

    `needs_norm`: it needs two norms over the whole parameter. `num_sums`: before these, it needs that many sums over
    parts of the whole parameter, such as its rows and columns. `matrix`: (rows, columns), if the whole matrix must be
    on one rank; it is sent there and orthogonalized in `dtype`. `whole`: if every rank must have the parameter whole
    and in its shape, why, in sentences for the user. `sends_signs`: once it takes `summands`, each rank reads its own
    summand of the gradient, and what the update makes of it is averaged over the ranks, one bit per element
    (`sign_exchange.py`); before, the ranks' gradients are summed as for any other.
    """

    states: States = States()
    needs_norm: bool = False
    num_sums: int = 0
    matrix: tuple[int, int] | None = None
    dtype: Dtype = "bf16"
    whole: str | None = None
    sends_signs: bool = False
    summands: bool = False

    @property
    def looks_further(self) -> bool:
        """Whether it needs more of a parameter than each element, which one optimizer of a step may."""
        return self.needs_norm or self.matrix is not None or self.sends_signs


@dataclass(frozen=True)
class PlacedUpdate:
    """The update of the parameter that lies at `span` of a flat buffer."""

    span: Span
    update: Update

    def ranges(self, numel: int) -> list[int]:
        """The numbers of the ranges of `numel` elements that the parameter lies in; of those that it fills, as many as
        differ in how its blocks lie in them."""
        first, last = self.span.start // numel, max(0, self.span.stop - 1) // numel
        block = self.update.states.block
        filled = min(last, first + 1 + block // math.gcd(block, numel))
        return [first, *range(first + 1, filled), *([last] if last > first else [])]


SMALL_NUMEL = 4096
"""Parameters with fewer elements keep their 8-bit states in the row's dtype, as in arXiv:2110.02861."""
BLOCK = 256
"""Elements that share a scale in 8-bit states. The paper uses 2048; its authors' library now uses 256."""


def state_of(dtype: str, num_states: int, numel: int) -> States:
    """`num_states` states of a parameter of `numel` elements, each kept in `dtype`: fp32, bf16 or int8."""
    if dtype == "bf16":
        return States(element_bytes=2 * num_states)
    if dtype == "int8" and numel >= SMALL_NUMEL:
        return States(element_bytes=num_states, block=BLOCK, block_bytes=num_states * WIDTH["fp32"])
    return States(copies=num_states)


def factored_update(shape: tuple[int, ...], *, has_first_moment: bool = False) -> Update:
    """Adafactor's update of a parameter of `shape`: of two or more dimensions, it keeps a second moment for each row
    and each column of the last two."""
    first = int(has_first_moment)
    if len(shape) < 2 or not math.prod(shape):
        return Update(States(copies=first + 1), needs_norm=True)
    num_sums = math.prod(shape[:-2]) * (shape[-2] + shape[-1])
    return Update(States(first, whole_bytes=num_sums * WIDTH["fp32"]), needs_norm=True, num_sums=num_sums)


OPTIMIZERS: dict[str, str] = {
    "sgd": "SGD without momentum: no state",
    "momentum": "SGD with momentum: 1 state",
    "adam": "Adam: 2 states",
    "adamw": "AdamW: 2 states",
    "adamw-bf16": "AdamW with bf16 states (shardwise.optim.AdamW)",
    "adamw-int8": "AdamW with 8-bit states (shardwise.optim.AdamW)",
    "lamb": "shardwise.optim.Lamb: 2 states, norms of whole parameters",
    "adafactor": "shardwise.optim.Adafactor: a state per row and column, norms of whole parameters",
    "lion": "shardwise.optim.Lion: 1 state",
    "onebit-adam": "shardwise.optim.OneBitAdam after its warm-up: 2 states and residuals, whole on each rank",
    "onebit-lamb": "shardwise.optim.OneBitLamb after its warm-up: 3 states and residuals, whole on each rank",
    "zero-one-adam": "shardwise.optim.ZeroOneAdam in a step that sends one bit per element: 2 states and residuals",
    "muon": "shardwise.optim.Muon: hidden matrices whole, 1 state; AdamW for the others",
}


def update_by(optimizer: str, shape: tuple[int, ...], *, is_hidden: bool) -> Update:
    """How the optimizer called `optimizer`, a key of `OPTIMIZERS`, updates a parameter of `shape`.

    `is_hidden`: it is neither an embedding nor the head.
    """
    numel = math.prod(shape)
    match optimizer:
        case "sgd":
            return Update()
        case "momentum" | "lion":
            return Update(States(copies=1))
        case "adamw-bf16" | "adamw-int8":
            return Update(state_of(optimizer.removeprefix("adamw-"), 2, numel))
        case "lamb":
            return Update(States(copies=2), needs_norm=True)
        case "onebit-adam" | "onebit-lamb" | "zero-one-adam":
            return Update(States(copies=3 if optimizer == "onebit-lamb" else 2), sends_signs=True, summands=True)
        case "adafactor":
            return factored_update(shape)
        case "muon" if is_hidden and len(shape) == 2:
            return Update(States(copies=1), matrix=(shape[0], shape[1]))
    return Update(States(copies=2))
