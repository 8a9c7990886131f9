"""What loops compute of `model.parameters()`, which in pipeline stages are those of a rank's own: right, or refused."""

from __future__ import annotations

import copy
import json
import math
import pickle
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pipelined import batches
from torch import nn
from twins import adamw

import shardwise as sw
from shardwise.errors import FaultError, StateError
from shardwise.testing import run_ranks
from tests.models import Decoder as Blocks
from tests.thorough import sampled

pytestmark = sampled

Tensor = torch.Tensor
Decoder = partial(Blocks, num_blocks=3)  # of which one stage has several
Term = Callable[[nn.Module], Any]
PRESETS = ["zero1", "zero3"]


def in_stages(
    preset: str, use: Callable[[nn.Module, Any], Any], before: Callable[[nn.Module], Any] = id, *, tied: bool = False
) -> list[Any]:
    """What `use` returns of the model in two stages, after a backward, and of what was made of it before."""
    torch.manual_seed(0)
    plain = Decoder(tied=tied)
    models = [copy.deepcopy(plain) for _ in range(2)]

    def rank(world: sw.World) -> Any:
        model = models[world.rank]
        made = before(model)
        with sw.shard(model, {"preset": preset, "mesh": {"pp": 2}}, optimizer=adamw(model), world=world) as engine:
            engine.backward(model(*batches(1, 8)[0]))
            used = use(model, made)
            engine.step()
            return used

    return run_ranks(2, rank)


def added_in_place(terms: Iterable[Tensor]) -> Tensor:
    total = torch.zeros(())
    for term in terms:
        total += term
    return total


def added_to(terms: Iterable[Tensor]) -> Tensor:
    total = torch.tensor(0.5)
    for term in terms:
        total = total.expand(term.shape).clone() if total.shape != term.shape else total
        total.add_(term)
    return total


