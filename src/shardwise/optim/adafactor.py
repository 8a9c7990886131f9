"""Adafactor: second moments of a matrix from those of its rows and columns (arXiv:1804.04235)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from shardwise.optim.cooperative import Cooperative, Params, evaluated, on_device
from shardwise.program import Update, factored_update

Tensor = torch.Tensor
Variant = Literal["torch", "transformers"]


class Adafactor(Cooperative):
    """Adafactor (arXiv:1804.04235), as in `torch.optim.Adafactor` or in transformers.

    Parameters with two or more dimensions keep, instead of a second moment for each element, one for each row and
    column of their last two dimensions: `row_var` of shape `[..., rows, 1]` and `col_var` of shape `[..., 1, columns]`,
    in fp32, whole on every rank with elements of the parameter. Others keep `variance`, of their shape.

    On a sharded model all ranks call `step`. It sums rows and columns of all parameters in one message, and the squares
    of parameters and updates in a second one.

    Arguments up to `weight_decay` are torch's; `d` is `clip_threshold` and `beta2_decay` is `decay_rate` of
    transformers, and the others have its names. The step size is `min(lr, 1/sqrt(step))`; with `warmup_init` it is
    `min(1e-6 * step, 1/sqrt(step))`; with `relative_step=False` it is `lr`. `lr=None` counts as 1e-2. With
    `scale_parameter` it is multiplied by the root mean square of the parameter, or by `eps[1]` if that is larger.
    `beta1` adds a first moment, `exp_avg`.

    `variant` says what the two do differently. `"torch"`: `eps[0]` bounds the estimates (`None`: the machine epsilon of
    the dtype), and weight decay is multiplied by `lr`. `"transformers"`, as in the paper: `eps[0]` is added to squared
    gradients (`None`: 1e-30), and weight decay is multiplied by the parameter's own step size.

    Raises `ValueError` for settings that contradict each other.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | None = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        beta1: float | None = None,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        variant: Variant = "torch",
    ) -> None:
        if variant not in ("torch", "transformers"):
            raise ValueError(f"variant is {variant!r}; it can be 'torch' or 'transformers'.")
        if warmup_init and not relative_step:
            raise ValueError("warmup_init is a relative step size: it needs relative_step=True.")
        if lr is None and not relative_step:
            raise ValueError("relative_step=False needs a step size: give lr.")
        if beta2_decay > 0:
            raise ValueError(f"beta2_decay is {beta2_decay}, but it is the exponent of a decay: 0 or less.")
        settings = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "beta1": beta1,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
            "variant": variant,
        }
        super().__init__(params, settings)

    @classmethod
    def from_transformers(cls, plain: torch.optim.Optimizer) -> Adafactor:
        """An optimizer with the parameters and settings of a transformers' Adafactor, without its states, which
        `load_state_dict` reads."""
        return cls([_group_in_our_names(group) for group in plain.param_groups])

    def update_of(self, param: nn.Parameter, group: Mapping[str, Any]) -> Update:
        return factored_update(tuple(param.shape), has_first_moment=group["beta1"] is not None)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this class, of torch's Adafactor, or of transformers'. Raises `ValueError` for one with
        `maximize=True`, which this class lacks."""
        super().load_state_dict(_in_our_names(state_dict))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. It is computed twice, for its norm and to be applied, so that it need not be stored."""
        loss = evaluated(closure)
        members = list(self.members())
        params = [param for _, param, _ in members]
        grids = [_Grid(self.peers.shape_of(param), self.peers.start_of(param)) for param in params]
        sums = [
            grid.sums(param.grad) if param.grad is not None else torch.zeros(grid.num_sums, device=param.device)
            for param, grid in zip(params, grids, strict=True)
        ]

        def squares_of(summed: Sequence[Tensor]) -> Tensor:
            squares = torch.zeros(len(params), 2, device=params[0].device)
            for number, param, group in members:
                if param.grad is not None:
                    self._follow(param, group, grids[number], summed[number])
                    squares[number, 0] = param.float().square().sum()
                    squares[number, 1] = self._direction(param, group, grids[number]).square().sum()
            return squares

        squares = self.peers.sum_in_turn(params, sums, squares_of)
        for number, param, group in members:
            if param.grad is not None:
                mean = on_device(squares[number], param.device) / max(1, math.prod(grids[number].shape))
                self._apply(param, group, self._direction(param, group, grids[number]), mean.sqrt())
        return loss

    def _follow(self, param: nn.Parameter, group: Mapping[str, Any], grid: _Grid, sums: Tensor) -> None:
        """Update the second moments."""
        state, grad = self.state[param], param.grad
        assert grad is not None
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
            if group["beta1"] is not None:
                state["exp_avg"] = torch.zeros_like(param)
            if grid.is_factored:
                state["row_var"] = torch.zeros(*grid.shape[:-1], 1, device=param.device)
                state["col_var"] = torch.zeros(*grid.shape[:-2], 1, grid.shape[-1], device=param.device)
            else:
                state["variance"] = torch.zeros_like(param)
        state["step"] += 1
        weight = float(state["step"]) ** group["beta2_decay"]  # on the host
        added = _eps(param, group) if group["variant"] == "transformers" else 0.0
        if grid.is_factored:
            rows, cols = torch.split(sums, grid.nums)
            state["row_var"].lerp_(rows.view_as(state["row_var"]).div(grid.shape[-1]).add_(added), weight)
            state["col_var"].lerp_(cols.view_as(state["col_var"]).div(grid.shape[-2]).add_(added), weight)
        else:
            state["variance"].lerp_(grad.square().add_(added), weight)

    def _direction(self, param: nn.Parameter, group: Mapping[str, Any], grid: _Grid) -> Tensor:
        """The gradient divided by the roots of its estimated second moments, in fp32."""
        state, grad = self.state[param], param.grad
        assert grad is not None
        bound = _eps(param, group) if group["variant"] == "torch" else 0.0
        if grid.is_factored:
            means = state["row_var"].mean(dim=-2, keepdim=True).clamp_(min=bound)
            estimate = grid.products(state["row_var"], state["col_var"], means, param.numel()).view_as(grad)
        else:
            estimate = state["variance"].float()
        return estimate.clamp(min=bound * bound).rsqrt_().mul_(grad)

    def _apply(self, param: nn.Parameter, group: Mapping[str, Any], update: Tensor, roots: Tensor) -> None:
        """Update the parameter. `roots` are the root mean squares of the whole parameter and of its whole update."""
        state = self.state[param]
        step_size: Any = _step_size(group, float(state["step"]))
        if group["scale_parameter"]:
            step_size = roots[0].clamp(min=group["eps"][1]) * step_size
        update.mul_(step_size / (roots[1] / group["d"]).clamp_(min=1.0))
        if group["beta1"] is not None:
            update = state["exp_avg"].lerp_(update.to(state["exp_avg"].dtype), 1 - group["beta1"])
        if group["weight_decay"]:
            by = step_size if group["variant"] == "transformers" else _lr(group)
            param.mul_(1 - by * group["weight_decay"])
        param.sub_(update)


