"""Training on threads in replica groups, of which ranks die, beside the same training in one process. `AXES` has each
axis of which the ranks of a group share the work, with a task in which they do, and `PAIRS` has two of them each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sequences import Batch
from sequences import batches as batches_of_sequences
from split_models import TENSOR, Transformer, tokens
from torch import nn
from torch.nn import functional
from twins import batches

import shardwise as sw
from shardwise import testing
from shardwise.comm import PostOffice, ThreadTransport, World
from shardwise.parallel.experts import update_biases
from shardwise.testing import fail_at
from tests import inside
from tests.models import Decoder, ExpertBlock, Gpt, Mixture
from tests.ranks.test_lost_ranks import (
    adamw,
    assert_memory_as_promised,
    assert_same_values,
    is_lock_beside_nothing,
    update,
)
from tests.ranks.threads_as_members import Killed, ThreadMembership, run_members

Tensor = torch.Tensor
ROWS, NUM_STEPS = 4, 6
BOUND, LOW_PRECISION_BOUND = 5e-6, 5e-2
PRESETS = ("ddp", "zero1", "zero2", "zero3")
LOOPS = ("engine", "plain", "train_step")
Plant = Callable[[sw.Engine, int], None]


class Task:
    """A model, and what it is trained on."""

    make: Callable[[], nn.Module]

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss of the whole batch of `step`, of the plain model."""
        raise NotImplementedError

    def after_step(self, plain: nn.Module) -> None:
        """What a loop calls after a step of the plain model."""

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        """Take a step on share `place` of `num` of that batch, and return its loss."""
        raise NotImplementedError


class Layers(Task):
    """A model whose layers can be split, and divided into stages."""

    def __init__(self, make: Callable[[], nn.Module] = Transformer) -> None:
        self.make = make

    def loss(self, model: nn.Module, step: int) -> Tensor:
        loss: Tensor = model(tokens(step, ROWS))
        return loss

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        batch = tokens(step, ROWS).tensor_split(num)[place]
        engine.weigh(len(batch), ROWS)
        if loop == "train_step":
            return engine.train_step(batch)
        loss: Tensor = engine.module(batch)
        update(loop, engine, optimizer, loss)
        return loss


class Deep(Transformer):
    """Enough blocks for eight stages."""

    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__(num_blocks=num_blocks)


class TokenNorm(nn.BatchNorm1d):
    """Over all tokens of a micro-batch. Its running statistics are buffers."""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = super().forward(x.flatten(0, -2))
        return normed.view_as(x)


class Statistics(Deep):
    """Each block has statistics of its own."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        for block in self.blocks:
            block.norm2 = TokenNorm(self.embed.embedding_dim)


class Normed(Layers):
    """Statistics are those of micro-batches, so the plain model computes these too."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(partial(Statistics, num_blocks))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        losses = [model(micro_batch) for micro_batch in tokens(step, ROWS).chunk(2)]
        return torch.stack(losses).mean()


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")


def mean_of(logits: Tensor, batch: Batch) -> Tensor:
    return losses_of(logits, batch["labels"]).sum() / (batch["labels"] != -100).sum()


class Sequences(Task):
    """Next tokens, of which the last of each sample do not count, so that the ranks along `sp` have different numbers
    of those that do."""

    make = Gpt

    def __init__(self) -> None:
        self.batches = batches_of_sequences(NUM_STEPS, rows=ROWS)
        for batch in self.batches:
            batch["labels"] = batch["labels"].clone()
            batch["labels"][:, -5:] = -100

    def loss(self, model: nn.Module, step: int) -> Tensor:
        batch = self.batches[step]
        return mean_of(model(batch["input_ids"], batch["position_ids"]), batch)

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        batch = {name: value.tensor_split(num)[place] for name, value in self.batches[step].items()}
        engine.weigh(len(batch["labels"]), ROWS)
        mine: Batch = engine.split_sequence(batch)
        inputs = mine["input_ids"], mine["position_ids"]

        def mean(logits: Tensor, labels: Tensor) -> Tensor:
            return engine.mean_over_tokens(losses_of(logits, labels), labels.flatten() != -100)

        if loop == "train_step":
            return engine.train_step(inputs, mine["labels"], loss_fn=mean)
        logits = engine.module(*inputs)
        if loop == "joined":
            loss = mean_of(engine.join_sequence(logits), batch)
            update("engine", engine, optimizer, loss)
        else:
            loss = mean(logits, mine["labels"])
            update(loop, engine, optimizer, loss)
        return loss


