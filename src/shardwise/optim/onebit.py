"""Optimizers that send one bit per element once they have warmed up: 1-bit Adam (arXiv:2102.02888), 1-bit LAMB
(arXiv:2104.06069) and 0/1 Adam (arXiv:2202.06009).

[Note: after the warm-up] For `freeze_step` steps the ranks' gradients are summed as usual. Then the variance is frozen,
gradients are not summed any more, and each rank moves the momentum by its own; what is averaged over the ranks is the
momentum, in signs (`sign_mean.py`). The table changes with that (`Table.summands`), and so does the program, once,
before the next forward (`changes_update`). With 0/1 Adam it changes more often, because it sums gradients in ever fewer
steps of its warm-up; in the others it averages them, in signs.

None of them corrects the bias of the moments, as in the papers and in DeepSpeed. An element whose variance is zero at
the end of the warm-up never had a gradient; divided by almost nothing, the sign that is sent for it would move it
without bound. So would it where the gradient is nothing but rounding: keys in a fused bias of queries, keys and values,
which softmax does not see, went 20,000 rates in a step. Such elements, `NEXT_TO_NONE` beside the mean variance of their
parameter, keep a momentum of zero. In DeepSpeed they need an `exp_avg_mask`, which a group may have here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, StateError
from shardwise.optim.cooperative import Cooperative, Params, evaluated, on_device
from shardwise.program import States, Update

Tensor = torch.Tensor
NEXT_TO_NONE = 1e-8
"""Of a variance: a sign would move such an element 10,000 times as far as others."""


class _OneBit(Cooperative):
    """What they have in common: momenta that are averaged over the ranks, by signs after `freeze_step` steps."""

    changes_update = True
    own_settings = frozenset({"exp_avg_mask"})  # the script makes it of the model, and a checkpoint's would be as large
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, params: Params, freeze_step: int, defaults: dict[str, Any], name: str = "freeze_step") -> None:
        """`name` is what the user calls `freeze_step`."""
        if type(freeze_step) is not int or freeze_step < 1:
            raise ConfigError(
                f"{name} is {freeze_step!r}. It is the number of steps in which the variance is learned, at least 1; "
                f"DeepSpeed advises 15 to 25 % of all steps."
            )
        self.freeze_step = freeze_step
        self._freeze_name = name
        self._num_steps = 0
        super().__init__(params, defaults)

    @property
    def is_frozen(self) -> bool:
        """Whether the warm-up is over. The same on all ranks."""
        return self._num_steps >= self.freeze_step

    @property
    def learns_variance(self) -> bool:
        """Whether the next step sums gradients, and learns from the sum. The same on all ranks."""
        return not self.is_frozen

    def update_of(self, param: nn.Parameter, group: Mapping[str, Any]) -> Update:  # noqa: ARG002
        return Update(
            States(copies=len(self.moments)),
            whole=f"{type(self).__name__} averages momenta of whole parameters over the ranks, one bit per element.",
            sends_signs=True,
            summands=not self.learns_variance,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. All ranks call."""
        loss = evaluated(closure)
        members = [(param, group) for _, param, group in self.members() if param.grad is not None]
        was_frozen, learns = self.is_frozen, self.learns_variance
        averages_gradients = not (was_frozen or learns)
        if was_frozen:
            self._require_variances([param for param, _ in members])
        if self._num_steps == self.freeze_step:
            self.peers.forget_residuals()  # those of gradients
        if averages_gradients:
            self._average_gradients([param for param, _ in members])
        for param, group in members:
            num_summands = 1 if averages_gradients else self.peers.num_summands(param)
            self._follow(param, group, num_summands, learns=learns)
        if not averages_gradients:
            self.peers.average({param: self.state[param]["exp_avg"] for param, _ in members})
        for param, group in members:
            if not learns:
                _mask(self.state[param], group)
            self._update(param, group, is_frozen=was_frozen)
        return loss

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def begin_again(self, num_steps: int) -> None:
        super().begin_again(num_steps)
        self._num_steps = num_steps

    def accept_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> None:
        super().accept_state(param, state)
        self._note_steps(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returns. It has no residuals, so averages begin without them, as in DeepSpeed;
        checkpoints of the engine have them."""
        super().load_state_dict(state_dict)
        self._num_steps = 0
        for _, param, _ in self.members():
            self._note_steps(self.state.get(param, {}))

    def _note_steps(self, state: Mapping[str, Any]) -> None:
        self._num_steps = max(self._num_steps, int(state.get("step", 0)))

    def _require_variances(self, params: Sequence[nn.Parameter]) -> None:
        unknown = next((param for param in params if not self.state.get(param)), None)
        if unknown is not None:
            raise StateError(
                f"A parameter of shape {self.peers.shape_of(unknown)} has its first gradient after the warm-up of "
                f"{type(self).__name__} ({self.freeze_step} steps, {self._freeze_name}), in which its variance should "
                f"have been learned. Make {self._freeze_name} larger, or give it to another optimizer beside this one."
            )

    def _average_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Replace each rank's summands of the mean gradients by what the ranks have together."""
        grads = {param: param.grad for param in params if param.grad is not None}
        for param, grad in grads.items():
            grad.mul_(self.peers.num_summands(param))
        self.peers.average(grads)

    def _follow(self, param: nn.Parameter, group: Mapping[str, Any], num_summands: int, *, learns: bool) -> None:
        """Update the moments with the gradient, or with this rank's, which is `num_summands` times its summand of the
        mean."""
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
            state.update({name: torch.zeros_like(param) for name in self.moments}, **self._first_numbers())
        beta1, beta2 = group["betas"]
        state["step"] += 1
        self._note_steps(state)
        state["exp_avg"].mul_(beta1).add_(param.grad, alpha=(1 - beta1) * num_summands)
        if learns:
            state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)

    def _first_numbers(self) -> dict[str, Any]:
        """States that are numbers, before the first step."""
        return {}

    def _update(self, param: nn.Parameter, group: Mapping[str, Any], *, is_frozen: bool) -> None:  # noqa: ARG002
        """Adam's."""
        param.add_(_direction(param, self.state[param], group), alpha=-group["lr"])


