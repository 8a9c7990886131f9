"""What makes no sense is refused with a clear error, on every rank, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from twins import batches, work_on_ranks

import shardwise as sw
from shardwise.comm.transport.gloo import GlooTransport
from shardwise.errors import CommError, ConfigError, FaultError, ModelError, PlacementError, StateError
from shardwise.plan.comm_hooks import instead_of_hook, name_of, settings_of
from shardwise.plan.load import load_plan
from shardwise.testing import run_ranks
from tests.models import Transformer


def refused(num_ranks: int, work: Callable[[sw.World], Any], kind: type[Exception]) -> str:
    def rank(world: sw.World) -> str:
        with pytest.raises(kind) as caught:
            work(world)
        return str(caught.value)

    messages = run_ranks(num_ranks, rank)
    assert len(set(messages)) == 1
    return messages[0]


PLANS: dict[str, tuple[Any, str]] = {
    "preset": ("zerro3", "There is no preset 'zerro3'. Did you mean 'zero3'?"),
    "axis": (
        {"preset": "hsdp", "mesh": {"node": 1, "locl": 2}},
        "names mesh axis 'local', but the mesh is node=1 x locl=2. Did you mean 'locl'?",
    ),
    "row axis": ({"rows": {"held": {"shard": ["tp"]}}}, "names mesh axis 'tp'"),
    "mesh": ({"mesh": {"dp": 3}}, "The mesh dp=3 makes 3 ranks, but the world has 2."),
    "key": ({"prefech_bytes": 3}, "Did you mean 'prefetch_bytes'?"),
    "value": ({"precision": "fp17"}, "precision"),
    "file": ("plans/nowhere.yaml", "nowhere.yaml"),
    "repeated update": (
        {"preset": "ddp", "rows": {"grad": {"shard": ["dp"]}}},
        "every rank there would repeat the same update",
    ),
    "tier": ({"rows": {"optim": {"tier": "disk"}}}, "disk"),
    "tiers": ({"rows": {"param": {"tier": "host"}}}, "Set rows.optim.tier=host too."),
    "unit name": ({"units": ["blocks.*", "hed"]}, "Did you mean 'head'?"),
    "unit class": ({"units": {"class": "Blok"}}, "Did you mean 'Block'?"),
    "nested units": ({"units": ["blocks", "blocks.1"]}, "'blocks.1' and also a module around it"),
    "compile": ({"compile": "inductr"}, "compile is 'inductr', which torch.compile does not know. Did you mean"),
}


@pytest.mark.parametrize("case", PLANS)
def test_plans_that_are_refused(case: str) -> None:
    """After the refusal nothing has changed, and the model can be sharded by a valid plan."""
    plan, words = PLANS[case]
    torch.manual_seed(0)
    models = [Transformer() for _ in range(2)]
    before = [{name: (param, param.detach().clone()) for name, param in each.named_parameters()} for each in models]
    message = refused(2, lambda world: sw.shard(models[world.rank], plan, world=world), ConfigError)
    assert words in message
    for model, params in zip(models, before, strict=True):
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        for name, param in model.named_parameters():
            assert param is params[name][0]
            assert torch.equal(param, params[name][1])


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "sent"])
def test_plans_that_are_refused_by_reshard_leave_the_engine_as_it_was(*, shares_memory: bool) -> None:
    data = batches(2, rows=4)

    def work(engine: sw.Engine) -> None:
        engine.backward(engine(*data[0]))
        engine.step()
        before = engine.state_dict()
        for plan, words in PLANS.values():
            with pytest.raises(ConfigError) as caught:
                engine.reshard(plan)
            assert words in str(caught.value)
            after = engine.state_dict()
            assert all(torch.equal(value, after[name]) for name, value in before.items())
        engine.backward(engine(*data[1]))
        engine.step()
        assert any(not torch.equal(value, before[name]) for name, value in engine.state_dict().items())

    work_on_ranks(2, work, "zero3", Transformer, shares_memory=shares_memory)


def scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        pytest.param(
            scripted,
            "Module 1 was made by torch.jit",
            marks=pytest.mark.filterwarnings("ignore:`torch.jit"),
        ),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), "Parameter 1.weight has no shape yet"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)),
            "Buffer 1.running_mean has no shape",
        ),
    ],
    ids=["a script", "a lazy module", "lazy buffers"],
)
def test_models(build: Callable[[], nn.Module], words: str) -> None:
    models = [build() for _ in range(2)]
    assert words in refused(2, lambda world: sw.shard(models[world.rank], world=world), ModelError)


class Wrapping(torch.Tensor):
    """A tensor whose elements are made from tensors inside it, as torchao's quantized weights are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapping:
        made: Wrapping = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*[one.inner if isinstance(one, cls) else one for one in args], **(kwargs or {}))
        return cls(found) if func is torch.ops.aten.detach.default else found


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Wrapping(torch.ones(3)), "is a Wrapping, which wraps other tensors"),
        (lambda: _nested(torch.jagged), "is nested"),
        (lambda: _nested(torch.strided), "is nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "is quantized (torch.qint8)"),
        (lambda: torch.eye(3).to_sparse_csr(), "is sparse (torch.sparse_csr)"),
        (lambda: torch.eye(3).to_mkldnn(), "is opaque (torch._mkldnn)"),
    ],
    ids=["wrapping", "jagged", "nested", "quantized", "csr", "mkldnn"],
)
def test_tensors_whose_elements_do_not_lie_in_memory(kind: str, make: Callable[[], torch.Tensor], words: str) -> None:
    model = nn.Linear(2, 2)
    if kind == "parameter":
        model.codes = nn.Parameter(make(), requires_grad=False)
    else:
        model.register_buffer("codes", make())
    told = refused(1, lambda world: sw.shard(model, world=world), ModelError)
    assert f"codes {words}" in told


