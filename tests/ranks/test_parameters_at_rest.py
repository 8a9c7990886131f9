"""Parameters between computations: what reading and writing them does, and which changes of a model are refused."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from twins import adamw, batches, plan_of, share_of

import shardwise as sw
from shardwise.errors import FaultError, ModelError, StateError
from shardwise.program import Action
from shardwise.runtime.param_mover import ParamMover
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Chain, Transformer
from tests.thorough import sampled

pytestmark = sampled

Tensor = torch.Tensor
Use = Callable[[sw.Engine, Any, torch.optim.Optimizer], Any]
NAME = "blocks.1.up.weight"
PLACES = [("zero3", True), ("zero3", False), ("zero1", True), ("ddp", False)]
DATA = batches(4)


@pytest.fixture(params=PLACES, ids=[f"{preset}-{'memory' if shares else 'messages'}" for preset, shares in PLACES])
def place(request: pytest.FixtureRequest) -> tuple[str, bool]:
    return request.param


def param_of(model: Any) -> nn.Parameter:
    return model.get_parameter(NAME)


def used(use: Use, place: tuple[str, bool], build: Callable[[], nn.Module] = Transformer, **plan: Any) -> list[Any]:
    """What `use` returns on two ranks, after one step of training."""
    preset, shares = place
    torch.manual_seed(0)
    replicas = [build()]
    replicas.append(copy.deepcopy(replicas[0]))

    def rank(world: sw.World) -> Any:
        model = replicas[world.rank]
        optimizer = adamw(model)
        engine = sw.shard(model, plan_of(preset, None, **plan), optimizer=optimizer, world=world)
        step(engine)
        return use(engine, model, optimizer)

    return run_ranks(2, rank, shares_memory=shares)


def step(engine: sw.Engine) -> None:
    engine.backward(engine(*share_of(engine, DATA[0])))
    engine.step()


REFUSED: dict[str, tuple[Use, type[Exception], str]] = {
    "deepcopy": (lambda e, m, o: copy.deepcopy(m), StateError, "cannot be copied or pickled"),
    "deepcopy of a part": (lambda e, m, o: copy.deepcopy(m.blocks), StateError, "cannot be copied or pickled"),
    "pickle": (lambda e, m, o: pickle.dumps(m), StateError, "cannot be copied or pickled"),
    "pickle of a part": (lambda e, m, o: pickle.dumps(m.blocks), StateError, "cannot be copied or pickled"),
    "a tie": (lambda e, m, o: setattr(m.head, "weight", m.tokens.weight), ModelError, "head.weight was assigned to"),
    "a new module": (lambda e, m, o: setattr(m, "head", nn.Linear(4, 4)), ModelError, "head was put into a model"),
    "a second engine": (lambda e, m, o: sw.shard(m, "zero3", world=e.world), ModelError, "sharded by an engine alre"),
    "state by parameter": (
        lambda e, m, o: o.state[param_of(m)],
        StateError,
        f"engine.get\\('{NAME}', '(exp_avg|step)'\\)",
    ),
    "a state dropped": (lambda e, m, o: o.state.pop(param_of(m)), StateError, "by this rank's piece of it"),
    "a state deleted": (
        lambda e, m, o: o.state.__delitem__(param_of(m)),
        StateError,
        "kept by this rank's piece of it",
    ),
    "a state made": (
        lambda e, m, o: o.state.setdefault(param_of(m), {}),
        StateError,
        "kept by this rank's piece of it",
    ),
    "states by pieces": (lambda e, m, o: list(o.state.values()), StateError, "kept by this rank's piece of each"),
    "a copy of the optimizer": (lambda e, m, o: copy.deepcopy(o), StateError, "kept by this rank's piece of each"),
    "its storage": (lambda e, m, o: param_of(m).untyped_storage(), StateError, "its storage, .* cannot be had"),
    "double": (lambda e, m, o: m.double(), StateError, "Say precision and device before"),
    "another shape": (
        lambda e, m, o: setattr(param_of(m), "grad", torch.ones(2)),
        ModelError,
        "the gradient \\[2\\]. Give the whole",
    ),
    "an integer gradient": (
        lambda e, m, o: setattr(param_of(m), "grad", torch.ones(128, 32, dtype=torch.long)),
        ModelError,
        "but the gradient torch.int64. Give a floating-point one",
    ),
    "a hook after": (
        lambda e, m, o: param_of(m).register_post_accumulate_grad_hook(print),
        StateError,
        "would see that of this rank alone",
    ),
    "a collective in the background": (
        lambda e, m, o: dist.all_reduce(param_of(m).data, async_op=True),
        StateError,
        "goes on in the background",
    ),
    "a foreign group": (
        lambda e, m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        ModelError,
        "is not one of the model's",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_in_use_refuses(what: str, place: tuple[str, bool]) -> None:
    use, kind, words = REFUSED[what]

    def refused(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(kind, match=words):
            use(engine, model, optimizer)
        step(engine)  # and training continues

    used(refused, place)


BELOW: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda p: torch.tensor(p),
    "Tensor": lambda p: torch.Tensor(p).data,
    "new_tensor": lambda p: torch.ones(1).new_tensor(p),
    "as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "nested": lambda p: torch.nested.nested_tensor([p]).unbind()[0].data,
    "vmap": lambda p: torch.vmap(lambda row: row * 1)(p).data,
    "grad": lambda p: torch.func.grad(lambda x: x.pow(2).sum() / 2)(p).data,
    "vjp": lambda p: torch.func.vjp(lambda x: x * 1, p)[0].data,
    "jit": lambda p: torch.jit.trace(lambda x: x * 1, torch.ones(2, 2))(p),
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets addresses stay while memory goes")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_asks_no_tensor_finds_nan_or_is_refused() -> None:
    """See [Note: what asks no tensor]; a name that has come to ask is to be taken out of it, and of docs/engine.md."""

    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        param = param_of(model)
        values = param.detach().clone()
        for name, read in BELOW.items():
            assert read(param).isnan().all(), name
            words = "TorchScript interpreter" if name == "jit" else "holds no values here.*Give it a copy"
            with pytest.raises(RuntimeError, match=words):
                read(param.detach())
            assert torch.equal(read(values).float(), values), name
        step(engine)

    with pytest.warns(UserWarning, match=r"recommended to use sourceTensor.detach\(\).clone\(\)"):
        used(use, ("zero3", False))


def test_torchs_collectives_write(place: tuple[str, bool]) -> None:
    """Loops that average by `dist.all_reduce(p.grad)`: torch does not count what collectives write. Threads share its
    group, of one rank, in which `scatter` writes what it is given. In torch 2.11 it does not ask tensors, and the
    group's own methods never do; those are refused, and what the error says is done."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    asks_tensors = "has_torch_function" in inspect.getsource(inspect.unwrap(dist.scatter))

    def scatter(tensor: Tensor, new: Tensor) -> None:
        bare = dist.scatter if not asks_tensors else lambda tensor, _: dist.group.WORLD.broadcast(tensor, 0)
        with pytest.raises(StateError, match=r"does not ask tensors first.*Give it a copy and write that back"):
            bare(tensor, [new])
        if asks_tensors:
            dist.scatter(tensor, [new])
            return
        values = tensor.clone()
        dist.scatter(values, [new])
        tensor.copy_(values)

    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        param = param_of(model)
        new = torch.arange(float(param.numel())).view_as(param)
        for tensor in (param.data, model.state_dict()[NAME]):
            tensor.zero_()
            scatter(tensor, new)
            assert torch.equal(engine.get(NAME), new)
        engine.backward(engine(*share_of(engine, DATA[0])))
        scatter(param.grad, new)
        param.grad /= 2
        assert torch.equal(param.grad.clone(), new / 2)

    used(use, place)


