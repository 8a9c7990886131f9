"""Operations of plain PyTorch loops, each written once for a model, an optimizer and a batch, and compared.

The same code runs on a plain twin, which processes the two half batches in turn, and on two ranks that each have one
half. The values that an action returns and the final parameters must be equal, or the action must be refused with a
clear error and have changed nothing. The twin skips refused actions.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.errors import FaultError, ShardwiseError
from shardwise.testing import run_ranks
from tests import inside

Tensor = torch.Tensor
Half = tuple[Tensor, Tensor]
VOCAB, WIDTH = 13, 8
NUM_RANKS = 2
PRESETS = ("zero3", "zero2", "zero1", "ddp")
PLACES = [(preset, shares) for preset in PRESETS for shares in (True, False)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A small model with what real models have: a scalar parameter, an unused one, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.logit_scale = nn.Parameter(torch.tensor(0.1))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.offset = nn.Parameter(torch.randn(WIDTH) * 0.1, requires_grad=False)
        self.register_buffer("temperature", torch.tensor(1.0))

    def features(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.offset
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)) * self.logit_scale.exp() / self.temperature


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose update depends on the size of a gradient; Adam's would hide it."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def cross_entropy(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


@dataclass(frozen=True)
class Local:
    """A value of each rank's own half, such as a loss. The mean over ranks must equal the twin's value."""

    value: Any


@dataclass
class Loop:
    """What a plain loop has. `mine` are the halves of a batch that it processes: both in the twin, one on a rank."""

    model: Any
    mine: tuple[int, ...]
    rank: int = 0
    optimizer: Any = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    engine: sw.Engine | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    _numbers: torch.Generator = field(default_factory=torch.Generator)

    def begin(self, index: int) -> None:
        """The batches of an action depend only on its position in the script, not on the batches that others used."""
        self._numbers.manual_seed(1000 + index)

    def batch(self) -> list[Half]:
        """The halves of the next batch that this loop processes."""
        tokens = torch.randint(0, VOCAB, (4, 4), generator=self._numbers)
        halves = [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(NUM_RANKS)]
        return [halves[index] for index in self.mine]

    def mean(self, of: Callable[[Tensor, Tensor], Tensor], batch: list[Half] | None = None) -> Tensor:
        """The mean of `of(x, y)` over this loop's halves of a batch."""
        total: Any = 0
        for x, y in batch or self.batch():
            total = total + of(x, y) / len(self.mine)
        return total

    def loss(self, model: Any = None, batch: list[Half] | None = None) -> Tensor:
        return self.mean(lambda x, y: cross_entropy(model or self.model, x, y), batch)

    def backward(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()

    def with_grad(self) -> list[nn.Parameter]:
        return [param for param in self.model.parameters() if param.grad is not None]

    def clip(self, max_norm: float) -> float:
        """Clip with the engine if there is one, else with torch."""
        if self.engine is not None:
            return self.engine.clip_grad_norm_(max_norm)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item()

    def whole_grad(self, name: str) -> Tensor | None:
        if self.engine is not None:
            return self.engine.get(name, "grad")
        grad = self.model.get_parameter(name).grad
        return None if grad is None else grad.clone()


Act = Callable[[Loop], Any]


@dataclass(frozen=True)
class Action:
    """One operation of a plain loop. `before` runs before the optimizer is made and the model is sharded."""

    name: str
    about: str
    group: str
    act: Act
    before: Act | None = None
    make_optimizers: Callable[[nn.Module], Any] = sgd
    plan: Mapping[str, Any] = field(default_factory=dict)
    composes: bool = True
    """Whether it can be combined with others: it leaves the loop in the state that they expect."""


ACTIONS: dict[str, Action] = {}


def action(group: str, about: str, **more: Any) -> Callable[[Act], Act]:
    """Add a function to the matrix under its own name. `about` describes it in the docs."""

    def add(act: Act) -> Act:
        name = act.__name__
        assert name not in ACTIONS, name
        ACTIONS[name] = Action(name, about, group, act, **more)
        return act

    return add


@dataclass(frozen=True)
class Refusal:
    """An exception that an action raised."""

    kind: str
    text: str
    is_letter: bool
    is_fatal: bool


@dataclass
class Course:
    """Results of a loop: what each action returned, and the final parameters."""

    outcomes: list[Any] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


def follow(loop: Loop, script: Sequence[str], left_out: frozenset[int] = frozenset()) -> list[Any]:
    """Run the actions of a script in order. After an action that raises, the gradients are dropped."""
    outcomes: list[Any] = []
    for index, name in enumerate(script):
        try:
            loop.begin(index)
            outcomes.append(None if index in left_out else _kept(ACTIONS[name].act(loop)))
        except Exception as error:  # the comparison decides whether it is right
            outcomes.append(_refusal(error))
            for optimizer in loop.optimizers:
                optimizer.zero_grad()
        else:
            if index in left_out:
                for optimizer in loop.optimizers:
                    optimizer.zero_grad()
    return outcomes


def _refusal(error: Exception) -> Refusal:
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 8:
        chain.append(cause)
    text = " / ".join([str(error), *(str(one) for one in chain[1:] if isinstance(one, ShardwiseError))])
    is_letter = any(isinstance(one, ShardwiseError) for one in chain)
    return Refusal(type(error).__name__, text, is_letter, any(isinstance(one, FaultError) for one in chain))


def _kept(value: Any) -> Any:
    """A copy that later operations cannot change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Local):
        return Local(_kept(value.value))
    if isinstance(value, Mapping):
        return {key: _kept(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_kept(item) for item in value]
    return value


def _made(script: Sequence[str], loop: Loop) -> None:
    """Do what comes before sharding, and make the optimizers."""
    actions = [ACTIONS[name] for name in dict.fromkeys(script)]
    for one in actions:
        if one.before is not None:
            one.before(loop)
    makers = {one.make_optimizers for one in actions if one.make_optimizers is not sgd} or {sgd}
    (make,) = makers
    made = make(loop.model)
    loop.optimizers = list(made) if isinstance(made, list) else [made]
    loop.optimizer = loop.optimizers[0]


def start() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def plain(script: Sequence[str], left_out: frozenset[int], mine: tuple[int, ...] = (0, 1)) -> Course:
    """Run the script in the twin, with the halves in the order of `mine`."""
    loop = Loop(start(), mine)
    _made(script, loop)
    limit = _plan(script).get("clip_grad_norm")
    params = dict(loop.model.named_parameters())
    if limit is not None:
        loop.optimizer.register_step_pre_hook(_clips(list(params.values()), limit))
    outcomes = follow(loop, script, left_out)
    return Course(outcomes, {name: param.detach().double().clone() for name, param in params.items()})


def _clips(params: list[nn.Parameter], limit: float) -> Callable[..., None]:
    """Clip in the twin as `clip_grad_norm` in a plan does."""

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(params, limit)

    return clip


def _plan(script: Sequence[str]) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for name in script:
        plan.update(ACTIONS[name].plan)
    return plan


def sharded(script: Sequence[str], preset: str, shares_memory: bool) -> list[Course]:
    """Run the script on two ranks."""
    replicas = [start() for _ in range(NUM_RANKS)]

    def rank(world: sw.World) -> Course:
        loop = Loop(replicas[world.rank], (world.rank,), world.rank)
        _made(script, loop)
        optimizer: Any = loop.optimizers if len(loop.optimizers) > 1 else loop.optimizer
        engine = sw.shard(loop.model, {"preset": preset, **_plan(script)}, optimizer=optimizer, world=world)
        loop.engine = engine
        shapes = {name: param.shape for name, param in loop.model.named_parameters()}
        course = Course(follow(loop, script))
        if not any(isinstance(outcome, Refusal) and outcome.is_fatal for outcome in course.outcomes):
            course.params = _whole(engine, shapes)
        engine.close()
        return course

    return run_ranks(NUM_RANKS, rank, shares_memory=shares_memory, patience_seconds=0.5)


def _whole(engine: sw.Engine, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Every parameter that was sharded, from all ranks' pieces, under its original name."""
    pieces = []
    for flat in inside.flats(engine):
        kept, span = (flat.param, flat.param_span) if flat.master is None else (flat.master, flat.optim_span)
        for slot in flat.slots:
            mine = slot.span.overlap(span)
            values = kept[mine.start - span.start : mine.stop - span.start].detach().double().clone()
            pieces.append((slot.name, mine.within(slot.span).start, values))
    told = io.BytesIO()
    torch.save(pieces, told)
    whole = {name: torch.full(shape, float("nan"), dtype=torch.float64).flatten() for name, shape in shapes.items()}
    for message in engine.world.exchange(told.getvalue()):
        for name, start, values in torch.load(io.BytesIO(message), weights_only=True):
            whole[name][start : start + values.numel()] = values
    return {name: values.view(shapes[name]) for name, values in whole.items()}


@dataclass(frozen=True)
class Verdict:
    """`equal`, `refused` (with the error message), or a failure: `raw`, `different`, `crash`, `hang`."""

    kind: str
    said: str = ""
    """The error message of a refusal, or what is wrong."""
    is_fatal: bool = False
    """Whether the ranks could not continue."""
    refused: tuple[tuple[str, str], ...] = ()
    """The actions of the script that were refused, with their error messages."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.said}" if self.said else self.kind


EQUAL = Verdict("equal")


def race(script: Sequence[str], preset: str, shares_memory: bool) -> Verdict:
    """Whether a script has the same results on two ranks as in the plain loop; if not, the first reason."""
    try:
        courses = sharded(script, preset, shares_memory)
    except Exception as error:  # from shard itself, or from the comparison: the caller has to see which
        refusal = _refusal(error)
        return Verdict("refused" if refusal.is_letter else "raw", f"{refusal.kind}: {refusal.text}", is_fatal=True)
    fault = _fault(script, courses)
    if fault is not None:
        return fault
    raised = {index: one for index, one in enumerate(courses[0].outcomes) if isinstance(one, Refusal)}
    whole = plain(script, frozenset())
    refused = frozenset(index for index, one in raised.items() if not _raises_alike(one, whole.outcomes[index]))
    twin, mirror = plain(script, refused) if refused else whole, plain(script, refused, (1, 0))
    said: list[tuple[str, str]] = []
    for index, name in enumerate(script):
        verdict = _outcome(
            name,
            [course.outcomes[index] for course in courses],
            whole.outcomes[index] if index in refused else twin.outcomes[index],
            mirror.outcomes[index],
        )
        if verdict.kind == "refused":
            said.append((name, verdict.said))
        if verdict.kind not in ("equal", "refused") or verdict.is_fatal:
            return replace(verdict, refused=tuple(said))
    wrong = _different_params(courses, twin, mirror)
    if wrong:
        return Verdict("different", wrong)
    return Verdict("refused", said[0][1], refused=tuple(said)) if said else EQUAL


def _fault(script: Sequence[str], courses: list[Course]) -> Verdict | None:
    """The verdict if ranks did different things. Each of them raises, though one may do so some actions later."""
    at = [
        next((i for i, one in enumerate(course.outcomes) if isinstance(one, Refusal) and one.is_fatal), len(script))
        for course in courses
    ]
    if max(at) == len(script):
        return None
    first = courses[at.index(min(at))].outcomes[min(at)]
    said = f"{first.kind}: {first.text}"
    return Verdict("refused", said, is_fatal=True, refused=((script[min(at)], said),))


def _outcome(name: str, ours: list[Any], theirs: Any, mirrored: Any) -> Verdict:
    refusals = [outcome for outcome in ours if isinstance(outcome, Refusal)]
    if not refusals:
        if isinstance(theirs, Refusal):
            return Verdict(
                "different", f"{name}: the plain loop raises {theirs.kind} ({theirs.text}), the ranks do not"
            )
        wrong = _different(f"{name} returned", ours, theirs, mirrored)
        return Verdict("different", wrong) if wrong else EQUAL
    first = refusals[0]
    said = f"{first.kind}: {first.text}"
    if len(refusals) < len(ours):
        return Verdict("different", f"{name}: only some ranks raised {said}")
    if _raises_alike(first, theirs):
        return EQUAL
    return Verdict("refused" if all(one.is_letter for one in refusals) else "raw", said, first.is_fatal)


def _raises_alike(ours: Refusal, theirs: Any) -> bool:
    """Whether the plain loop raises the same error, so that both did the same until then."""
    return isinstance(theirs, Refusal) and theirs.kind == ours.kind


def _different(path: str, ours: Sequence[Any], theirs: Any, mirrored: Any) -> str:
    """How the ranks' values differ from the plain loop's value; empty if they do not."""
    if isinstance(theirs, Local):
        if not all(isinstance(one, Local) for one in ours):
            return f"{path} {ours}, the plain loop {theirs}"
        return _different(path, [_averaged([one.value for one in ours])], theirs.value, mirrored.value)
    if isinstance(theirs, dict):
        if not all(isinstance(one, dict) and one.keys() == theirs.keys() for one in ours):
            return f"{path} other keys than the plain loop's {list(theirs)}: {[list(one) for one in ours]}"
        parts = [_different(f"{path}[{key}]", [one[key] for one in ours], theirs[key], mirrored[key]) for key in theirs]
        return next(filter(None, parts), "")
    if isinstance(theirs, list):
        if not all(isinstance(one, list) and len(one) == len(theirs) for one in ours):
            return f"{path} {ours}, the plain loop {theirs}"
        parts = [
            _different(f"{path}[{index}]", [one[index] for one in ours], theirs[index], mirrored[index])
            for index in range(len(theirs))
        ]
        return next(filter(None, parts), "")
    if isinstance(theirs, Tensor | float):
        return next(filter(None, (_far(path, one, theirs, mirrored) for one in ours)), "")
    return "" if all(one == theirs for one in ours) else f"{path} {ours}, the plain loop {theirs!r}"


def _averaged(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _averaged([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [_averaged(list(items)) for items in zip(*values, strict=True)]
    return sum(values) / len(values) if isinstance(first, Tensor | float) else first


def _far(path: str, ours: Any, theirs: Any, mirrored: Any) -> str:
    """How a value differs by more than rounding: the plain loop's own difference when its halves are swapped."""
    if not isinstance(ours, Tensor | float):
        return f"{path} {ours}, the plain loop {theirs}"
    left, right, other = (torch.as_tensor(value).double() for value in (ours, theirs, mirrored))
    if left.shape != right.shape:
        return f"{path} a tensor of shape {list(left.shape)}, the plain loop one of {list(right.shape)}"
    if torch.equal(left.isnan(), right.isnan()) and torch.equal(left.isinf(), right.isinf()):
        left, right, other = (torch.nan_to_num(value, 0.0, 0.0, 0.0) for value in (left, right, other))
    rounding = 8 * (right - other).abs().max().item() if right.numel() else 0.0
    allowed = rounding + 2e-6 * (1 + right.abs().max().item() if right.numel() else 1)
    distance = (left - right).abs().max().item() if right.numel() else 0.0
    if distance <= allowed:
        return ""
    shown = (
        f"{ours:.7g} instead of {theirs:.7g}"
        if isinstance(theirs, float)
        else f"a tensor that is off by {distance:.3g}"
    )
    return f"{path} {shown}"


def _different_params(courses: list[Course], twin: Course, mirror: Course) -> str:
    for course in courses:
        for name in course.params.keys() & twin.params.keys():
            ours = course.params[name]
            if wrong := _far(f"at the end {name} is", ours, twin.params[name], mirror.params[name]):
                return wrong
        missing = twin.params.keys() - course.params.keys()
        if missing:
            return f"at the end {sorted(missing)[0]} is missing"
    return ""