class Experts(Task):
    """A language model with experts in all blocks but the first."""

    def __init__(self, make: Callable[[], nn.Module] = Mixture, *, every: int = 1, rows: int = 8) -> None:
        """Biases are updated after `every` few steps."""
        self.make = make
        self._every, self._rows = every, rows
        self._num_plain = 0
        self.batches = batches(NUM_STEPS, rows)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        loss: Tensor = model(*self.batches[step])
        return loss

    def after_step(self, plain: nn.Module) -> None:
        self._num_plain += 1
        if self._num_plain % self._every == 0:
            update_biases(plain)

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        x, y = (part.tensor_split(num)[place] for part in self.batches[step])
        engine.weigh(len(x), self._rows)
        if loop == "train_step":
            loss = engine.train_step((x, y))
        else:
            loss = self.loss_of_call(engine.module, x, y)
            update(loop, engine, optimizer, loss)
        if engine.num_steps % self._every == 0:  # in void iterations, too
            update_biases(engine.module)
        return loss.detach()

    def loss_of_call(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = module(x, y)
        return loss


@dataclass(frozen=True)
class Axis:
    """An axis along which the ranks of a replica group share the work."""

    mesh: dict[str, int]
    """Of four ranks."""
    ways: Mapping[str, tuple[Callable[[], Task], dict[str, Any]]]
    """Tasks, and what a plan has for them besides preset and mesh, by name. The first is the usual one."""
    points: Mapping[str, tuple[str, int]]
    """The last thing before which a rank dies: an action or a collective as `explain` prints it, and its how many-th of
    a step."""
    frozen: tuple[str, ...]
    """Names of parameters that are not trained: a part that is split, and one that all ranks have whole."""
    settings: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Other settings of a plan."""
    loops: tuple[str, ...] = LOOPS
    ways_with_points: tuple[str, ...] = ()
    """Those that come by all `points`, if not all do."""
    has_groups: bool = True
    """Whether the group of a lost rank leaves, and another remains."""
    num_calls: int = 100
    """About how many communications of any kind a rank begins in a job."""

    def plan(self, preset: str, way: str = "", mesh: Mapping[str, int] | None = None) -> dict[str, Any]:
        return {"preset": preset, "mesh": dict(mesh or self.mesh), **self.ways[way or self.usual][1]}

    @property
    def usual(self) -> str:
        return next(iter(self.ways))

    def way_with(self, setting: str) -> str:
        """The usual way, but for micro-batches one without losses of routers: these are of each micro-batch, and so are
        not those of the whole batch, whether ranks are lost or not."""
        return "uneven" if setting == "micro-batches" and "uneven" in self.ways else self.usual


BLOCKS = {name: style for name, style in TENSOR["plan"].items() if name.startswith("blocks")}
SETTINGS: dict[str, dict[str, Any]] = {
    "clipping": {"clip_grad_norm": 1e9},
    "micro-batches": {"preset": "zero3", "accumulate": 2},
    "recomputed": {"preset": "zero3", "activations": {"policy": "recompute"}},
    "on the host": {"preset": "zero3-offload"},
    "on a disk": {"preset": "infinity", "disk": "scratch"},
    "activations on a disk": {"activations": "disk", "disk": "scratch"},
    "parameters on a disk": {"preset": "infinity", "rows": {"param": {"tier": "disk"}}, "disk": "scratch"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
}
AFTER_BACKWARD = {
    "a reduction": ("*reduce* blocks.1 *", 1),
    "waiting": ("wait blocks.1*", 1),
    "the verdict": ("all_reduce of verdict", 1),
    "the commit": ("exchange of commit", 1),
    "a mean": ("gather of weighed mean", 1),
}
IN_LAYERS = {
    "the forward": ("gather of activations", 1),
    "the backward": ("all_reduce of activations", 1),
    "the verdict of the group": ("agree * verdict tp *", 1),
}
LAYERS = Axis(
    mesh={"dp": 2, "tp": 2},
    ways={"layers": (Layers, {"tensor": TENSOR})},
    points={**IN_LAYERS, **AFTER_BACKWARD},
    frozen=("positions.*", "blocks.0.up.*", "blocks.1.norm1.*"),
    settings={**SETTINGS, "sequence": {"tensor": {**TENSOR, "plan": BLOCKS, "sequence": True}}},
)
STAGES = Axis(
    mesh={"dp": 2, "pp": 2},
    ways={
        schedule: (Layers, {"accumulate": 2, "pipeline": {"schedule": schedule}})
        for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1")
    },
    points={
        "the batch": ("exchange of activations", 1),
        "a forward": ("message of activation 1", 1),
        "a backward": ("message of gradient 0", 1),
        "a reduction": ("*reduce* blocks.*", 1),
        "the loss": ("broadcast of loss", 1),
        "gradients of tied layers": ("message of gradients", 1),
        "the verdict": ("agree * verdict *", 1),
        "the verdict of all stages": ("agree * verdict pp *", 1),
        "the commit": ("exchange of commit", 1),
        "a mean": ("gather of weighed mean", 1),
    },
    frozen=LAYERS.frozen,
    settings={
        **{name: settings for name, settings in SETTINGS.items() if name != "micro-batches"},
        "sequence": {
            "mesh": {"dp": 2, "pp": 2, "tp": 2},
            "tensor": {**TENSOR, "plan": BLOCKS, "sequence": True},
        },
        "listed stages": {"pipeline": {"stages": [["embed", "positions"], ["blocks.*", "norm", "head"]]}},
        "rules": {"preset": "zero3", "rules": {"norms": {"params": ["*norm*"], "rows": {"param": {"shard": []}}}}},
        "a share of units on the host": {"preset": "zero2", "offload": {"optim": 0.5}},
    },
    loops=("train_step",),
    num_calls=240,
)
SAMPLES = Axis(
    mesh={"dp": 2, "sp": 2},
    ways={
        "ulysses": (Sequences, {"sequence": {"attention": "ulysses"}}),
        "ring": (Sequences, {"sequence": {"attention": "ring"}}),
    },
    points={
        "the split": ("exchange of activations", 1),
        "the forward": ("all_to_all of activations", 2),
        "the backward": ("all_to_all of activations", 6),
        "the join": ("gather of activations", 1),
        "tokens are counted": ("all_reduce of activations", 2),
        **AFTER_BACKWARD,
    },
    frozen=("positions.*", "blocks.0.up.*", "blocks.1.norm1.*"),
    settings=SETTINGS,
    loops=(*LOOPS, "joined"),
    num_calls=150,
)
BIASED = {"scores": "sigmoid", "bias_rate": 0.05, "scale": 1.5}
WITH_BUFFERS: dict[str, Callable[[int], Task]] = {
    "statistics": Normed,
    "biases": lambda num: Experts(
        partial(Decoder, num_blocks=num, block=lambda _, width: ExpertBlock(width, **BIASED))
    ),
}
"""Tasks of which each stage has buffers that change, by the number of blocks."""
OF_FOUR_RANKS = {"1f1b": 4, "gpipe": 4, "interleaved": 8, "zb-h1": 4}
"""As many blocks as four ranks have stages."""
AXES = {
    "tp": LAYERS,
    "tp alone": Axis(
        mesh={"dp": 1, "tp": 4},
        ways=LAYERS.ways,
        points={name: LAYERS.points[name] for name in (*IN_LAYERS, "the verdict", "the commit", "a mean")},
        frozen=LAYERS.frozen,
        settings=LAYERS.settings,
        has_groups=False,
    ),
    "pp": STAGES,
    "pp alone": Axis(
        mesh={"dp": 1, "pp": 4},
        ways={
            **{
                way: (partial(Layers, partial(Deep, OF_FOUR_RANKS[way])), plan)
                for way, (_, plan) in STAGES.ways.items()
            },
            **{
                f"{name}, {way}": (partial(make, OF_FOUR_RANKS[way]), STAGES.ways[way][1])
                for name, make in WITH_BUFFERS.items()
                for way in ("1f1b", "interleaved", "zb-h1")
            },
        },
        points={
            name: point
            for name, point in STAGES.points.items()
            if name not in ("a reduction", "gradients of tied layers")  # nobody, or not all have any
        },
        frozen=STAGES.frozen,
        settings={name: SETTINGS[name] for name in SETTINGS if name != "micro-batches"},
        loops=STAGES.loops,
        has_groups=False,
        num_calls=240,
    ),
    "sp": SAMPLES,
    "sp alone": Axis(
        mesh={"dp": 1, "sp": 4},
        ways=SAMPLES.ways,
        points={name: SAMPLES.points[name] for name in SAMPLES.points if name != "waiting"}
        | {"tokens are counted": ("all_reduce of activations", 1)},
        frozen=SAMPLES.frozen,
        settings=SETTINGS,
        loops=SAMPLES.loops,
        has_groups=False,
        num_calls=150,
    ),
    "ep": Axis(
        mesh={"dp": 2, "ep": 2},
        ways={
            name: (lambda experts=experts: Experts(partial(Mixture, **experts)), {})
            for name, experts in {
                "balanced, shared": {"balance_loss": 0.1, "z_loss": 0.01, "shared_size": 16},
                "biased": BIASED,
                "uneven": {"num_experts": 5, "top_k": 3},
                "not gated": {"gated": False, "activation": "gelu"},
                # Enough that nothing is dropped: what is depends on the number of ranks.
                "with a capacity": {"capacity_factor": 4.0},
            }.items()
        },
        points={
            "how many rows are sent": ("all_to_all of activations", 1),
            "rows are sent": ("all_to_all of activations", 2),
            "rows come back": ("all_to_all of activations", 6),
            "gradients of rows": ("all_to_all of activations", 8),
            "balance of the first router, or choices in the step": ("all_reduce of activations", 1),
            "a reduction of experts": ("*reduce* blocks.1:ep *", 1),
            **AFTER_BACKWARD,
            "a reduction": ("*reduce* blocks.2 *", 1),
        },
        frozen=("blocks.1.moe.experts.down_proj", "blocks.2.moe.router.weight"),
        settings=SETTINGS,
        ways_with_points=("balanced, shared", "biased"),
        num_calls=200,
    ),
}
AXES["ep alone"] = Axis(
    mesh={"dp": 1, "ep": 4},
    ways=AXES["ep"].ways,
    points={
        name: point for name, point in AXES["ep"].points.items() if name != "a reduction of experts"
    },  # there is none
    frozen=AXES["ep"].frozen,
    settings=SETTINGS,
    ways_with_points=AXES["ep"].ways_with_points,
    has_groups=False,
    num_calls=200,
)
WAYS = [(name, way) for name, axis in AXES.items() for way in axis.ways]


class SequencesWithExperts(Sequences):
    make = partial(Gpt, block=lambda _, width: ExpertBlock(width))


MLP = {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}
MLP_BEFORE_EXPERTS = {"plan": {"blocks.0.up": "column", "blocks.0.down": "row"}}
STAGES_OF_EXPERTS = partial(Experts, partial(Decoder, num_blocks=4, block=lambda _, width: ExpertBlock(width)))
IN_GROUPS_OF_FOUR = {
    "the verdict": ("*verdict*", 1),
    "the commit": ("exchange of commit", 1),
    "a mean": ("gather of weighed mean", 1),
}
PAIRS = {
    "pp tp": Axis(
        mesh={"pp": 2, "tp": 2},
        ways={
            way: (partial(Layers, partial(Deep, 4)), {**plan, "tensor": TENSOR})
            for way, (_, plan) in STAGES.ways.items()
        },
        points={**IN_GROUPS_OF_FOUR, "a forward": ("message of activation 1", 1)},
        frozen=STAGES.frozen,
        settings=AXES["pp alone"].settings,
        loops=STAGES.loops,
        has_groups=False,
        num_calls=240,
    ),
    "sp tp": Axis(
        mesh={"sp": 2, "tp": 2},
        ways={way: (make, {**plan, "tensor": MLP}) for way, (make, plan) in SAMPLES.ways.items()},
        points=IN_GROUPS_OF_FOUR,
        frozen=SAMPLES.frozen,
        settings=SETTINGS,
        has_groups=False,
        num_calls=150,
    ),
    "pp sp": Axis(
        mesh={"pp": 2, "sp": 2},
        ways={
            f"{way}, {schedule}": (Sequences, {**plan, "accumulate": 2, "pipeline": {"schedule": schedule}})
            for way, (_, plan) in SAMPLES.ways.items()
            for schedule in ("1f1b", "zb-h1")
        },
        points=IN_GROUPS_OF_FOUR,
        frozen=SAMPLES.frozen,
        settings={name: SETTINGS[name] for name in SETTINGS if name != "micro-batches"},
        loops=STAGES.loops,
        has_groups=False,
        num_calls=240,
    ),
    "ep tp": Axis(
        mesh={"ep": 2, "tp": 2},
        ways={way: (make, {"tensor": MLP_BEFORE_EXPERTS}) for way, (make, _) in AXES["ep"].ways.items()},
        points=IN_GROUPS_OF_FOUR,
        frozen=AXES["ep"].frozen,
        settings=SETTINGS,
        has_groups=False,
        num_calls=200,
    ),
    "pp ep": Axis(
        mesh={"pp": 2, "ep": 2},
        ways={
            schedule: (STAGES_OF_EXPERTS, {"accumulate": 2, "pipeline": {"schedule": schedule}})
            for schedule in ("1f1b", "interleaved", "zb-h1")
        },
        points=IN_GROUPS_OF_FOUR,
        frozen=("blocks.0.moe.experts.down_proj", "blocks.2.moe.router.weight"),
        settings={name: SETTINGS[name] for name in SETTINGS if name != "micro-batches"},
        loops=STAGES.loops,
        has_groups=False,
        num_calls=240,
    ),
    "ep sp": Axis(
        mesh={"ep": 2, "sp": 2},
        ways={way: (SequencesWithExperts, plan) for way, (_, plan) in SAMPLES.ways.items()},
        points=IN_GROUPS_OF_FOUR,
        frozen=("blocks.0.moe.experts.down_proj", "blocks.1.moe.router.weight"),
        settings=SETTINGS,
        has_groups=False,
        num_calls=150,
    ),
}
"""Replica groups of four whose ranks share the work along two axes, and no other group."""


def race(
    axis: str,
    preset: str,
    plant: Plant,
    folder: Path,
    *,
    way: str = "",
    mesh: Mapping[str, int] | None = None,
    loop: str = "",
    settings: Mapping[str, Any] | None = None,
    task: Task | None = None,
    **more: Any,
) -> dict[int, list[int]]:
    """`race_of` the usual task and loop of an axis, but for what is given."""
    own = AXES.get(axis) or PAIRS[axis]
    plan = {**own.plan(preset, way, mesh), **(settings or {})}
    task = task or own.ways[way or own.usual][0]()
    return race_of(task, plan, plant, folder, loop=loop or own.loops[0], **more)


def trained_alone(task: Task, model: nn.Module, *, fades: bool = False) -> tuple[list[float], nn.Module]:
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    schedule = fading(optimizer) if fades else None
    losses = []
    for step in range(NUM_STEPS):
        loss = task.loss(plain, step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        if schedule is not None:
            schedule.step()
        task.after_step(plain)
        losses.append(loss.item())
    return losses, plain


def fading(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Each step has another learning rate."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def race_while_saving(own: Axis, preset: str, dies: Callable[[int], bool], folder: Path) -> set[int]:
    """Four members train and write a checkpoint behind the last step, while those die for which `dies` is true; it is
    called once on each. The others' values, and those of the checkpoint, are the plain model's. Returns who is left."""
    images, checkpoints = folder / "images", folder / "checkpoints"
    images.mkdir()
    torch.manual_seed(3)
    task = own.ways[own.usual][0]()
    model = task.make()
    _, plain = trained_alone(task, model)
    *models, alone = (copy.deepcopy(model) for _ in range(5))
    plan, loop = own.plan(preset), own.loops[0]

    def work(world: World, member: int) -> dict[str, Any]:
        engine = sw.shard(models[member], plan, optimizer=(optimizer := adamw(models[member])), world=world)
        while engine.num_steps < NUM_STEPS:
            step = engine.num_steps
            task.take_step(loop, engine, optimizer, step, *engine.data_ranks)
            if engine.num_steps == NUM_STEPS and step < NUM_STEPS and engine.num_void == 0:
                engine.save(checkpoints, wait=False)
                inside.survival(engine).await_copies()
                if dies(member):
                    raise Killed
        engine.mean(1.0)
        engine.wait_for_save()
        state = engine.state_dict()
        engine.close()
        return state

    found = run_members(4, work, images)
    for state in found.values():
        assert_same_values(state, plain, BOUND)
    with sw.shard(alone, "ddp", optimizer=adamw(alone), world=World(0, 1, ThreadTransport(PostOffice(), 0))) as engine:
        assert engine.resume(checkpoints) is not None
        assert_same_values(engine.state_dict(), plain, BOUND)
    return set(found)


def race_of(
    task: Task,
    plan: dict[str, Any],
    plant: Plant,
    folder: Path,
    *,
    loop: str = "engine",
    num_ranks: int | None = None,
    num_newcomers: int = 0,
    shares_memory: bool = True,
    least: int = 1,
    hosts: str = "",
    most_wrong: int = 1,
    frozen: tuple[str, ...] = (),
    fades: bool = False,
    not_before: int = 0,
) -> dict[int, list[int]]:
    """Train on threads, of which some die. Returns, by member that trains at the end, the sizes of the worlds in which
    it took its steps. `num_ranks` is as many as the mesh has, unless the mesh leaves it open; `frozen` are patterns of
    names; with `fades` each step has another learning rate; newcomers are let in after `not_before` steps."""
    torch.manual_seed(3)
    plan = {**plan, "disk": str(folder / plan["disk"])} if "disk" in plan else plan
    model = task.make()
    for name, param in model.named_parameters():
        param.requires_grad_(not any(fnmatch(name, pattern) for pattern in frozen))
    losses, plain = trained_alone(task, model, fades=fades)
    num_ranks = num_ranks or math.prod(plan["mesh"].values())
    models = [copy.deepcopy(model) for _ in range(num_ranks + num_newcomers)]
    bound = LOW_PRECISION_BOUND if "precision" in plan else BOUND

    def work(world: World, member: int) -> tuple[dict[int, float], dict[int, int], dict[str, Tensor]]:
        own = models[member]
        optimizer = adamw(own)
        engine = sw.shard(own, plan, optimizer=optimizer, world=world)
        schedule = fading(optimizer) if fades else None
        plant(engine, member)
        found: dict[int, float] = {}
        sizes: dict[int, int] = {}
        here = -1, -1
        while engine.num_steps < NUM_STEPS:
            step, void, began_in = engine.num_steps, engine.num_void, engine.world.generation
            loss = task.take_step(loop, engine, optimizer, step, *engine.data_ranks)
            if schedule is not None and engine.num_steps:  # torch warns if there was no update yet
                schedule.step()
            if engine.num_steps > step and engine.num_void == void:
                before, here = here, (began_in, engine.world.generation)  # they differ where one dies in the commit
                if engine.num_steps == NUM_STEPS and here == before:
                    assert_memory_as_promised(engine)
                found[step] = engine.mean(loss.item())
                sizes[step] = engine.world.size
        state = engine.state_dict()
        engine.close()
        return found, sizes, state

    results = run_members(
        num_ranks,
        work,
        folder,
        shares_memory=shares_memory,
        num_newcomers=num_newcomers,
        least=least,
        hosts=hosts,
        not_before=not_before,
    )
    assert results
    for found, _, state in results.values():
        wrong = [step for step, loss in found.items() if loss != pytest.approx(losses[step], rel=bound)]
        assert len(wrong) <= most_wrong, "only the losses that a group took with it may be missing from a mean"
        assert_same_values(state, plain, bound)
    at_end = {hosts[member] for member in results} if hosts else {""}
    files = [path for host in at_end for path in (folder / host).rglob("*") if path.is_file()]
    left = [path for path in files if not is_lock_beside_nothing(path, plan)]
    assert not left, "images of a job that has ended"
    return {member: list(sizes.values()) for member, (_, sizes, _) in results.items()}


class DiesBefore:
    """A rank dies before an action or a collective, in the words in which `explain` prints it: before the n-th of a
    step that matches `point`, counted from 1."""

    def __init__(self, rank: int, step: int, point: str, nth: int = 1) -> None:
        self.is_dead = False
        self._left = nth
        self._fault = fail_at(rank, step, point, by=self._die)

    def _die(self) -> None:
        self._left -= 1
        if not self._left:
            self.is_dead = True
            raise Killed

    def __call__(self, engine: sw.Engine, member: int) -> None:
        membership = engine.world.membership
        assert isinstance(membership, ThreadMembership)
        membership.plant(partial(testing.plant, self._fault))
