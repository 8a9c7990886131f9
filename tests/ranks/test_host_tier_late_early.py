"""Copies between tiers on fake devices: they run at once or late, and every missing wait is detected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_devices import WHENS, Devices, Race, When
from test_late_early import OPTIMIZERS, run_on_devices, small
from twins import Batch, assert_same, batches, plain_run, sharded_run

import shardwise as sw
from shardwise.errors import CommError
from shardwise.memory import Copied, Flat, HostMemory
from shardwise.optim.precision import verdict
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
HOST = {"tier": "host"}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "all on the host": ("zero3", 2, {"rows": {"param": HOST, "grad": HOST, "optim": HOST}}),
    "copies on the host": ("ddp", 2, {"rows": {"param": HOST, "grad": HOST, "optim": HOST}}),
    "states on the host": ("zero1", 2, {"rows": {"optim": HOST}}),
    "half of the units": ("zero2", 2, {"offload": {"optim": 0.5, "param": 0.5}}),
    "one rank": ("offload", 1, {}),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("name", CASES)
def test_trains_the_same_whenever_copies_are_done(name: str, when: When, precision: str) -> None:
    preset, num_ranks, plan = CASES[name]
    model, data = small(), batches(3)
    run = run_on_devices(Devices(when), model, data, (preset, num_ranks, None), precision=precision, **plan)
    if precision == "fp32":
        assert_same(run, plain_run(model, data))
    else:
        late = run_on_devices(Devices("late"), model, data, (preset, num_ranks, None), precision=precision, **plan)
        assert run.losses == late.losses
        assert all(torch.equal(param, late.params[key]) for key, param in run.params.items())


@pytest.mark.parametrize("when", WHENS)
def test_gradients_of_several_micro_batches_are_added_up_on_the_host(when: When) -> None:
    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> Tensor:
        total = torch.zeros(())
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            loss = engine(x, y) / 2
            engine.backward(loss)
            total = total + loss.detach()
        engine.step()
        return total

    model, data = small(), batches(3)
    assert_same(run_on_devices(Devices(when), model, data, ("offload", 2, None), step=step), plain_run(model, data))


@pytest.mark.parametrize("changed", ["nothing", "one gradient", "a second micro-batch"])
def test_the_device_squares_what_it_sends_to_the_host(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the host squares what was changed there since, so that the norm is always that of what is updated with."""
    squared: list[int] = []
    by_host = verdict.sum_of_squares

    def noting(due: Tensor, dtype: torch.dtype) -> Tensor:
        squared.append(due.numel())
        return by_host(due, dtype)

    monkeypatch.setattr(verdict, "sum_of_squares", noting)

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> Tensor:
        loss = engine(*batch)
        engine.backward(loss)
        if changed == "a second micro-batch":
            engine.backward(engine(*batch))
        name = next(name for name, param in engine.module.named_parameters() if param.dim() == 2)
        if changed == "one gradient":
            grad = engine.get(name, "grad")
            assert grad is not None
            engine.set(name, 3 * grad, "grad")
        grads = [engine.get(name, "grad") for name, _ in engine.module.named_parameters()]
        expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads if grad is not None]))
        engine.step()
        assert float(engine.gradient_norm or 0) == pytest.approx(float(expected), rel=1e-5)
        return loss

    run_on_devices(Devices("late"), small(), batches(2), ("offload", 2, None), step=step)
    # Before a gradient is set, all are prepared with the device's squares; the norm is then taken anew (`norm.py`).
    assert bool(squared) == (changed == "a second micro-batch")


@pytest.mark.parametrize("preset", ["offload", "zero3-offload"])
@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_whole_parameters_are_worked_on_the_same_whenever_copies_are_done(name: str, preset: str) -> None:
    """Some units are updated one by one, others by the optimizer's own step. The timing of copies does not matter."""
    model, data = small(), batches(3)
    case = (preset, 2, None)
    late, early, at_random = (run_on_devices(Devices(when), model, data, case, OPTIMIZERS[name]) for when in WHENS)
    for run in (early, at_random):
        assert run.losses == late.losses
        assert all(torch.equal(run.params[key], param) for key, param in late.params.items())
    on_device = {"offload": "zero2", "zero3-offload": "zero3"}[preset]
    there = run_on_devices(Devices("late"), model, data, (on_device, 2, None), OPTIMIZERS[name])
    assert all(torch.equal(there.params[key], param) for key, param in late.params.items())


class _Forgets:
    """A copy for which one of its two waits is skipped."""

    def __init__(self, one: Any, what: str) -> None:
        self._one = one
        self._what = what

    def wait(self) -> None:
        if self._what != "wait":
            self._one.wait()

    def land(self) -> None:
        if self._what != "land":
            self._one.land()


@pytest.mark.parametrize("plan", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("preset", ["zero3-offload", "offload"])
def test_nothing_is_found_where_nothing_is_wrong(preset: str, plan: dict[str, Any]) -> None:
    assert not is_found(preset, **plan)


@pytest.mark.parametrize(("way", "what"), [("evict", "wait"), ("evict", "land"), ("fetch", "wait")])
def test_a_wait_that_is_forgotten_is_found(way: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = getattr(HostMemory, way)
    monkeypatch.setattr(HostMemory, way, lambda *args: _Forgets(honest(*args), what))
    assert is_found("zero3-offload")


def test_master_weights_that_are_written_while_they_are_fetched_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flat, "land", lambda _: None)
    assert is_found("zero3-offload")


@thorough_only("slow; smaller tests beside it cover the same code")
def test_memory_that_is_used_again_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cast is still being fetched when the next update reuses its memory."""
    honest = HostMemory.give_back
    monkeypatch.setattr(HostMemory, "give_back", lambda self, tensor, _=None: honest(self, tensor, Copied()))
    assert is_found("zero3-offload", precision="bf16")


def is_found(preset: str, **plan: Any) -> bool:
    """Whether training raises because a tensor was touched in flight, or ends with other values than on the host."""
    model, data = small(), batches(3)
    expected = sharded_run(model, data, preset, 2, None, shares_memory=False, **plan)
    try:
        run = run_on_devices(Devices("late"), model, data, (preset, 2, None), **plan)
    except (AssertionError, Race, CommError):
        return True
    return any(not torch.equal(param, expected.params[name]) for name, param in run.params.items())
