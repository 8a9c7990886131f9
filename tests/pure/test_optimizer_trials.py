"""What is found out about optimizers of unknown classes, before anything is sharded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.optim import vet

Tensor = torch.Tensor
Rule = Callable[["Own", nn.Parameter, Tensor, dict[str, Any]], Tensor]


class Own(torch.optim.Optimizer):
    """Momentum, whose update `rule(self, param, update, state)` may change."""

    def __init__(self, params: Any, rule: Rule = lambda _, param, update, state: update, **settings: Any) -> None:
        super().__init__(params, {"lr": 0.1, **settings})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    update = state.setdefault("m", torch.zeros_like(param)).mul_(0.9).add_(param.grad).clone()
                    param.sub_(self.rule(self, param, update, state), alpha=group["lr"])


def all_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param.grad for group in optimizer.param_groups for param in group["params"]]


def clipped(optimizer: Own, _: nn.Parameter, update: Tensor, __: dict[str, Any]) -> Tensor:
    """Never in a trial: its gradients are far below."""
    norm = torch.stack([grad.norm() for grad in all_of(optimizer)]).norm()
    return update * min(1.0, 1e6 / float(norm))


def late(_: Own, __: nn.Parameter, update: Tensor, state: dict[str, Any]) -> Tensor:
    return update / update.norm() if state["step"] > 40 else update


def by_setting(optimizer: Own, _: nn.Parameter, update: Tensor, state: dict[str, Any]) -> Tensor:
    return update - update.mean() if state["step"] % optimizer.param_groups[0]["every"] == 0 else update


def large(_: Own, param: nn.Parameter, update: Tensor, __: dict[str, Any]) -> Tensor:
    return update - update.mean() if param.numel() > 4096 else update


def centralized(_: Own, __: nn.Parameter, update: Tensor, ___: dict[str, Any]) -> Tensor:
    return update - update.mean(dim=(1, 2), keepdim=True) if update.dim() > 2 else update


def projected(_: Own, param: nn.Parameter, update: Tensor, __: dict[str, Any]) -> Tensor:
    along = (update * param).sum()
    return update - param * along / param.square().sum() if along.abs() < 1e-9 else update


def adapted(optimizer: Own, _: nn.Parameter, update: Tensor, __: dict[str, Any]) -> Tensor:
    return update * float(sum(grad.abs().sum() for grad in all_of(optimizer)))


def by_shape(_: Own, param: nn.Parameter, update: Tensor, __: dict[str, Any]) -> Tensor:
    return update / math.sqrt(param.shape[0])


def by_neighbours(_: Own, __: nn.Parameter, update: Tensor, ___: dict[str, Any]) -> Tensor:
    return update + torch.cat([update[1:], update[:1]])


def in_numpy(_: Own, __: nn.Parameter, update: Tensor, ___: dict[str, Any]) -> Tensor:
    return update * float(abs(update.numpy()).max())


FURTHER: dict[str, tuple[Rule, dict[str, Any], str]] = {
    "a clip by the norm of all gradients": (clipped, {}, "aten::linalg_vector_norm"),
    "a warm-up from 0": (lambda _, param, update, __: update * param.norm(), {"lr": 0.0}, "aten::linalg_vector_norm"),
    "a late start": (late, {}, "aten::linalg_vector_norm"),
    "every 37 steps": (by_setting, {"every": 37}, "aten::mean"),
    "large parameters": (large, {}, "aten::mean"),
    "convolutions": (centralized, {}, "aten::mean.dim"),
    "a projection under a condition": (projected, {}, "aten::sum"),
    "an estimate over all parameters": (adapted, {}, "aten::sum"),
    "shapes": (by_shape, {}, "differently from its pieces"),
    "neighbours": (by_neighbours, {}, "aten::slice.Tensor"),
    "NumPy": (in_numpy, {}, "Tensor.numpy"),
}


def model() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.Linear(90, 100), nn.Linear(5, 1))


@pytest.mark.parametrize("name", FURTHER)
def test_what_looks_further_than_one_element_needs_whole_parameters(name: str) -> None:
    rule, settings, words = FURTHER[name]
    net = model()
    updates = vet([Own(net.parameters(), rule, **settings)], net)
    assert set(updates) == set(net.parameters())
    assert all(words in (update.whole or "") for update in updates.values())


def masked(_: Own, __: nn.Parameter, update: Tensor, ___: dict[str, Any]) -> Tensor:
    update[update.abs() < 0.1] = 0
    return torch.where(update > 1, update.sign(), update.clamp(min=-1)).abs_()


@pytest.mark.parametrize("rule", [masked, lambda _, param, update, state: (update / state["step"]).lerp(param, 0.1)])
def test_an_elementwise_one_of_any_class_gets_pieces(rule: Rule) -> None:
    net = model()
    before = [param.detach().clone() for param in net.parameters()]
    optimizer = Own(net.parameters(), rule)
    updates = vet([optimizer], net)
    assert all(update.whole is None and update.states.copies == 1 for update in updates.values())
    assert not optimizer.state
    assert all(map(torch.equal, before, net.parameters()))


def test_one_group_that_looks_further_is_enough() -> None:
    """A sum over all parameters would miss those of the other groups."""
    net = model()
    groups = [{"params": net[0].parameters(), "every": 10**9}, {"params": net[1].parameters(), "every": 37}]
    updates = vet([Own(groups, lambda own, param, update, state: by_setting(own, param, update, state))], net)
    assert all(update.whole for update in updates.values())


def test_many_groups_that_differ_in_rates_alone_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.optim import proof

    tried: list[Any] = []
    found = proof.tried
    monkeypatch.setattr(proof, "tried", lambda *args: tried.append(args) or found(*args))
    net = model()
    vet([Own([{"params": [param], "lr": 0.1 * n} for n, param in enumerate(net.parameters())])], net)
    assert len(tried) == 1


class Derived(torch.optim.AdamW):
    """Trusted no more than any other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1e9)
        super().step(closure)


