"""What the update of a parameter requires: its states, and how much of it must be in one place."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.placement import WIDTH, Dtype, Span


@dataclass(frozen=True)
class States:
    """What an optimizer keeps for one parameter.

    `copies` tensors of its size in the dtype of the row `optim` (Adam: 2), plus `element_bytes` per element, plus
    `block_bytes` per block of `block` elements, counted from the parameter's first.
    """

    copies: int = 0
    element_bytes: int = 0
    block: int = 1
    block_bytes: int = 0

    def num_bytes(self, span: Span, dtype: Dtype) -> int:
        """Bytes for elements `span` of the parameter."""
        blocks = -(-span.stop // self.block) - span.start // self.block if span.numel else 0
        return span.numel * (self.copies * WIDTH[dtype] + self.element_bytes) + blocks * self.block_bytes


@dataclass(frozen=True)
class Update:
    """How one parameter is updated. The default is elementwise, wherever its elements lie.

    `needs_norm`: it needs two norms over the whole parameter. `matrix`: (rows, columns), if the whole matrix must be on
    one rank; it is sent there and orthogonalized in `dtype`.
    """

    states: States = States()
    needs_norm: bool = False
    matrix: tuple[int, int] | None = None
    dtype: Dtype = "bf16"


@dataclass(frozen=True)
class PlacedUpdate:
    """The update of the parameter that lies at `span` of a flat buffer."""

    span: Span
    update: Update


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


OPTIMIZERS: dict[str, str] = {
    "sgd": "SGD without momentum: no state",
    "momentum": "SGD with momentum: 1 state",
    "adamw": "AdamW: 2 states",
    "adamw-bf16": "AdamW with bf16 states (shardwise.optim.AdamW)",
    "adamw-int8": "AdamW with 8-bit states (shardwise.optim.AdamW)",
    "lamb": "shardwise.optim.Lamb: 2 states, norms of whole parameters",
    "lion": "shardwise.optim.Lion: 1 state",
    "muon": "shardwise.optim.Muon: hidden matrices whole, 1 state; AdamW for the others",
}


def update_by(optimizer: str, shape: tuple[int, ...], *, is_hidden: bool) -> Update:
    """How the optimizer called `optimizer`, a key of `OPTIMIZERS`, updates a parameter of `shape`.

    `is_hidden`: it is neither an embedding nor the head.
    """
    numel = 1
    for size in shape:
        numel *= size
    match optimizer:
        case "sgd":
            return Update()
        case "momentum" | "lion":
            return Update(States(copies=1))
        case "adamw-bf16" | "adamw-int8":
            return Update(state_of(optimizer.removeprefix("adamw-"), 2, numel))
        case "lamb":
            return Update(States(copies=2), needs_norm=True)
        case "muon" if is_hidden and len(shape) == 2:
            return Update(States(copies=1), matrix=(shape[0], shape[1]))
    return Update(States(copies=2))
