"""`preset: auto`: trains at the first try within the memory that it was given, and equals the plain loop."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from pipelined import batches as stage_batches
from torch import nn
from twins import adamw, batches, full_params, plain_run, share_of

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.fit.candidates import Candidate
from shardwise.fit.hardware import hardware
from shardwise.fit.measured_work import Call, OperatorClock
from shardwise.fit.model_subject import ModelSubject
from shardwise.sharded import auto
from shardwise.testing import run_ranks
from tests.models import Decoder, Transformer
from tests.thorough import sampled, thorough_only


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is chosen does not depend on the machine that runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


Result = tuple[sw.Plan, list[float], dict[str, torch.Tensor], int, int]


class Wide(nn.Module):
    """Most of it is two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Sequential(nn.Linear(512, 64))) for _ in range(2)
        )
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(self.head(x), y)


def wide_batches(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(8, 64), torch.randn(8, 3)) for _ in range(num)]


def run(
    model: nn.Module, data: Any, plan: dict[str, Any], num_ranks: int = 2, hosts: Sequence[str] | None = None
) -> Result:
    """The plan that was chosen, losses, parameters, and the bytes of rank 0: foreseen before the first step, and
    allowed."""
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]

    def rank(world: sw.World) -> Result:
        replica = replicas[world.rank]
        shares = [tuple(part.chunk(world.size)[world.rank] for part in batch) for batch in data]
        optimizer = adamw(replica)
        with sw.shard(replica, plan, optimizer=optimizer, world=world, batch=shares[0]) as engine:
            held = engine.rehearse(shares[0]).total
            losses = []
            for batch in data:
                loss = engine(*share_of(engine, batch))
                engine.backward(loss)
                engine.step()
                losses.append(engine.mean(loss.item()))
            return engine.plan, losses, full_params(engine), held, engine.memory().measured_total

    results = run_ranks(num_ranks, rank, hosts=hosts)
    assert all(one[0] == results[0][0] for one in results)
    return results[0]


@sampled
@pytest.mark.parametrize("kind", ["wide", "transformer"])
def test_what_is_chosen_fits_and_trains_as_the_plain_loop(kind: str) -> None:
    """With much memory nothing is sharded or recomputed that need not be; with less, as little as possible."""
    model, data = (Transformer(), batches(3, rows=16)) if kind == "transformer" else (Wide(), wide_batches(3))
    plain = plain_run(model, data)
    roomy, losses, params, most, _ = run(model, data, {"preset": "auto", "budget": {"device": "4GiB"}})
    assert roomy.activations.policy in (None, "keep")
    assert losses == pytest.approx(plain.losses, abs=1e-5)
    limit = most - 100_000
    tight, losses, params, held, measured = run(model, data, {"preset": "auto", "budget": {"device": limit}})
    assert tight != roomy
    assert max(held, measured) <= limit
    assert losses == pytest.approx(plain.losses, abs=1e-5)
    for name, param in params.items():
        torch.testing.assert_close(param, plain.params[name], atol=1e-5, rtol=1e-4)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_plan_of_an_elastic_job_fits_when_ranks_have_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sharding saves nothing on the rank that remains."""
    model, data = Wide(), wide_batches(3)
    limit = run(model, data, {"preset": "zero1"})[3]
    plan = {"preset": "auto", "budget": {"device": limit}}
    run(model, data, plan)
    assert not re.search("not zero1: .* too much on a device", caplog.text)
    caplog.clear()
    monkeypatch.setattr(auto, "_fewest_ranks", lambda _: 1)
    chosen, losses, *_ = run(model, data, plan)
    assert "it fits with 1 of 2 ranks too" in caplog.text
    assert re.search("not zero1: .* too much on a device", caplog.text)
    assert losses == pytest.approx(plain_run(model, data).losses, abs=1e-5)
    halves = [tuple(part[:4] for part in batch) for batch in data]
    left = chosen.model_copy(update={"mesh": None}).model_dump(exclude_unset=True)
    assert run(model, halves, left, num_ranks=1)[3] <= limit


def wrapped_forward(model: nn.Module) -> None:
    """As TRL does."""
    former = model.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert self.training
        return former(*args, **kwargs)

    model.forward = MethodType(forward, model)  # type: ignore[method-assign]


def wrapped_by_a_function(model: nn.Module) -> None:
    """As accelerate does, and a hook that uses the model."""
    former = model.forward

    @functools.wraps(former)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return former(*args, **kwargs)

    model.forward = forward  # type: ignore[method-assign]
    model.register_forward_hook(lambda _, __, output: output + 0 * model.positions.weight.sum())  # type: ignore[operator,union-attr]


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("wrap", [wrapped_forward, wrapped_by_a_function])
def test_a_forward_that_calls_the_former_one_is_rehearsed_on_the_copy(wrap: Callable[[nn.Module], None]) -> None:
    plain, model = Transformer(), Transformer()
    wrap(model)
    batch = batches(1, rows=4)[0]
    found = []
    for one in (plain, model):
        subject = ModelSubject(one, batch, hardware("cpu"), 8, sw.Plan(), num_states=2)
        found.append(subject.confirm(Candidate("zero3", (("dp", 2),), 4, 1)))
        assert all(param.grad is None for param in one.parameters())
    assert found[1].device_bytes == pytest.approx(found[0].device_bytes, rel=0.01)
    with sw.shard(model, "auto", optimizer=adamw(model), batch=batch) as engine:
        engine.rehearse(batch)
        assert all(param.grad is None for param in model.parameters())
        engine.backward(engine(*batch))
        engine.step()


def test_narrow_wires_are_chosen_between_hosts_if_the_plan_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks wait for a network; then it trains as the same plan does without a search."""
    machine = hardware("cpu")
    slow = machine.network.model_copy(update={"bytes_per_second": 1e5, "node_bytes_per_second": 1e5})
    monkeypatch.setattr(auto, "hardware_here", lambda _: machine.model_copy(update={"network": slow}))
    torch.manual_seed(0)
    model, data = Wide(), wide_batches(2)
    asked = {"preset": "auto", "search": {"wires": ["int8"]}}
    chosen, losses, params, *_ = run(model, data, asked, hosts=["a", "b"])
    assert (chosen.wire.grad.dtype, chosen.search.wires) == ("int8", None)
    same, again, others, *_ = run(model, data, chosen.model_dump(exclude_unset=True), hosts=["a", "b"])
    assert (same, losses) == (chosen, again)
    assert all(torch.equal(param, others[name]) for name, param in params.items())
    assert run(model, data, asked)[0].wire.grad.dtype is None, "on one host nothing leaves it"