class Wrapper(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner


class Holder(torch.optim.Optimizer):
    """Updates parameters of a list of its own."""

    def __init__(self, params: Any) -> None:
        self.held = list(params)
        super().__init__(self.held, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.held:
            if param.grad is not None:
                param.sub_(param.grad)


class WithClosure(Own):
    """Does with the closure what `calls` says."""

    def __init__(self, params: Any, calls: Callable[[WithClosure, Any], object]) -> None:
        super().__init__(params)
        self.calls = calls

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            self.calls(self, closure)
        super().step()


def moved(own: WithClosure, closure: Any) -> None:
    with torch.no_grad():
        own.param_groups[0]["params"][0].mul_(2)
    closure()


def by_loss(own: WithClosure, closure: Any) -> None:
    own.param_groups[0]["lr"] = 0.1 * float(closure())


def counted(own: Own, _: nn.Parameter, update: Tensor, __: dict[str, Any]) -> Tensor:
    own.state["num"] = {"all": 1}  # type: ignore[index]  # as MADGRAD's
    return update


def listed(_: Own, __: nn.Parameter, update: Tensor, state: dict[str, Any]) -> Tensor:
    state["past"] = [update]
    return update


REFUSED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "random numbers": (
        lambda params: Own(params, lambda _, __, update, ___: update + torch.randn_like(update)),
        "draws random numbers",
    ),
    "a wrapper": (lambda params: Wrapper(torch.optim.SGD(params, lr=0.1)), "wraps another optimizer \\(its inner\\)"),
    "a list of its own": (Holder, "does not update the parameters of its param_groups"),
    "several losses": (lambda params: WithClosure(params, lambda _, closure: (closure(), closure())), "several times"),
    "a loss elsewhere": (lambda params: WithClosure(params, moved), "at other parameters"),
    "a step by the loss": (lambda params: WithClosure(params, by_loss), "reads the loss"),
    "a state of no parameter": (lambda params: Own(params, counted), "a state 'num' for no parameter"),
    "a list of states": (lambda params: Own(params, listed), "its state past as a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rank_can_use_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    net = model()
    before = [param.detach().clone() for param in net.parameters()]
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(ModelError, match=words):
        vet([make(net.parameters())], net)
    assert all(map(torch.equal, before, net.parameters()))


def test_a_class_derived_from_torchs_is_tried() -> None:
    net = model()
    assert all(update.whole for update in vet([Derived(net.parameters())], net).values())
    assert not any(update.whole for update in vet([torch.optim.AdamW(net.parameters())], net).values())