def test_a_plain_attribute_may_be_any_tensor() -> None:
    model = nn.Linear(2, 2)
    model.mask = Wrapping(torch.ones(3))
    run_ranks(1, lambda world: sw.shard(model, world=world).close())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ([nn.Linear(2, 2)], "The model is a list, not an nn.Module"),
        (nn.Linear, "The model is the class Linear; give shard() an instance"),
        (nn.Linear(2, 2).parameters(), "The model is a generator"),
    ],
)
def test_what_is_no_model(model: Any, words: str) -> None:
    assert words in refused(2, lambda world: sw.shard(model, world=world), ModelError)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_an_optimizer_in_the_backward() -> None:
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    model = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    told = refused(1, lambda world: sw.shard(model, world=world), ModelError)
    assert "Parameter weight has an optimizer that steps inside the backward" in told


def test_a_model_that_another_library_has_spread() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
    assert "Parameter weight is a DTensor" in refused(1, lambda world: sw.shard(model, world=world), ModelError)


def test_a_model_that_another_library_spreads_after_shard() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Linear(2, 2)

    def spread_twice(world: sw.World) -> None:
        engine = sw.shard(model, "zero3", world=world)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        engine(torch.ones(1, 2))

    assert "Another library has spread the model over ranks after shard()" in refused(1, spread_twice, ModelError)