def _lr(group: Mapping[str, Any]) -> float:
    return 1e-2 if group["lr"] is None else float(group["lr"])


def _step_size(group: Mapping[str, Any], step: float) -> float:
    """The step size of a group, before it is scaled by a parameter."""
    if not group["relative_step"]:
        return _lr(group)
    return min(1e-6 * step if group["warmup_init"] else _lr(group), 1 / math.sqrt(step))


def _eps(param: Tensor, group: Mapping[str, Any]) -> float:
    eps = group["eps"][0]
    if eps is not None:
        return float(eps)
    return torch.finfo(param.dtype).eps if group["variant"] == "torch" else 1e-30


_NAMES_IN_TRANSFORMERS = {"clip_threshold": "d", "decay_rate": "beta2_decay"}
"""Names of settings there, and here."""
_MISSING_IN_TORCH = {
    "beta1": None,
    "scale_parameter": True,
    "relative_step": True,
    "warmup_init": False,
    "variant": "torch",
}


def _group_in_our_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group of transformers' Adafactor as one of this class."""
    renamed = {_NAMES_IN_TRANSFORMERS.get(key, key): value for key, value in group.items()}
    return {**renamed, "variant": "transformers"}


def _in_our_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state`, with a state of torch's or transformers' Adafactor as this class has it."""
    groups = state["param_groups"]
    if any(group.get("maximize") for group in groups):
        raise ValueError("This state is of an Adafactor with maximize=True, which this one lacks: negate the loss.")
    if not any("clip_threshold" in group for group in groups):
        return {**state, "param_groups": [{**_MISSING_IN_TORCH, **group} for group in groups]}
    states = {number: _state_in_our_names(entry) for number, entry in state["state"].items()}
    return {**state, "state": states, "param_groups": [_group_in_our_names(group) for group in groups]}


def _state_in_our_names(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state, without `RMS`, which is computed in every step."""
    ours: dict[str, Any] = {"step": torch.tensor(float(entry["step"]), device="cpu")}
    if "exp_avg" in entry:
        ours["exp_avg"] = entry["exp_avg"]
    if "exp_avg_sq" in entry:
        return {**ours, "variance": entry["exp_avg_sq"]}
    rows, cols = entry["exp_avg_sq_row"], entry["exp_avg_sq_col"]
    return {**ours, "row_var": rows.unsqueeze(-1), "col_var": cols.unsqueeze(-2)}


@dataclass(frozen=True)
class _Grid:
    """The rows and columns of a parameter of `shape`, of which this rank has consecutive elements from `start` on.

    Dimensions before the last two count matrices. Rows are numbered through all of them.
    """

    shape: tuple[int, ...]
    start: int

    @property
    def is_factored(self) -> bool:
        return bool(self.num_sums)

    @property
    def num_sums(self) -> int:
        return sum(self.nums)

    @property
    def nums(self) -> list[int]:
        """How many rows and how many columns there are in all matrices."""
        if len(self.shape) < 2 or not math.prod(self.shape):
            return [0, 0]
        return [math.prod(self.shape[:-1]), math.prod(self.shape[:-2]) * self.shape[-1]]

    def sums(self, grad: Tensor) -> Tensor:
        """The sums of this rank's squared gradients by row, then by column of the whole, in fp32."""
        sums = torch.zeros(self.num_sums, device=grad.device)
        if not self.is_factored:
            return sums
        num_cols = self.shape[-1]
        lead = self.start % num_cols
        flat = grad.reshape(-1).float()
        tail = -(lead + flat.numel()) % num_cols
        squares = torch.nn.functional.pad(flat, (lead, tail)).view(-1, num_cols).square()
        rows, cols = torch.split(sums, self.nums)
        first = self.start // num_cols
        rows[first : first + len(squares)] = squares.sum(1)
        matrix_of = self._matrix_of(len(squares), grad.device)
        if matrix_of is None:
            cols += squares.sum(0)
        else:
            cols.view(-1, num_cols).index_add_(0, matrix_of, squares)
        return sums

    def products(self, row_var: Tensor, col_var: Tensor, means: Tensor, numel: int) -> Tensor:
        """For this rank's `numel` elements, flat: the row's value times the column's, divided by the matrix's mean."""
        num_cols = self.shape[-1]
        first, last = self.start // num_cols, -(-(self.start + numel) // num_cols)
        rows, cols, means = row_var.view(-1, 1)[first:last], col_var.view(-1, num_cols), means.view(-1, 1)
        matrix_of = self._matrix_of(last - first, row_var.device)
        if matrix_of is not None:
            cols, means = cols[matrix_of], means[matrix_of]
        lead = self.start % num_cols
        return (rows * cols).div_(means).view(-1)[lead : lead + numel]

    def _matrix_of(self, num_rows: int, device: torch.device) -> Tensor | None:
        """The matrix of each of this rank's rows, or `None` if there is only one."""
        if math.prod(self.shape[:-2]) == 1:
            return None
        first = self.start // self.shape[-1]
        return torch.arange(first, first + num_rows, device=device).div_(self.shape[-2], rounding_mode="floor")