def added_up(values: Iterable[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


PARTIAL: dict[str, Term] = {
    "a root": lambda model: sum(p.square().sum() for p in model.parameters()).sqrt(),
    "of a sum in place": lambda model: torch.sqrt(added_in_place(p.square().sum() for p in model.parameters())),
    "of a tensor that was added to": lambda model: added_to(p.norm().detach() for p in model.parameters()).sqrt(),
    "of tensors of its own": lambda model: torch.stack([added_to([p.grad]).norm() for p in model.parameters()]).norm(),
    "a power": lambda model: sum(p.norm() ** 2 for p in model.parameters()) ** 0.5,
    "a norm of norms": lambda model: torch.stack([p.norm() for p in model.parameters()]).norm(),
    "of one vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).norm(),
    "of one tensor": lambda model: torch.cat([p.flatten() for p in model.parameters()]).std(),
    "a mean": lambda model: torch.stack([p.abs().sum() for p in model.parameters()]).mean(),
    "its value": lambda model: sum(p.square().sum() for p in model.parameters()).item(),
    "a number": lambda model: float(sum(p.abs().sum() for n, p in model.named_parameters() if "norm" in n)),
    "a comparison": lambda model: sum(p.detach().abs().sum() for p in model.parameters()) > 10,
    "a product": lambda model: sum(p.sum() for p in model.parameters()) * sum(p.norm() for p in model.parameters()),
    "a quotient": lambda model: 1 / sum(p.square().sum() for p in model.parameters()),
    "of gradients": lambda model: torch.sqrt(sum(p.grad.square().sum() for p in model.parameters())),
    "values of each": lambda model: sum(p.norm().item() ** 2 for p in model.parameters()),
    "the largest value": lambda model: max(p.detach().abs().max().item() for p in model.parameters()),
    "values of gradients": lambda model: added_up(p.grad.data.norm(2).item() ** 2 for p in model.parameters()),
    "a norm of norms of gradients": lambda model: torch.stack([p.grad.norm() for p in model.parameters()]).norm(),
    "of detached gradients": lambda model: torch.cat([p.grad.detach().flatten() for p in model.parameters()]).norm(),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", PARTIAL)
def test_what_needs_the_terms_of_all_stages_is_refused(kind: str, preset: str) -> None:
    def use(model: nn.Module, _: object) -> None:
        with pytest.raises(StateError, match=r"that this rank's pipeline stages have.*engine\.gradient_norm"):
            PARTIAL[kind](model)

    in_stages(preset, use)


def of_each_block(model: nn.Module) -> list[float]:
    blocks = [block for block in model.blocks if any(True for _ in block.parameters())]
    return [sum(p.square().sum() for p in block.parameters()).sqrt().item() for block in blocks]


WHOLE: dict[str, Term] = {
    "a norm of each": lambda model: {n: p.norm().item() for n, p in model.named_parameters()},
    "a value of each": lambda model: {n: p.square().sum().item() ** 0.5 for n, p in model.named_parameters()},
    "of a difference": lambda model: {n: (p - 2 * p).abs().mean().item() for n, p in model.named_parameters()},
    "of a gradient": lambda model: {n: p.grad.square().sum().sqrt().item() for n, p in model.named_parameters()},
    "a norm of a gradient": lambda model: {n: p.grad.norm().item() for n, p in model.named_parameters()},
    "another norm": lambda model: {n: p.grad.data.norm(math.inf).item() for n, p in model.named_parameters()},
    "computed with numbers": lambda model: {n: (1 + p.norm().item()) ** 0.5 / 2 for n, p in model.named_parameters()},
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_computed_of_one_parameter_is_whole(kind: str, preset: str) -> None:
    torch.manual_seed(0)
    plain = Decoder()
    plain(*batches(1, 8)[0]).backward()
    found: dict[str, float] = {}
    for of_stage in in_stages(preset, lambda model, _: WHOLE[kind](model)):
        found |= of_stage
    assert found == pytest.approx(WHOLE[kind](plain), rel=1e-4, abs=1e-6)


def test_norms_of_weights_that_stages_share_are_whole() -> None:
    torch.manual_seed(0)
    plain = Decoder(tied=True)
    plain(*batches(1, 8)[0]).backward()
    norms = "a norm of a gradient"
    found = in_stages("zero1", lambda model, _: WHOLE[norms](model), tied=True)
    assert {**found[0], **found[1]} == pytest.approx(WHOLE[norms](plain), rel=1e-4, abs=1e-6)
    assert found[0]["tokens.weight"] == pytest.approx(found[1]["tokens.weight"], rel=1e-6)


COUNTED: dict[str, Callable[[nn.Module], int]] = {
    "numel()": lambda model: sum(p.numel() for p in model.parameters()),
    "torch.numel": lambda model: sum(torch.numel(input=p) for p in model.parameters()),
    "shapes": lambda model: sum(math.prod(p.shape) for p in model.parameters()),
    "sizes": lambda model: sum(math.prod(p.detach().size()) for p in model.parameters()),
    "of gradients": lambda model: sum(p.grad.numel() for p in model.parameters()),
    "of one vector": lambda model: len(nn.utils.parameters_to_vector(model.parameters())),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_a_count_of_all_parameters_says_that_it_is_of_some_stages(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def use(model: nn.Module, _: object) -> int:
        return sum(COUNTED[kind](model) for _ in range(2)) // 2

    counts, whole = in_stages("zero3", use), sum(param.numel() for param in Decoder().parameters())
    said = [record.getMessage() for record in caplog.records if "numel()" in record.getMessage()]
    assert sorted(said) == sorted(
        f"Counts over model.parameters(), such as a sum of numel(), are of what this rank has, {count:,} elements of "
        f"the model's {whole:,}."
        for count in counts
    )
    assert sum(counts) == whole


def reset(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def add_noise(params: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for param in params:
            param.add_(torch.zeros(param.shape))


def test_a_size_that_is_asked_for_something_else_is_no_count(caplog: pytest.LogCaptureFixture) -> None:
    def use(model: nn.Module, _: object) -> None:
        reset(model)
        add_noise(model.parameters())
        add_noise(p.grad for p in model.parameters())
        assert sum(p.norm() for p in model.parameters()).numel() == 1
        nn.utils.parameters_to_vector(model.parameters())

    in_stages("zero3", use)
    assert not any("Counts over" in record.getMessage() for record in caplog.records)


def put_into_one(params: Iterable[Tensor]) -> Tensor:
    norms = torch.zeros(len(params := list(params)))
    for place, param in enumerate(params):
        norms[place] = param.norm() if place % 2 else param.detach().flatten()[0]
    return norms.norm()


def into_views(params: Iterable[Tensor]) -> Tensor:
    norms = torch.zeros(len(params := list(params)))
    for place, param in enumerate(params):
        (norms[place] if place % 2 else norms.data[place]).add_(param.detach().norm())
    return norms


def into_a_copy(params: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for param in params:
            nn.Parameter(torch.zeros(param.shape)).lerp_(param.detach(), 0.1)


TAKEN: dict[str, Term] = {
    "parameters of a copy": lambda model: into_a_copy(model.parameters()),
    "one tensor of numbers": lambda model: torch.tensor([p.norm().item() for p in model.parameters()]).norm(),
    "one array of numbers": lambda model: np.array([p.grad.norm().item() for p in model.parameters()]).mean(),
    "an exact sum": lambda model: math.fsum(p.norm().item() for p in model.parameters()),
    "one array of arrays": lambda model: np.concatenate([p.detach().numpy().ravel() for p in model.parameters()]).std(),
    "sums of lists": lambda model: sum(sum(p.detach().flatten().tolist()) for p in model.parameters()),
    "a count": lambda model: sum((p == 0).sum().item() for p in model.parameters()),
    "a count of those that count": lambda model: sum(torch.count_nonzero(p).item() for p in model.parameters()),
    "one tensor, one by one": lambda model: put_into_one(model.parameters()),
    "one tensor, by its elements": lambda model: into_views(model.parameters()).norm(),
    "tensors at once": lambda model: torch._foreach_add_(
        [torch.zeros(len(p)) for p in model.parameters()], [p.detach().flatten()[: len(p)] for p in model.parameters()]
    ),
    "a mean of numbers": lambda model: statistics.mean(p.norm().item() for p in model.parameters()) + 1,
    "a file of averages": lambda model: pickle.dumps([added_to([p.detach()]) for p in model.parameters()]),
    "a file": lambda model: pickle.dumps({n: p.detach().cpu() for n, p in model.named_parameters()}),
    "one of `.data`": lambda model: pickle.dumps([p.data for p in model.parameters()]),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", TAKEN)
def test_values_of_all_parameters_say_that_they_are_of_some_stages(
    kind: str, preset: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is asked when they are combined."""

    def use(model: nn.Module, _: object) -> int:
        for _ in range(2):
            TAKEN[kind](model)
        return sum(p.numel() for n, p in model.named_parameters() if n)

    counts, whole = in_stages(preset, use), sum(param.numel() for param in Decoder().parameters())
    said = [record.getMessage() for record in caplog.records if "Values were taken" in record.getMessage()]
    assert len(said) == 2
    for count in counts:
        assert any(f"has, {count:,} elements of the model's {whole:,}. So a mean" in one for one in said)


def test_a_count_of_split_parameters_says_that_it_is_of_parts(caplog: pytest.LogCaptureFixture) -> None:
    models = [Decoder() for _ in range(2)]
    full = {"preset": "zero3", "mesh": {"tp": 2}, "tensor": {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}}

    def rank(world: sw.World) -> int:
        model = models[world.rank]
        with sw.shard(model, full, optimizer=adamw(model), world=world):
            return sum(param.numel() for param in model.parameters())

    whole = sum(param.numel() for param in models[0].parameters())
    counts = run_ranks(2, rank)
    said = [record.getMessage() for record in caplog.records if "numel()" in record.getMessage()]
    assert len(said) == 2
    assert all(f"{count:,} elements of the model's {whole:,}." in one for count, one in zip(counts, said, strict=True))


def test_values_of_some_parameters_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def use(model: nn.Module, _: object) -> None:
        for name, param in model.named_parameters():
            if "norm" in name:
                assert param.norm().item() > -1
            assert [param.shape, param.dtype, param.requires_grad, param.dim()]
            param.data.mul_(1.0)

    in_stages("zero3", use)
    assert not [record for record in caplog.records if "Values were taken" in record.getMessage()]


def test_a_tensor_that_is_overwritten_begins_anew() -> None:
    total = [torch.zeros(()) for _ in range(2)]

    def use(model: nn.Module, _: object) -> None:
        mine = total[0] if any("blocks.0" in name for name, _ in model.named_parameters()) else total[1]
        for overwrite in (torch.Tensor.zero_, lambda one: one.fill_(0.0), lambda one: one.copy_(torch.zeros(()))):
            for param in model.parameters():
                mine.add_(param.detach().norm())
            with pytest.raises(StateError, match=r"engine\.gradient_norm"):
                mine.sqrt()
            assert overwrite(mine).sqrt().item() == 0

    in_stages("zero1", use)


@pytest.mark.parametrize("split", ["pp", "tp"])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_hook_on_a_gradient_says_what_it_gets(is_before: bool, split: str, caplog: pytest.LogCaptureFixture) -> None:
    models = [Decoder() for _ in range(2)]
    plan: dict[str, Any] = {"preset": "zero1", "mesh": {split: 2}}
    if split == "tp":
        plan["tensor"] = {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}

    def halved(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            if name.endswith(("up.weight", "head.weight")):  # of which `tp` leaves the second whole
                param.register_hook(lambda gradient: gradient * 0.5)

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        if is_before:
            halved(model)
        with sw.shard(model, plan, optimizer=adamw(model), world=world):
            if not is_before:
                halved(model)

    run_ranks(2, rank)
    said = [record.getMessage() for record in caplog.records if "The hook on" in record.getMessage()]
    assert len(said) == 2
    assert all("up.weight gets the gradient as this rank computes it" in one for one in said)


def test_a_value_is_a_plain_number_to_others() -> None:
    def use(model: nn.Module, _: object) -> None:
        norms = [param.grad.norm() for param in model.parameters()]
        value = norms[0].item()
        assert json.loads(json.dumps({"norm": value})) == {"norm": value}
        copied = pickle.loads(pickle.dumps(value))
        assert type(copied) is type(copy.deepcopy(value)) is float
        assert f"{norms[0]:.3f} {value:.3f}" == f"{copied:.3f} {copied:.3f}"
        assert sorted([value, 0.0, 1e9]) == [0.0, copied, 1e9]
        for whole in (torch.tensor, math.fsum):  # as Lightning's grad_norm
            with pytest.raises(StateError, match=r"Take \.item\(\); engine\.gradient_norm"):
                whole(norms)

    in_stages("zero1", use)


@pytest.mark.parametrize("kind", ["a root", "its value", "of a sum in place"])
def test_terms_of_split_parameters_are_known_too(kind: str) -> None:
    models = [Decoder() for _ in range(4)]
    plan = {"up": "column", "down": "row"}
    full = {"preset": "zero1", "mesh": {"pp": 2, "tp": 2}, "tensor": {"plan": {f"blocks.*.{n}": plan[n] for n in plan}}}

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with (
            sw.shard(model, full, optimizer=adamw(model), world=world),
            pytest.raises(StateError, match=r"that this rank's pipeline stages have.*engine\.gradient_norm"),
        ):
            PARTIAL[kind](model)

    run_ranks(4, rank)


def test_what_is_computed_of_one_module_is_whole() -> None:
    torch.manual_seed(0)
    expected = of_each_block(Decoder())
    first, second = in_stages("zero1", lambda model, _: of_each_block(model))
    assert [*first, *second] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_of_one_module_are_read_where_it_is(preset: str) -> None:
    """Other ranks read nothing, and take the same step."""

    def norms(model: nn.Module) -> list[float]:
        return [param.grad.norm().item() for param in model.head.parameters() if param.grad is not None]

    torch.manual_seed(0)
    plain = Decoder()
    plain(*batches(1, 8)[0]).backward()
    first, second = in_stages(preset, lambda model, _: norms(model))
    assert first == []
    assert second == pytest.approx(norms(plain), rel=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_penalties_train_all_stages(preset: str) -> None:
    """Sums as they are, with roots of single terms, added in place and scaled."""

    def penalised(model: Any, x: Tensor, y: Tensor) -> Tensor:
        sums = added_in_place(p.square().sum() for p in model.parameters())
        norms = torch.stack([p.norm() for p in model.parameters()]).sum()
        loss: Tensor = model(x, y) + 0.01 * sums / 2 + 0.001 * norms
        return loss

    torch.manual_seed(0)
    plain = Decoder()
    models = [copy.deepcopy(plain) for _ in range(2)]
    optimizer, data = adamw(plain), batches(3, 8)
    for batch in data:
        optimizer.zero_grad()
        penalised(plain, *batch).backward()
        optimizer.step()

    def rank(world: sw.World) -> dict[str, Tensor]:
        model = models[world.rank]
        optimizer = adamw(model)
        with sw.shard(model, {"preset": preset, "mesh": {"pp": 2}}, optimizer=optimizer, world=world) as engine:
            for batch in data:
                penalised(model, *batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            return engine.state_dict()

    for state in run_ranks(2, rank):
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


class Chain(nn.Sequential):
    """Layers of one shape, so that nothing but values tells them apart."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(8, 8) for _ in range(4)))


def averaged(average: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for other, param in zip(average.parameters(), model.parameters(), strict=False):
            other.mul_(0.9).add_(param.detach(), alpha=0.1)


def averaged_by_data(average: nn.Module, model: nn.Module) -> None:
    for other, param in zip(average.parameters(), model.parameters(), strict=False):
        other.data = 0.9 * other.data + 0.1 * param.data


def averaged_at_once(average: nn.Module, model: nn.Module) -> None:
    own = [p.detach() for p in model.parameters()]
    torch._foreach_lerp_([p.data for p in average.parameters()][: len(own)], own, 0.1)


def pulled(average: nn.Module, model: nn.Module) -> None:
    sum((p - other).square().sum() for p, other in zip(model.parameters(), average.parameters(), strict=False))


def copied_back(average: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for other, param in zip(average.parameters(), model.parameters(), strict=False):
            param.copy_(other)


def by_torch(average: nn.Module, model: nn.Module) -> None:
    torch.optim.swa_utils.AveragedModel(average).update_parameters(model)


PAIRS = [averaged, averaged_by_data, averaged_at_once, pulled, copied_back, by_torch]


@pytest.mark.parametrize("build", [Chain, Blocks], ids=lambda build: build.__name__)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)
def test_copies_that_are_paired_by_order_are_refused(pair: Callable[..., None], build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = build()
    models = [copy.deepcopy(plain) for _ in range(2)]

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        average = copy.deepcopy(model)
        with sw.shard(model, {"preset": "zero1", "mesh": {"pp": 2}}, optimizer=adamw(model), world=world) as engine:
            x = torch.ones(4, 8) if build is Chain else batches(1, 4)[0][0]
            engine.backward(model(x).mean())
            engine.step()
            pair(average, model)
            engine.backward(model(x).mean())

    with pytest.raises(
        (StateError, FaultError), match=r"with a copy of .*Pair them by name.*average engine.state_dict"
    ):
        run_ranks(2, rank)


def test_copies_that_are_paired_by_name_are_right() -> None:
    plain = Chain()
    models = [copy.deepcopy(plain) for _ in range(2)]
    x = torch.linspace(-1, 1, 32).view(4, 8)

    def train(model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        averages = dict(average.named_parameters())
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, param in model.named_parameters():
                    averages[name].mul_(0.9).add_(param.detach(), alpha=0.1)
        return {name: averages[name].detach().clone() for name, _ in model.named_parameters()}

    def rank(world: sw.World) -> dict[str, Tensor]:
        model = models[world.rank]
        average, optimizer = copy.deepcopy(model), adamw(model)
        with sw.shard(model, {"preset": "zero1", "mesh": {"pp": 2}}, optimizer=optimizer, world=world):
            return train(model, average, optimizer)

    found: dict[str, Tensor] = {}
    for of_stage in run_ranks(2, rank):
        found |= of_stage
    torch.testing.assert_close(found, train(plain, copy.deepcopy(plain), adamw(plain)), rtol=1e-4, atol=1e-5)


def test_pairs_of_modules_on_different_stages_are_warned_of_and_right_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As those of a momentum encoder beside what it follows: `zip` ends where one of them has none here."""
    torch.manual_seed(0)
    plain = Decoder()
    models = [copy.deepcopy(plain) for _ in range(2)]
    names = [name for name, _ in plain.blocks[0].named_parameters()]

    def said() -> list[str]:
        return [text for record in caplog.records if "goes through the parameters" in (text := record.getMessage())]

    def rank(world: sw.World) -> dict[str, Tensor]:
        model = models[world.rank]
        with sw.shard(model, {"preset": "zero1", "mesh": {"pp": 2}}, optimizer=adamw(model), world=world) as engine:
            assert sum(1 for _ in model.parameters()) < len(list(plain.parameters()))
            model.requires_grad_(True)
            assert not said()
            world.barrier()
            for param, other in zip(model.blocks[0].parameters(), model.blocks[2].parameters(), strict=False):
                other.data.lerp_(param.data, 0.1)
            for name in names:
                follower = f"blocks.2.{name}"
                engine.set(follower, engine.get(follower).lerp(engine.get(f"blocks.0.{name}"), 0.1))
            return engine.state_dict()

    states = run_ranks(2, rank)
    assert len(said()) == 2
    assert all("of blocks." in text and "engine.set(name, value)" in text for text in said())
    with torch.no_grad():
        for param, other in zip(plain.blocks[0].parameters(), plain.blocks[2].parameters(), strict=True):
            other.lerp_(param, 0.1)
    for state in states:
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value)


def test_a_copy_that_computes_is_averaged_from_the_whole_state() -> None:
    """As a target network, of which each rank needs all stages."""
    first = Chain()
    plain, *models = (copy.deepcopy(first) for _ in range(3))
    x = torch.linspace(-1, 1, 32).view(4, 8)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, state_of: Callable[[], Any]) -> list[float]:
        target, losses = copy.deepcopy(first), []
        averages = target.state_dict()
        for _ in range(4):
            with torch.no_grad():
                wanted = target(x.flip(0))
            loss = (model(x) - wanted).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, value in state_of().items():
                averages[name].lerp_(value, 0.5)
            losses.append(loss.item())
        return losses

    def rank(world: sw.World) -> list[float]:
        model = models[world.rank]
        optimizer = adamw(model)
        with sw.shard(model, {"preset": "zero1", "mesh": {"pp": 2}}, optimizer=optimizer, world=world) as engine:
            return train(model, optimizer, engine.state_dict)

    expected = train(plain, adamw(plain), plain.state_dict)
    for losses in run_ranks(2, rank):
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("allow_unused", [False, True])
def test_gradients_that_no_backward_leaves_are_refused(allow_unused: bool) -> None:
    def use(model: Any, _: object) -> None:
        loss = model(*batches(1, 8)[0])
        with pytest.raises(StateError, match=r"Use loss.backward\(\), and read them by engine.get\(name, 'grad'\)"):
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=allow_unused)
        term = sum(p.square().sum() for p in model.parameters())
        for param, gradient in zip(
            model.parameters(), torch.autograd.grad(term, list(model.parameters())), strict=True
        ):
            torch.testing.assert_close(gradient, 2 * param.detach())

    in_stages("zero1", use)


def test_gradients_of_split_parameters_are_known_as_parts() -> None:
    """What is computed of them is refused, and an optimizer can be given them."""
    torch.manual_seed(0)
    plain, data = Decoder(), batches(2, 8)
    models = [copy.deepcopy(plain) for _ in range(2)]
    full = {"preset": "zero1", "mesh": {"tp": 2}, "tensor": {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}}

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for x, y in data:
            params = list(model.parameters())
            for param, gradient in zip(params, torch.autograd.grad(model(x, y), params), strict=True):
                param.grad = gradient * 0.5
            optimizer.step()
            optimizer.zero_grad()

    def rank(world: sw.World) -> dict[str, Tensor]:
        model = models[world.rank]
        optimizer = adamw(model)
        with sw.shard(model, full, optimizer=optimizer, world=world) as engine:
            train(model, optimizer)
            (gradient,) = torch.autograd.grad(model(*data[0]), [model.blocks[0].up.weight])
            with pytest.raises(StateError, match=r"the gradient of blocks.0.up.weight is split along a model axis"):
                gradient.norm()
            return engine.state_dict()

    train(plain, adamw(plain))
    for state in run_ranks(2, rank):
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


OF_A_PART: dict[str, Callable[[Tensor], Any]] = {
    "an array": lambda values: values.numpy(),
    "a list": lambda values: values.tolist(),
    "elements that are chosen": lambda values: values[values > 0],
    "how many there are": lambda values: len(values.unique()),
    "a comparison": lambda values: torch.equal(values, values + 0),
    "a comparison of products": lambda values: torch.allclose(values * 2, values + values),
    "a file": lambda values: pickle.dumps(values.cpu().clone()),
    "its first row, written": lambda values: values.__setitem__(0, 0.5),
    "rows from one on, written": lambda values: values.__setitem__((slice(20, None), slice(None)), 0.5),
    "rows, filled": lambda values: values.index_fill_(0, torch.tensor([0]), 0.5),
    "new values": lambda values: values.normal_(generator=torch.Generator().manual_seed(0)),
    "first values": nn.init.kaiming_uniform_,
    "a softmax over its rows": lambda values: values.softmax(0),
    "another order": lambda values: values.flip(0),
    "columns of length one": lambda values: F.normalize(values, dim=0),
    "a triangle": lambda values: values.tril_(),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", OF_A_PART)
def test_values_of_a_part_are_not_taken_for_the_whole(kind: str, preset: str) -> None:
    models = [Decoder() for _ in range(2)]
    full = {"preset": preset, "mesh": {"tp": 2}, "tensor": {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}}

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with sw.shard(model, full, optimizer=adamw(model), world=world) as engine:
            before = engine.get("blocks.1.up.weight")
            for values in (model.blocks[1].up.weight.detach(), model.blocks[1].up.weight.data.clone()):
                with pytest.raises(StateError, match=r"this rank has .* would compute with that part alone"):
                    OF_A_PART[kind](values)
            torch.testing.assert_close(engine.get("blocks.1.up.weight"), before, rtol=0, atol=0)
            OF_A_PART[kind](model.head.weight.detach())  # which is whole
            assert values.cpu().mul(2).shape == values.shape
            assert values.softmax(1).shape == values.shape
            values[:, 0] = 0.5  # a whole column
            values[values > 1] = 1
            assert not torch.equal(values, torch.zeros(values.shape))  # somebody knows that it is a part

    run_ranks(2, rank)


def require_numbers(_: nn.Module, args: tuple[Tensor, ...]) -> None:
    assert not args[0].isnan().any()


def test_hooks_of_a_loop_run_where_the_module_is() -> None:
    torch.manual_seed(0)
    plain, ((x, y),) = Decoder(), batches(1, 8)
    models = [copy.deepcopy(plain) for _ in range(2)]

    def seen_in(model: Any) -> dict[int, Tensor]:
        seen: dict[int, Tensor] = {}
        for place, block in enumerate(model.blocks):
            block.register_forward_pre_hook(require_numbers)
            block.register_forward_hook(
                lambda _, __, output, place=place: seen.update(
                    {place: seen.get(place, 0) + output.detach().sum((0, 1))}
                )
            )
        with torch.no_grad():
            model(x, y)
        return seen

    def rank(world: sw.World) -> dict[int, Tensor]:
        with sw.shard(models[world.rank], {"preset": "zero1", "mesh": {"pp": 2}}, world=world):
            return seen_in(models[world.rank])

    first, second = run_ranks(2, rank)
    assert sorted(map(len, (first, second))) == [1, 2], "blocks, each of one stage"
    torch.testing.assert_close({**first, **second}, seen_in(plain), rtol=1e-4, atol=1e-4)