def updates_of_statistics() -> dict[str, Callable[[Tensor, Tensor, Tensor], object]]:
    """Functions that write to running statistics without counting it in their versions."""
    aten = torch.ops.aten
    return {
        "F.batch_norm": lambda x, mean, var: nn.functional.batch_norm(x, mean, var, training=True),
        "by name": lambda x, mean, var: nn.functional.batch_norm(
            x, running_var=var, running_mean=mean, training=True, momentum=0.3
        ),
        "torch.batch_norm": lambda x, mean, var: torch.batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, False),
        "native": lambda x, mean, var: torch.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5),
        "update": lambda x, mean, var: torch.batch_norm_update_stats(x, mean, var, 0.1),
        "packet": lambda x, mean, var: aten.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5),
        "overload": lambda x, mean, var: aten._native_batch_norm_legit.default(
            x, None, None, mean, var, True, 0.1, 1e-5
        ),
    }


def test_running_statistics_may_be_parameters(place: tuple[str, bool]) -> None:
    """Between steps; rank 0's count, as with every write. In evaluation nothing is written."""

    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        param = param_of(model)
        width, numbers = param.shape[1], torch.Generator()
        for name, update in updates_of_statistics().items():
            x = torch.randn(3, width, generator=numbers.manual_seed(engine.world.rank))
            expected = engine.get(NAME).clone()
            update(torch.randn(3, width, generator=numbers.manual_seed(0)), expected[0], expected[1])
            with torch.no_grad():
                update(x, param[0], param[1])
                nn.functional.batch_norm(x, param[0], param[1])
            assert torch.equal(engine.get(NAME), expected), name
            assert torch.equal(param.detach().clone(), expected), name

    used(use, place)