def test_what_the_plan_says_is_kept() -> None:
    plan = {"preset": "auto", "activations": "recompute", "clip_grad_norm": 1.0, "accumulate": 2}
    chosen = run(Transformer(), batches(2, rows=16), plan)[0]
    assert (chosen.activations.policy, chosen.clip_grad_norm, chosen.accumulate) == ("recompute", 1.0, 2)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_what_is_derived_is_what_a_rehearsal_finds() -> None:
    """Other sizes of micro-batches exactly, and stages of a pipeline nearly: these are rehearsed before they count."""
    with torch.device("meta"):
        model = Decoder(num_blocks=4)
    batch = stage_batches(1, rows=4)[0]
    subject = ModelSubject(model, batch, hardware("h100-sxm"), 64, sw.Plan(), num_states=2, on_cpu=False)
    for preset, policy in (("zero3", "keep"), ("zero1", "recompute")):
        candidate = Candidate(preset, (("dp", 2),), 16, 2, policy)
        derived, exact = subject.evaluate(candidate), subject.confirm(candidate)
        assert not derived.is_exact
        assert exact.is_exact
        assert derived.seconds == pytest.approx(exact.seconds, rel=0.01)
        assert derived.device_bytes == pytest.approx(exact.device_bytes, rel=0.01)
    staged = Candidate("zero1", (("pp", 2), ("dp", 2)), 16, 2)
    derived, exact = subject.evaluate(staged), subject.confirm(staged)
    assert derived.seconds == pytest.approx(exact.seconds, rel=0.15)
    assert derived.device_bytes == pytest.approx(exact.device_bytes, rel=0.15)


def test_calls_in_stages_are_foreseen_by_a_search() -> None:
    """They hold what one call of the whole micro-batch holds, and take the time of its parts."""
    with torch.device("meta"):
        model = Decoder(num_blocks=4)
    batch = stage_batches(1, rows=16)[0]
    subject = ModelSubject(model, batch, hardware("h100-sxm"), 64, sw.Plan(), num_states=2, on_cpu=False)
    steps = Candidate("zero1", (("pp", 2), ("dp", 2)), 16, 4)
    calls = replace(steps, parts=8)
    assert str(calls) == "zero1, pp 2, dp 2, 4 x 16 rows, calls in 8 parts"
    derived, exact = subject.evaluate(calls), subject.confirm(calls)
    assert derived.seconds == pytest.approx(exact.seconds, rel=0.15)
    assert derived.device_bytes == pytest.approx(exact.device_bytes, rel=0.15)
    assert calls.least_waiting == 4 / 8
    assert subject.least(calls).seconds <= exact.seconds
    in_flight = subject.confirm(replace(steps, schedule="gpipe"))
    assert exact.device_bytes < in_flight.device_bytes, "one micro-batch at a time"
    assert subject.confirm(replace(calls, accumulate=2)).device_bytes == exact.device_bytes
    assert exact.seconds > subject.confirm(replace(calls, accumulate=2)).seconds