class OneBitAdam(_OneBit):
    """1-bit Adam (arXiv:2102.02888): Adam for `freeze_step` steps, then one bit per element of what it sends.

    After its warm-up it sends about a thirty-second of what a sum of fp32 gradients does. It needs whole parameters on
    each rank, as with the preset `ddp`. Weight decay is decoupled. Settings have DeepSpeed's names and defaults. Raises
    `ConfigError` for a `freeze_step` that is no number of steps.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, freeze_step, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


class ZeroOneAdam(_OneBit):
    """0/1 Adam (arXiv:2202.06009), without local steps: ranks average in every step, so that parameters stay the same.

    For `var_freeze_step` steps it learns the variance, from sums of gradients: first in every step, after
    `var_update_scaler` of these in every second one, after as many in every fourth, and so on. In the steps between
    gradients are averaged by one bit per element, and only the momentum follows them. Then it goes on as 1-bit Adam. It
    needs whole parameters on each rank, as with the preset `ddp`. Weight decay is decoupled. Settings have DeepSpeed's
    names and defaults. Raises `ConfigError` for a `var_freeze_step` or `var_update_scaler` that is no number of steps.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if type(var_update_scaler) is not int or var_update_scaler < 1:
            raise ConfigError(
                f"var_update_scaler is {var_update_scaler!r}. It is the number of steps that learn the variance until "
                f"their interval doubles, at least 1."
            )
        self.var_update_scaler = var_update_scaler
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, var_freeze_step, defaults, "var_freeze_step")

    @property
    def learns_variance(self) -> bool:
        step = self._num_steps + 1
        return not self.is_frozen and step % self._interval_at(step) == 0

    def _interval_at(self, step: int) -> int:
        """From one step that learns the variance to the next, when `step` is taken."""
        interval, last = 1, 0
        while step > (last := (last // interval + self.var_update_scaler) * interval):
            interval *= 2
        return interval


class OneBitLamb(_OneBit):
    """1-bit LAMB (arXiv:2104.06069): LAMB for `freeze_step` steps, then one bit per element of what it sends.

    In the warm-up it learns each parameter's ratio of norms, as an average with `coeff_beta`. Afterwards it multiplies
    that by how much the variance, estimated from averaged momenta, has shrunk since: from `factor_min` to
    `factor_max`, and changing by at most a share of `factor_threshold` from step to step. `min_coeff` and `max_coeff`
    are bounds of the ratio in the warm-up. It needs whole parameters on each rank, as with the preset `ddp`. Settings
    have DeepSpeed's names and defaults. Raises `ConfigError` for a `freeze_step` that is no number of steps.
    """

    moments = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")

    def __init__(  # noqa: PLR0913  # DeepSpeed's
        self,
        params: Params,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        bounds = {"max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta}
        factors = {"factor_max": factor_max, "factor_min": factor_min, "factor_threshold": factor_threshold}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **bounds, **factors}
        self._before: dict[nn.Parameter, Tensor] = {}
        """Momenta before the present step."""
        super().__init__(params, freeze_step, defaults)

    def begin_again(self, num_steps: int) -> None:
        super().begin_again(num_steps)
        self._before.clear()

    def _first_numbers(self) -> dict[str, Any]:
        return {"lamb_coeff_freeze": torch.tensor(0.0, device="cpu"), "last_factor": torch.tensor(1.0, device="cpu")}

    def _follow(self, param: nn.Parameter, group: Mapping[str, Any], num_summands: int, *, learns: bool) -> None:
        if not learns and self.state[param]:
            self._before[param] = self.state[param]["exp_avg"].clone()
        super()._follow(param, group, num_summands, learns=learns)

    def _update(self, param: nn.Parameter, group: Mapping[str, Any], *, is_frozen: bool) -> None:
        state = self.state[param]
        direction = _direction(param, state, group)
        ratio = self._frozen_ratio(param, direction, group) if is_frozen else self._ratio(param, direction, group)
        if not is_frozen:  # in each step, as the parameter may have no gradient in the last
            state["exp_avg_sq_fresh"].copy_(state["exp_avg_sq"])
        param.sub_(direction.mul_(on_device(ratio, param.device)).mul_(group["lr"]))

    def _ratio(self, param: nn.Parameter, direction: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Of two norms, as in LAMB, in the warm-up. Its average is kept."""
        state, beta = self.state[param], group["coeff_beta"]
        of_param, of_direction = torch.linalg.vector_norm(param), torch.linalg.vector_norm(direction)
        is_known = (of_param != 0) & (of_direction != 0)
        bounded = (of_param / of_direction).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where(is_known, bounded, 1.0)
        average, found = state["lamb_coeff_freeze"], on_device(ratio, state["lamb_coeff_freeze"].device)
        average.copy_(torch.where(found == 1.0, average, beta * average + (1 - beta) * found))
        return ratio

    def _frozen_ratio(self, param: nn.Parameter, direction: Tensor, group: Mapping[str, Any]) -> Tensor:
        """That average, times how much the variance has shrunk since it was frozen."""
        state, (beta1, beta2) = self.state[param], group["betas"]
        before = self._before.pop(param, None)
        gradient = state["exp_avg"] - (beta1 * before if before is not None else 0.0)
        fresh = state["exp_avg_sq_fresh"].mul_(beta2)
        fresh.addcmul_(gradient, gradient, value=(1 - beta2) / (1 - beta1) ** 2)
        frozen_root = state["exp_avg_sq"].sqrt().add_(group["eps"])
        factor = torch.where(_moves(state), frozen_root / fresh.sqrt().add_(group["eps"]), 1.0).max()
        if group["weight_decay"]:  # the decay does not shrink with the variance
            adaptive = torch.linalg.vector_norm(state["exp_avg"] / frozen_root)
            share = (adaptive / torch.linalg.vector_norm(direction)).clamp(max=1.0)
            factor = factor * share + (1 - share)
        last, step = state["last_factor"], group["factor_threshold"]
        factor = on_device(factor, last.device).clamp(group["factor_min"], group["factor_max"])
        last.copy_(torch.minimum(torch.maximum(factor, last * (1 - step)), last * (1 + step)))
        ratio: Tensor = state["lamb_coeff_freeze"] * last
        return ratio


def _direction(param: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    direction: Tensor = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(group["eps"])
    return direction.add_(param, alpha=group["weight_decay"]) if group["weight_decay"] else direction


def _moves(state: Mapping[str, Any]) -> Tensor:
    """Which elements are moved by signs: see [Note: after the warm-up]."""
    variance: Tensor = state["exp_avg_sq"]
    return variance > NEXT_TO_NONE * variance.mean()


def _mask(state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Drop the momenta of elements that have none: see [Note: after the warm-up]."""
    state["exp_avg"].mul_(_moves(state))
    mask = group.get("exp_avg_mask")
    if mask is not None:
        state["exp_avg"].mul_(on_device(mask, state["exp_avg"].device))