def test_operators_of_other_libraries_write_as_their_schema_says(place: tuple[str, bool]) -> None:
    library = torch.library.Library("shardwise_tests", "FRAGMENT")
    library.define("halve_(Tensor(a!) x) -> ()")

    def halve(x: Tensor) -> None:
        values = x.detach().numpy()  # a kernel in C++ writes to memory, too, which counts nothing
        values *= 0.5

    library.impl("halve_", halve, "CPU")

    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        expected = engine.get(NAME) / 2
        with torch.no_grad():
            torch.ops.shardwise_tests.halve_(param_of(model))
        assert torch.equal(engine.get(NAME), expected)

    used(use, place)


class Changing(Transformer):
    """Writes to a weight in its forward, in the way that `how` selects."""

    how = ""

    def logits(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            with torch.no_grad():
                self.blocks[0].up.weight.mul_(0.5)
        if self.how == "data":
            self.head.weight.data.clamp_(-0.1, 0.1)
        if self.how == "inside" and torch.is_grad_enabled():
            self.blocks[0].register_forward_pre_hook(lambda block, _: block.up.weight.data.copy_(block.up.weight))
        if self.how == "statistics":
            mean, var, *_ = self.head.weight.detach()
            nn.functional.batch_norm(torch.rand(2, len(mean)), mean, var, training=True)
        if self.how == "other memory":  # as MoCo's published code moves its key encoder
            self.blocks[0].up.weight.data = self.blocks[0].up.weight.data * 0.5
        return super().logits(x)


def test_a_forward_may_not_write_to_a_parameter(place: tuple[str, bool]) -> None:
    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        model.how = "in place"
        with pytest.raises(ModelError, match="was changed in place while the model computed"):
            engine(*share_of(engine, DATA[0]))
        model.how = ""
        step(engine)

    used(use, place, Changing)


@pytest.mark.parametrize("how", ["data", "inside", "statistics", "other memory"])
def test_a_write_that_torch_does_not_count_is_seen_in_the_first_pass(how: str, place: tuple[str, bool]) -> None:
    def build() -> nn.Module:
        model = Changing()
        model.how = how
        return model

    with pytest.raises(ModelError, match="was changed in place while the model computed"):
        used(lambda *_: None, place, build)


@pytest.mark.parametrize("fails", [False, True])
def test_so_is_one_of_a_module_that_the_loop_calls_by_itself(fails: bool, place: tuple[str, bool]) -> None:
    """As flows do that begin by their first batch, whose loop asks for log_prob(x)."""
    models = [Transformer() for _ in range(2)]

    def write(block: Any, _: object) -> None:
        block.up.weight.data.copy_(block.up.weight * 0.5)

    def assign(block: Any, _: object) -> None:
        block.up.weight.data = block.up.weight.data * 0.5

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with sw.shard(model, plan_of(place[0], None), optimizer=adamw(model), world=world):
            hidden = torch.randn(2, 3, 32)
            if fails:  # what is looked at ends with the module's call, however that ends
                with pytest.raises(RuntimeError, match="normalized_shape"):
                    model.blocks[0](torch.randn(2, 3, 31))
                with torch.no_grad():
                    model.blocks[0].up.weight.mul_(1.0)
            for change in (write, assign):
                handle = model.blocks[0].register_forward_pre_hook(change)
                with pytest.raises(ModelError, match="was changed in place while the model computed"):
                    model.blocks[0](hidden)
                handle.remove()
            model.blocks[1](model.blocks[0](hidden)).sum().backward()

    run_ranks(2, rank, shares_memory=place[1])


def test_to_look_there_takes_no_hooks_beside_those_of_units() -> None:
    """They were there for a whole job whose loop never calls the model, as a pipeline's."""

    def rank(world: sw.World) -> tuple[int, int]:
        model = Transformer()
        with sw.shard(model, "zero3", optimizer=adamw(model), world=world):
            return len(model.blocks[0]._forward_pre_hooks), len(model.blocks[0]._forward_hooks)

    assert run_ranks(1, rank) == [(1, 1)]


def test_whole_tensors_share_the_memory_of_the_parameter(place: tuple[str, bool]) -> None:
    """As with `param.data`: a write to a view changes the parameter, and a step changes the view."""

    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> bool:
        param = param_of(model)
        row = param.data[3]
        row.fill_(2.5)
        assert torch.equal(param.detach()[3].clone(), torch.full((32,), 2.5))
        before = row.clone()
        step(engine)
        assert not torch.equal(row.clone(), before)
        assert torch.equal(engine.get(NAME)[3], row.clone())
        assert "in an engine's memory" in repr(param)
        assert "in an engine's memory" in repr(row)
        assert model.to("cpu") is model
        assert isinstance(param, nn.Parameter)
        return True

    assert used(use, place) == [True, True]


def test_in_inference_mode_nothing_is_lost_either(place: tuple[str, bool]) -> None:
    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        engine.backward(engine(*share_of(engine, DATA[0])))
        with torch.inference_mode():
            param_of(model).fill_(0.25)
            param_of(model).grad.add_(torch.ones(128, 32))
            norm = param_of(model).grad.norm()
            model(*share_of(engine, DATA[0]))
        assert torch.equal(engine.get(NAME), torch.full((128, 32), 0.25))
        assert torch.allclose(engine.get(NAME, "grad").norm(), norm.clone())
        assert norm > 50
        engine.step()

    used(use, place)


def test_ranks_that_write_differently_take_rank_0s(place: tuple[str, bool]) -> None:
    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
        with torch.no_grad():
            param_of(model).fill_(1.0 + engine.world.rank)
            param_of(model).copy_(param_of(model) + engine.world.rank)
        step(engine)
        return engine.get(NAME)

    one, two = used(use, place)
    assert torch.equal(one, two)
    assert (one - 1).abs().max() < 0.01


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_is_not_edited_keeps_its_full_precision(precision: str, place: tuple[str, bool]) -> None:
    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        before = engine.get(NAME)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        assert torch.equal(engine.get(NAME), before)
        assert not torch.equal(before.to(param_of(model).dtype).float(), before)
        with torch.no_grad():
            param_of(model)[0] = 0.5
        after = engine.get(NAME)
        assert torch.equal(after[1:], before[1:])
        assert torch.equal(after[0], torch.full((32,), 0.5))

    used(use, place, precision=precision)


def test_a_gradient_that_was_zeroed_is_gone(place: tuple[str, bool]) -> None:
    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        assert param_of(model).grad is None
        engine.backward(engine(*share_of(engine, DATA[0])))
        grad = param_of(model).grad
        whole = engine.get(NAME, "grad")
        for kind in (1, 2, 3.5, float("inf"), float("-inf"), 0):
            ours, plain = torch.linalg.vector_norm(grad, kind), torch.linalg.vector_norm(whole, kind)
            assert torch.allclose(ours, plain, rtol=1e-5), kind
        engine.zero_grad()
        with pytest.raises(StateError, match=f"the gradient of {NAME} is gone"):
            grad.sum()
        assert param_of(model).grad is None

    used(use, place)


def test_gradients_of_a_local_loss_are_averaged_when_they_are_assigned(place: tuple[str, bool]) -> None:
    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
        param_of(model).grad = torch.full((128, 32), float(engine.world.rank))
        return engine.get(NAME, "grad")

    for grad in used(use, place):
        assert torch.equal(grad, torch.full((128, 32), 0.5))


def test_a_rank_that_reads_alone_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host no message is needed for the read, but it is detected, as between hosts."""

    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        if engine.world.rank == 0:
            param_of(model).sum()
        step(engine)

    for shares in (True, False):
        with pytest.raises(FaultError, match=NAME.removesuffix(".up.weight")):
            used(use, ("zero3", shares))


def test_a_closed_engine_leaves_a_model_that_says_so_or_takes_values(place: tuple[str, bool]) -> None:
    def use(engine: sw.Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
        state = engine.state_dict()
        engine.close()
        if place[0] == "zero3":
            with pytest.raises(StateError, match="its engine was closed"):
                param_of(model).sum()
        model.load_state_dict(state)
        assert type(param_of(model)) is nn.Parameter
        assert torch.equal(param_of(model), state[NAME])

    used(use, place)


def test_what_an_update_has_not_made_whole_cannot_be_read_from_a_closed_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails before it sends what it has updated."""
    plain_gather = ParamMover.gather_updated

    def gather_updated(self: ParamMover, action: Action) -> None:
        if threading.current_thread().name == "rank 1":
            raise ValueError("rank 1 fails")
        plain_gather(self, action)

    monkeypatch.setattr(ParamMover, "gather_updated", gather_updated)
    models = [Transformer() for _ in range(2)]

    def two_steps(model: nn.Module, world: sw.World) -> None:
        with sw.shard(model, "zero1", optimizer=adamw(model), world=world) as engine:
            step(engine)
            assert all(flat.is_updating for flat in inside.flats(engine))
            step(engine)

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with pytest.raises(FaultError if world.rank == 0 else ValueError, match=r"[Rr]ank 1"):
            two_steps(model, world)
        if world.rank == 0:
            with pytest.raises(StateError, match="its engine was closed"):
                model.tokens.weight.sum()

    run_ranks(2, rank, hosts=["a", "b"], patience_seconds=0.2)


def test_what_was_there_before_is_refused() -> None:
    def with_gradient(model: nn.Module) -> None:
        next(model.parameters()).grad = torch.ones_like(next(model.parameters()))

    def with_hook(model: nn.Module) -> None:
        next(model.parameters()).register_post_accumulate_grad_hook(print)

    for prepare, words in ((with_gradient, "has a gradient already"), (with_hook, "has a post-accumulate hook")):
        model = Transformer()
        prepare(model)
        with pytest.raises(ModelError, match=words):
            sw.shard(model, "zero3")
        assert type(next(model.parameters())) is nn.Parameter


def test_a_closed_engine_lets_its_model_change() -> None:
    """torch's registration hooks are global. Only models of open engines are affected."""
    model = Transformer()
    with sw.shard(model, "zero3", optimizer=adamw(model)) as engine:
        step(engine)
    model.head = nn.Linear(3, 3)
    model.norm.weight = nn.Parameter(torch.ones(32))


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x).pow(2).mean()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.pow(2).sum() / len(x)


def test_a_gradient_penalty_is_the_plain_ones(place: tuple[str, bool]) -> None:
    start, x = Chain(3, torch.tanh), torch.randn(4, 8)  # twice differentiable, unlike fused attention
    twin = copy.deepcopy(start)
    plain = torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(3):
        plain.zero_grad()
        (sum(penalty(twin, half) for half in x.chunk(2)) / 2).backward()
        plain.step()
    replicas = [copy.deepcopy(start) for _ in range(2)]

    def rank(world: sw.World) -> dict[str, Tensor]:
        model = replicas[world.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine = sw.shard(model, place[0], optimizer=optimizer, world=world)
        for _ in range(3):
            optimizer.zero_grad()
            penalty(model, x.chunk(2)[world.rank]).backward()
            optimizer.step()
        assert inside.meter(engine).now["working"] == 0 or place[0] == "zero3"
        return engine.state_dict()

    for state in run_ranks(2, rank, shares_memory=place[1]):
        for name, param in twin.named_parameters():
            assert torch.allclose(state[name], param.detach(), rtol=1e-5, atol=1e-6), name
