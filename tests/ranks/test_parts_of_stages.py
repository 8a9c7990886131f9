"""What loops do with a part of a model in pipeline stages, which one rank has and others have not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelined import batches
from torch import nn
from torch.optim.swa_utils import update_bn
from twins import work_on_ranks

import shardwise as sw
from shardwise.errors import FaultError, StateError
from tests.models import Decoder
from tests.thorough import sampled

Tensor = torch.Tensor
Change = Callable[[nn.Module], object]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def own(model: nn.Module, part: str) -> list[nn.Parameter]:
    """The parameters of a part of a model that are here."""
    return [param for name, param in model.named_parameters() if name.startswith(part)]


def drop_by_module(model: Any) -> None:
    model.head.zero_grad()


def drop_one(model: nn.Module) -> None:
    for param in own(model, "blocks.0.up.weight"):
        param.grad = None


def set_to_zero(model: Any) -> None:
    model.blocks[0].zero_grad(set_to_none=False)


def scale(model: nn.Module) -> None:
    for param in own(model, "tokens"):
        assert param.grad is not None
        param.grad.mul_(0.1)


def mask_rows(model: nn.Module) -> None:
    for param in own(model, "tokens"):
        assert param.grad is not None
        param.grad[:40] = 0


CHANGES: dict[str, Change] = {one.__name__: one for one in (drop_by_module, drop_one, set_to_zero, scale, mask_rows)}


@sampled
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_of_one_stage_are_changed_between_backward_and_step(change: str, clips: bool, preset: str) -> None:
    """Before all gradients are clipped, or after. The norm of the step is that of the changed ones."""
    torch.manual_seed(0)
    plain, data = Decoder(), batches(3, 8)

    def train(model: Any, step: Callable[[bool], float]) -> list[float]:
        norms = []
        for number, batch in enumerate(data):
            model(*batch).backward()
            if number != 1:
                CHANGES[change](model)
            norms.append(step(number != 1))
        return norms

    twin = copy.deepcopy(plain)
    optimizer = sgd(twin)

    def plain_step(is_changed: bool) -> float:
        norm = float(nn.utils.clip_grad_norm_(twin.parameters(), 0.3 if clips else float("inf")))
        if is_changed and clips:
            CHANGES[change](twin)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    norms = train(twin, plain_step)

    def work(engine: sw.Engine) -> None:
        def step(is_changed: bool) -> float:
            if clips:
                norm = float(engine.clip_grad_norm_(0.3))
                if is_changed:
                    CHANGES[change](engine.module)
                engine.step()
                return norm
            return float(engine.step() or 0.0)

        assert train(engine.module, step) == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(engine.state_dict(), dict(twin.state_dict()), rtol=1e-4, atol=1e-5)

    work_on_ranks(2, work, {"preset": preset, "mesh": {"pp": 2}}, plain, sgd)


def normalized(*, in_last: bool) -> nn.Module:
    """With batch norms in one of two stages."""
    norms = [nn.Identity(), nn.BatchNorm1d(8)] if in_last else [nn.BatchNorm1d(8), nn.Identity()]
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), norms[0], nn.Tanh(), nn.Linear(8, 8), norms[1], nn.Linear(8, 4))


@pytest.mark.parametrize("in_last", [False, True])
def test_batch_norms_of_one_stage_are_updated(in_last: bool) -> None:
    plain, data = normalized(in_last=in_last), [torch.randn(8, 6) for _ in range(3)]

    def train(model: nn.Module, step: Callable[[], object]) -> None:
        for x in data:
            (model(x) - 1).square().mean().backward()
            step()
        model.eval()
        update_bn(data, model)
        assert not any(module.training for module in model.modules())

    twin = copy.deepcopy(plain)
    optimizer = sgd(twin)

    def plain_step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    train(twin, plain_step)

    def work(engine: sw.Engine) -> None:
        train(engine.module, engine.step)
        torch.testing.assert_close(engine.state_dict(), dict(twin.state_dict()), rtol=1e-5, atol=1e-5)

    work_on_ranks(2, work, {"preset": "zero1", "mesh": {"pp": 2}}, plain, sgd)


class Found(Exception):  # it is no error to the loop that raises it
    """With a tensor, as its text too."""


@pytest.mark.parametrize("block", [0, 3])
@pytest.mark.parametrize("infers", [False, True])
def test_a_forward_that_a_hook_leaves_early_is_refused(infers: bool, block: int) -> None:
    """As loops do that take features. The rank with the block is told, and no other has a hook."""

    def leave(module: nn.Module, args: object, output: Tensor) -> None:
        raise Found(output)

    def work(engine: sw.Engine) -> None:
        x, _ = batches(1, 8)[0]
        engine.module.blocks[block].register_forward_hook(leave)  # type: ignore[index]
        with torch.no_grad():
            if infers:
                with engine.inference():
                    engine.module(x)
            else:
                engine.module(x)

    with pytest.raises((StateError, FaultError)) as raised:
        work_on_ranks(2, work, {"preset": "zero1", "mesh": {"pp": 2}}, Decoder)
    assert f"Found was raised in blocks.{block}" in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_gradients_of_some_parameters_alone_are_refused() -> None:
    """Where the loop has added a term of its own, torch finds that term's gradient; and none where a backward is to
    reach some parameters alone."""
    x, y = batches(1, 8)[0]

    def work(engine: sw.Engine) -> None:
        params = list(engine.module.parameters())
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        loss = engine(x, y)
        total = loss + 0.01 * params[0].square().sum()
        for ask in (
            lambda: torch.autograd.grad(total, params, allow_unused=True),
            lambda: torch.autograd.grad([total], params[:1]),
            lambda: total.backward(inputs=params[:1]),
            lambda: torch.autograd.backward([total], inputs=params),
        ):
            with pytest.raises(StateError, match=r"What is not to train is frozen before the forward"):
                ask()
        (found,) = torch.autograd.grad(params[0].square().sum(), params[:1])  # a term without the model
        assert found is not None
        loss.backward()
        engine.step()
        assert any(not torch.equal(value, before[name]) for name, value in engine.state_dict().items())

    work_on_ranks(2, work, {"preset": "zero1", "mesh": {"pp": 2}}, Decoder)