class LookUpsAreSlow(OperatorClock):
    def seconds(self, call: Call) -> float:
        return 1.0 if "embedding" in str(call.operator) else 0.01


def in_stages(plan: dict[str, Any]) -> list[tuple[Any, list[float]]]:
    """The stages that were chosen, and losses, on each rank."""
    torch.manual_seed(0)
    model, data = Decoder(num_blocks=4), stage_batches(2, rows=8)
    replicas = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> tuple[Any, list[float]]:
        replica = replicas[world.rank]
        part = tuple(one[:2] for one in data[0])
        full = {"preset": "auto", "mesh": {"pp": 2}, "accumulate": 4, "activations": "keep", **plan}
        with sw.shard(replica, full, optimizer=adamw(replica), world=world, batch=part) as engine:
            losses = [float(engine.train_step(batch)) for batch in data]
            return engine.plan.pipeline.stages, losses

    losses = plain_run(model, data).losses
    found = run_ranks(2, rank)
    for _, ours in found:
        assert ours == pytest.approx(losses, abs=1e-5)
    return found


def fails(clock: OperatorClock, call: Call) -> float:
    raise ModelError("no time")


LISTED = (("tokens", "blocks.0"), ("blocks.1", "blocks.2", "blocks.3", "norm", "head"))
MEASURED = (("tokens",), ("blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"))


@sampled
@pytest.mark.parametrize("case", ["measured", "listed", "not measured"])
def test_stages_are_cut_by_measured_times(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On all ranks. What the plan lists stays, and so do stages by parameters where nothing could be measured."""
    monkeypatch.setattr(auto, "OperatorClock", LookUpsAreSlow)
    if case == "not measured":
        monkeypatch.setattr(LookUpsAreSlow, "seconds", fails)
    found = in_stages({"pipeline": {"stages": LISTED}} if case == "listed" else {})
    expected = {"measured": MEASURED, "listed": LISTED, "not measured": "auto"}[case]
    assert [stages for stages, _ in found] == [expected, expected]
    said = "stages of equal times, as measured:\n  stage 0 computes 2"
    assert (said in caplog.text) == (case == "measured")
    said = "Stages are cut by parameters, because their times could not be measured: no time"
    assert (said in caplog.text) == (case == "not measured")


def test_refusals() -> None:
    """All ranks raise the same, and the model is as it was."""
    model = Transformer()
    before = copy.deepcopy(model.state_dict())

    def refused(plan: Any, batch: Any) -> str:
        replicas = [copy.deepcopy(model) for _ in range(2)]

        def rank(world: sw.World) -> str:
            replica = replicas[world.rank]
            with pytest.raises(ConfigError) as raised:
                sw.shard(replica, plan, optimizer=adamw(replica), world=world, batch=batch)
            assert all(torch.equal(value, before[name]) for name, value in replica.state_dict().items())
            return str(raised.value)

        first, second = run_ranks(2, rank)
        assert first == second
        return first

    batch = batches(1, rows=8)[0]
    assert "preset: auto needs a batch" in refused("auto", None)
    assert "has no samples" in refused("auto", tuple(part[:0] for part in batch))
    assert "Did you mean 'auto'?" in refused("autp", batch)
    assert "the preset is zero1, so nothing is searched for" in refused(
        {"preset": "zero1", "search": {"wires": ["int8"]}}, batch
    )
    assert "search.wires is 'int9'" in refused({"preset": "auto", "search": {"wires": ["int9"]}}, batch)
    said = refused({"preset": "auto", "budget": {"device": "1MiB"}}, batch)
    assert said.startswith("No plan fits on 2 ranks. The smallest is ")
    assert "too much (32.0 MiB are taken beside tensors, by libraries and buffers of matrix products)" in said
    assert "What would do: devices of " in said
    assert "smaller model" not in said, "there is no room for any"