@pytest.mark.parametrize("is_root", [True, False])
def test_a_model_in_the_wrapper_of_another_library(is_root: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapped: nn.Module = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model = wrapped if is_root else nn.Sequential(nn.Linear(2, 2), wrapped)
    message = refused(1, lambda world: sw.shard(model, world=world), ModelError)
    assert f"{'The model' if is_root else 'Module 1'} is a DistributedDataParallel" in message
    assert "shard the plain model" in message


HOOKS: dict[str, tuple[object, Any, str]] = {
    "fp16": (None, default_hooks.fp16_compress_hook, "hook fp16_compress_hook, set wire: {grad: bf16} in the plan."),
    "fp16 around another": (
        powerSGD_hook.PowerSGDState(None),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        "set wire: {grad: bf16} in the plan.",
    ),
    "powersgd": (
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=50, min_compression_rate=3),
        powerSGD_hook.powerSGD_hook,
        "powerSGD_hook, set preset: ddp and powersgd: {rank: 4, start_step: 50, min_rate: 3} in the plan.",
    ),
    "8 bits": (None, quantization_hooks.quantization_pertensor_hook, "set wire: {grad: int8} in the plan."),
    "local": (None, post_localSGD_hook.post_localSGD_hook, "islands: {every: 100, optimizer: {lr: 1, momentum: 0}}"),
    "none": (None, default_hooks.allreduce_hook, "set nothing: gradients are averaged."),
    "by hand": (None, lambda _, bucket: bucket, "hook <lambda>, see which of wire, powersgd and islands in the plan"),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_wrapper_whose_hook_sends_gradients_otherwise(name: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state, hook, cure = HOOKS[name]
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(state, hook)
    assert cure in refused(1, lambda world: sw.shard(model, world=world), ModelError)


def test_what_a_plan_has_instead_of_a_hook_is_a_plan() -> None:
    for state, hook, _ in HOOKS.values():
        words = instead_of_hook(name_of(hook), settings_of(state))
        if " in the plan" in words and words.startswith("set "):
            parts = words.removeprefix("set ").removesuffix(" in the plan").split(" and ")
            plan = {key: value for part in parts for key, value in yaml.safe_load(part).items()}
            assert load_plan(plan)


def test_parameters_on_different_devices() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    message = refused(1, lambda world: sw.shard(model, world=world), ModelError)
    assert "0.weight on cpu, 1.weight on meta" in message
    message = refused(1, lambda world: sw.shard(nn.ReLU(), world=world), ModelError)
    assert "no parameters" in message


class Norms(torch.optim.Optimizer):
    """Scales each parameter's update by the norm of the whole parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * group["lr"] * param.norm() / (param.grad.norm() + 1e-6))


def of_matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 2]


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "norms": (
        lambda model: Norms(model.parameters()),
        "Norms is not elementwise: its step calls aten::linalg_vector_norm",
    ),
    "closure": (lambda model: torch.optim.LBFGS(model.parameters()), "all parameters together; use AdamW or SGD"),
    "factored": (
        lambda model: torch.optim.Adafactor(model.parameters()),
        "Use shardwise.optim.Adafactor, which sums rows",
    ),
    "sparse": (lambda model: torch.optim.SparseAdam(model.parameters()), "Make the embedding with sparse=False"),
    "muon": (lambda model: torch.optim.Muon(of_matrices(model)), "Use shardwise.optim.Muon, which takes the same"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_are_not_elementwise(name: str) -> None:
    make, words = OPTIMIZERS[name]

    def work(world: sw.World) -> None:
        model = Transformer()
        sw.shard(model, "zero3", optimizer=make(model), world=world)

    assert words in refused(2, work, ModelError)


def test_a_refused_optimizer_leaves_the_model_as_it_was() -> None:
    model = Transformer()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(ModelError):
        sw.shard(model, "zero3", optimizer=torch.optim.LBFGS(model.parameters()))
    x, y = batches(1)[0]
    model(x, y).backward()
    assert all(torch.equal(before[name], param) for name, param in model.named_parameters())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_a_model_that_is_spread_as_dtensors_afterwards(preset: str) -> None:
    """On all ranks, before one waits for values that another one sends."""
    from torch.distributed.tensor import distribute_module

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = dist.init_device_mesh("cpu", (1,))
    models = [Transformer() for _ in range(2)]

    def spread(world: sw.World) -> None:
        with sw.shard(models[world.rank], preset, world=world):
            distribute_module(models[world.rank], mesh)

    told = refused(2, spread, StateError)
    assert "for a DTensor (parallelize_module, distribute_module: leave that call out)" in told


def test_an_optimizer_of_another_model() -> None:
    other = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    message = refused(1, lambda world: sw.shard(Transformer(), optimizer=other, world=world), ModelError)
    assert "shape (3, 3) that is not one of the model's" in message
    assert "sw.shard(nn.ModuleList([model, other]), ...)" in message


def test_calls_that_make_no_sense() -> None:
    model = Transformer()
    engine = sw.shard(model, "zero3")
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    with pytest.raises(StateError, match="no optimizer"):
        engine.step()
    with pytest.raises(ModelError, match="was given a float, not a loss"):
        engine.backward(engine(x, y).item())
    with pytest.raises(ModelError, match=r"has tokens\.weight on the meta device"):
        engine.load_state_dict({name: value.to("meta") for name, value in engine.state_dict().items()})
    places = {"parameters": r"engine\.module\.parameters", "head": r"engine\.module\.head", "blok": "'blok'"}
    for name, where in places.items():
        with pytest.raises(AttributeError, match=where):
            getattr(engine, name)
    assert not hasattr(engine, "require_backward_grad_sync")
    with pytest.raises(ConfigError, match=r"remember\(loader=...\): a list has no state_dict"):
        engine.remember(loader=[])
    engine.close()
    engine.close()
    with pytest.raises(StateError, match="closed"):
        engine(x, y)


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(400, 64, sparse=True), nn.Linear(64, 1))
    engine = sw.shard(model, "zero3")
    with pytest.raises(ModelError, match=r"gradient of 0\.weight is sparse"):
        engine.backward(engine(torch.tensor([[1, 2]])).sum())
    engine.close()


def test_an_environment_that_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="is not a number"):
        sw.World.join(environment={"RANK": "x", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="RANK=2 is not within WORLD_SIZE=2"):
        sw.World.join(environment={"RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="MASTER_PORT=70000 is not a port"):
        sw.World.join(environment={"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"})
    with pytest.raises(ConfigError, match="SHARDWISE_SHARED_MEMORY='false' says neither 0 nor 1"):
        sw.World.join(environment={"SHARDWISE_SHARED_MEMORY": "false"})


def test_an_address_without_a_rank_is_no_rendezvous() -> None:
    """It is left over, or meant for others: nothing is listened to or connected to there."""
    with sw.World.join(environment={"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}) as world:
        assert world.size == 1
        assert not torch.distributed.is_initialized()


def test_rank_0_does_not_need_to_reach_itself_at_its_address() -> None:
    """It may be that of a router, or be left over from another host; its name may not be known yet."""
    for address in ("192.0.2.1", "no-such-host.invalid"):
        place = {"MASTER_ADDR": address, "MASTER_PORT": "0", "RANK": "0"}
        with sw.World.join(environment={**place, "WORLD_SIZE": "1"}) as world:
            assert (world.rank, world.size) == (0, 1)
        with pytest.raises(FaultError, match=f"Rank 1 of 2 never came to {address}:0"):
            sw.World.join(0.2, environment={**place, "WORLD_SIZE": "2"})


def test_a_join_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: the next one must not take the process group that is left for one of the script's."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}

    def refuse(*_: object) -> None:
        raise CommError("A rank is gone.")

    with monkeypatch.context() as patch:
        patch.setattr(GlooTransport, "watch_peers", refuse)
        with pytest.raises(CommError, match="gone"):
            sw.World.join(environment=place)
    assert not torch.distributed.is_initialized()
    with sw.World.join(environment=place) as world:
        assert world.mean(2.0) == 2.0


def test_a_rank_that_fails_releases_the_others() -> None:
    def rank(world: sw.World) -> None:
        if world.rank == 1:
            raise KeyError("mine")
        world.barrier()

    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, rank)


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_a_loop_that_catches_a_fault_cannot_go_on(preset: str, tmp_path: Path) -> None:
    """Every entry raises it again, and says where the loop has caught it; also with `ddp`, where forwards send nothing.
    Closing does not."""
    models = [nn.Linear(3, 2) for _ in range(2)]

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(torch.ones(1, 3))

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = sw.shard(model, preset, optimizer=optimizer, world=world)
        loss = model(torch.ones(1, 3)).sum()
        with pytest.raises(FaultError) as first:
            engine.mean(loss) if world.rank else engine.backward(loss)
        entries: list[Callable[[], object]] = [
            lambda: model(torch.ones(1, 3)),
            lambda: evaluate(model),
            lambda: engine(torch.ones(1, 3)),
            lambda: engine.backward(loss),
            engine.step,
            optimizer.step,
            engine.zero_grad,
            lambda: engine.get("weight"),
            lambda: engine.eval_step(torch.ones(1, 3), loss_fn=torch.sum),
            lambda: engine.train_step(torch.ones(1, 3), loss_fn=torch.sum),
            lambda: engine.save(tmp_path),
        ]
        line = first.traceback[0].lineno + 1
        for entry in entries:
            with pytest.raises(FaultError) as again:
                entry()
            told = str(again.value)
            assert told.startswith(str(first.value))
            assert f"raised before, at test_refusals.py:{line}, and the script went on" in told
            assert told.count("raised before") == 1
        engine.close()

    run_ranks(2, rank, patience_seconds=0.5)


def test_rows_that_contradict_each_other() -> None:
    plan = {
        "preset": "hpz",
        "mesh": {"node": 1, "local": 1},
        "rows": {"held": {"shard": ["node"]}, "param": {"shard": ["local"]}},
    }
    with pytest.raises(PlacementError, match="neither contains the other"):
        sw.shard(Transformer(), plan)
