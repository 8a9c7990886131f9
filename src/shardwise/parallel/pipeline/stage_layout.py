"""Which modules make up each stage: found in the model or listed in the plan, and checked before anything is
changed.

[Note: parameters between modules] A forward may use a parameter between its modules: the model's own, or one of a
module that has several stages, also in an `nn.ParameterList` or `nn.ParameterDict` of theirs, which is never called.
The model's own forward runs on every stage, so each has such a parameter, as it has weights that stages share; those
that use it find its gradient, and all of them add it up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError, nearest
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.program.schedule import SCHEDULES, Schedule, schedule_of, timed
from shardwise.system.name_patterns import matches_by_parts
from shardwise.system.own_hooks import is_own

AXIS = "pp"
_ROUTERS = "output_router_logits"
Span = tuple[int, int]
"""The numbers of the first and the last of some consecutive modules of the model."""
_LIBRARIES = frozenset({"torch", "transformers", "accelerate", "peft"})
"""Their hooks on modules are right in stages, or refused by name. Nothing but their modules tells whose they are."""
_LISTS = (nn.ModuleList, nn.ModuleDict)
"""Containers that are not called themselves."""
_OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
"""Containers of what a forward uses between modules."""


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class StageLayout:
    """The stages of one model over the ranks along the mesh axis `pp`. Stage s is on pipeline rank s modulo their
    number.

    `stages[s]` are the names of its modules, in the order in which the model's forward calls them.
    """

    stages: tuple[tuple[str, ...], ...]
    num_ranks: int
    schedule: Schedule
    normalizes_batches: bool = False
    """Whether a module of the model normalizes the samples of a batch by each other, in training."""

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """All modules of all stages, in the order of the forward."""
        return tuple(name for stage in self.stages for name in stage)

    @cached_property
    def guests(self) -> dict[str, str]:
        """Modules inside of a module of another stage, which a stage calls by themselves, with that module: such as the
        embedding of times in a DiT's first block, which its last layer needs too. Both stages have their parameters."""
        return {name: other for name in self.pieces for other in self.pieces if name.startswith(f"{other}.")}

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def span(self) -> Span:
        """The numbers of the first and the last module of all."""
        return 0, len(self.pieces) - 1

    def spans_of(self, stage: int) -> tuple[Span | None, Span]:
        """A stage in two: its blocks (`None` if there are none), and what comes after them, such as a norm and a head:
        at least its last module. Blocks are those with a number as their name."""
        first, last = self.span_of(stage)
        blocks = [number for number in range(first, last) if self.pieces[number].rpartition(".")[2].isdecimal()]
        return ((first, blocks[-1]), (blocks[-1] + 1, last)) if blocks else (None, (first, last))

    def span_of(self, stage: int) -> Span:
        """The numbers of the first and the last module of a stage."""
        first = sum(map(len, self.stages[:stage]))
        return first, first + len(self.stages[stage]) - 1

    def shares(self, within: Span, *, is_split: bool = False) -> list[tuple[int, Span]]:
        """What runs one after the other, with its stage, in a call of the modules `within`: those of each stage, or of
        the last one in two."""
        last = self.num_stages - 1
        shares = [(stage, self.span_of(stage)) for stage in range(self.num_stages)]
        blocks, tail = self.spans_of(last)
        if is_split and blocks is not None:
            shares[last:] = [(last, blocks), (last, tail)]
        cut = [(stage, (max(span[0], within[0]), min(span[1], within[1]))) for stage, span in shares]
        return [(stage, (first, end)) for stage, (first, end) in cut if first <= end]

    def at(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of `pp_rank`."""
        return tuple(range(pp_rank, len(self.stages), self.num_ranks))

    def params_by_stage(self, model: nn.Module) -> list[set[torch.Tensor]]:
        """The parameters of the modules of each stage, and those between modules, which each stage has."""
        modules = dict(model.named_modules(remove_duplicate=False))
        between = params_between(modules, self.pieces).values()
        return [{*between, *(param for name in names for param in modules[name].parameters())} for names in self.stages]

    def params_of(self, model: nn.Module, stage: int) -> set[torch.Tensor]:
        """Those of one stage."""
        return self.params_by_stage(model)[stage]

    def params_by_rank(
        self, model: nn.Module, by_stage: Sequence[set[torch.Tensor]] | None = None
    ) -> list[set[torch.Tensor]]:
        """The parameters of the stages of each pipeline rank; `by_stage` are those of each stage, if they are known."""
        known = self.params_by_stage(model) if by_stage is None else by_stage
        return [set().union(*(known[stage] for stage in self.at(pp_rank))) for pp_rank in range(self.num_ranks)]

    def params_at(self, model: nn.Module, pp_rank: int) -> set[torch.Tensor]:
        """Those of one pipeline rank."""
        return self.params_by_rank(model)[pp_rank]

    def pp_rank_of(self, stage: int) -> int:
        return stage % self.num_ranks

    def stage_of(self, param: str) -> int:
        """The first stage that has a module with this parameter; 0 for one that is used between modules."""
        stages = (number for number, names in enumerate(self.stages) if any(_is_inside(param, name) for name in names))
        return next(stages, 0)

    def __str__(self) -> str:
        lines = []
        for pp_rank in range(self.num_ranks):
            held = (f"stage {stage} ({_short(self.stages[stage])})" for stage in self.at(pp_rank))
            lines.append(f"{AXIS} {pp_rank}: {', '.join(held)}")
        return "\n".join(lines) + "\n"


def stage_warnings(model: nn.Module, layout: StageLayout) -> list[str]:
    """What is likely to be a mistake in stages that can be trained."""
    return list(filter(None, (_batch_norms(model, layout), _hooks_in_stages(model, layout))))


def few_micro_batches(schedule: Schedule) -> str:
    """A warning about ranks that wait because a step has fewer micro-batches than they are. "" otherwise."""
    num = schedule.num_micro_batches
    if num >= schedule.num_ranks:
        return ""
    return (
        f"A step runs {num} micro-batch{'es' * (num > 1)} for {schedule.num_ranks} pipeline ranks, which wait "
        f"{timed(schedule).bubble:.0%} of the time. Set accumulate (DeepSpeed's gradient_accumulation_steps) to "
        f"{4 * schedule.num_ranks} or so."
    )


def _batch_norms(model: nn.Module, layout: StageLayout) -> str:
    """A warning about modules that normalize the samples of micro-batches by each other. "" if there are none."""
    norms = [name for name, one in model.named_modules() if isinstance(one, _BATCH_NORMS)]
    if not norms or layout.schedule.num_micro_batches == 1:
        return ""
    return (
        f"{_short(norms)} normalize samples by each other: in engine.train_step those of one micro-batch, as in any "
        f"pipeline. Use norms within a sample (GroupNorm, LayerNorm), or call the model, whose batch is then not split."
    )


def _hooks_in_stages(model: nn.Module, layout: StageLayout) -> str:
    """A warning about forward hooks of the user's own on modules of earlier stages than the last, which computes the
    loss: each runs only on the ranks that have its module. "" if there are none."""
    modules = dict(model.named_modules(remove_duplicate=False))
    hooked = [
        [
            inner
            for name in stage
            for inner, module in modules.items()
            if (inner == name or inner.startswith(f"{name}.")) and any(map(_is_users, module._forward_hooks.values()))
        ]
        for stage in layout.stages
    ]
    if not any(hooked[:-1]):
        return ""
    return (
        f"Forward hooks on {_short(list(chain(*hooked)))} run only on the ranks that have these modules' pipeline "
        f"stages. If they collect activations for the loss, those of earlier stages are missing there: let the "
        f"blocks take and return them instead."
    )


def hooks_of_users(model: nn.Module) -> dict[int, str]:
    """Hooks of the user's own on modules inside `model`, by their ids, and the name of the module of each."""
    return {
        id(hook): name
        for name, module in model.named_modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        for hook in hooks.values()
        if name and _is_users(hook)
    }


def _is_users(hook: object) -> bool:
    return not is_own(hook) and str(getattr(hook, "__module__", "")).partition(".")[0] not in _LIBRARIES


def stage_layout(model: nn.Module, plan: Plan, mesh: Mesh) -> StageLayout:
    """The stages that `plan` requests. Raises `ConfigError` or `ModelError` if the model cannot be split that way."""
    num_ranks, asked = mesh.size(AXIS), plan.pipeline
    config = getattr(model, "config", None)
    refuse_sums_over_layers(config, "The model's config")
    schedule = schedule_of(plan, num_ranks)
    if SCHEDULES[asked.schedule].splits_backward and plan.compile is not None:
        raise ConfigError(
            f"The schedule {asked.schedule} splits the backward of linear layers, which is impossible in a compiled "
            f"unit. Leave compile out, or take schedule 1f1b."
        )
    num_stages = schedule.num_stages
    if asked.stages == "auto":
        groups = sequence_of(model)
        if len(groups) < num_stages:
            raise ConfigError(
                f"{num_stages} pipeline stages need as many modules, but {type(model).__name__} has {len(groups)} in a "
                f"row: {_short([name for group in groups for name in group])}. Use fewer stages."
            )
        costs = [_numel(nn.ModuleList(map(model.get_submodule, group))) for group in groups]
        cuts = [0, *balanced(costs, num_stages), len(groups)]
        stages = tuple(_without_inner(list(chain(*groups[start:stop]))) for start, stop in pairwise(cuts))
    else:
        stages = tuple(_listed(model, names) for names in asked.stages)
        if len(stages) != num_stages:
            raise ConfigError(
                f"pipeline.stages lists {len(stages)} stages, but {num_ranks} ranks with "
                f"{num_stages // num_ranks} each make {num_stages}. List as many."
            )
    _check_cover(model, stages)
    called = tuple(tuple(chain(*(_called(model, name) for name in stage))) for stage in stages)
    if not all(called):
        raise ConfigError("pipeline.stages lists a stage of parameters alone; give each at least one module.")
    if called != stages:
        _check_cover(model, called)
    return StageLayout(called, num_ranks, schedule, any(isinstance(one, _BATCH_NORMS) for one in model.modules()))


def sequence_of(model: nn.Module) -> list[list[str]]:
    """The modules of a model in the order of its forward, in the groups between which stages may be cut. Each begins
    with a module with parameters, followed by those that have buffers alone. Raises `ModelError` if there is none."""
    return _with_parameters(model, _found(model))


def refuse_sums_over_layers(settings: object, what: str) -> None:
    """Raise `ModelError` if a transformers model adds a loss over the routers of all layers to its own loss."""
    asked = settings.get(_ROUTERS) if isinstance(settings, dict) else getattr(settings, _ROUTERS, False)
    if asked:
        raise ModelError(
            f"{what} has {_ROUTERS}, which makes the last stage add a loss over the routers of all layers, and it has "
            f"only its own. Set it to False; for TRL's trainers, router_aux_loss_coef=0.0."
        )


def balanced(costs: Sequence[float], num_parts: int) -> list[int]:
    """Where to split `costs` into `num_parts` non-empty runs so that the most expensive run is as cheap as possible."""
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    num = len(costs)
    best = [[float("inf")] * (num + 1) for _ in range(num_parts + 1)]
    cut = [[0] * (num + 1) for _ in range(num_parts + 1)]
    best[0][0] = 0.0
    for part in range(1, num_parts + 1):
        before = best[part - 1]  # the later the last run starts, the more those before it cost, and the less itself
        for stop in range(part, num + 1):
            end = total[stop]
            starts = range(part - 1, stop)
            crossing = bisect_left(starts, True, key=lambda start: before[start] >= end - total[start]) + part - 1
            start = min(crossing, stop - 1)
            if start >= part and end - total[start - 1] <= before[start]:
                start -= 1
            if before[start] < end - total[start]:  # of equal ones the first
                start = max(part - 1, bisect_left(total, total[start]))
            best[part][stop], cut[part][stop] = max(before[start], end - total[start]), start
    cuts, stop = [], num
    for part in range(num_parts, 1, -1):
        stop = cut[part][stop]
        cuts.append(stop)
    return cuts[::-1]


# -- finding the modules of a model -----------------------------------------------------------------------


def _found(model: nn.Module) -> list[str]:
    """The modules of a model in the order of its forward, with rows of blocks taken apart.

    A row is a container of several modules: blocks of a decoder, or the down blocks of a U-Net. The largest one is
    taken apart, others (an encoder's, an image tower's) that are larger than its largest block, and lists beside them,
    which no forward calls as such. The other modules have all other parameters.
    """
    rows = {name: module for name, module in model.named_modules() if _is_row(module)}
    if not rows:
        raise ModelError(
            f"{type(model).__name__} has no sequence of blocks (an nn.ModuleList or nn.Sequential of one class), so "
            f"it cannot be split into stages automatically. List the modules of each: "
            f"pipeline: {{stages: [[...], [...]]}}. A block that it calls several times is in one of them, with all "
            f"its calls."
        )
    largest = max(rows, key=lambda name: _numel(rows[name]))
    block = max(map(_numel, rows[largest].children()))
    chosen = [largest]
    for name in rows:  # an outer one comes first
        is_apart = not any(_is_inside(name, other) or _is_inside(other, name) for other in chosen)
        if is_apart and _numel(rows[name]) > block:
            chosen.append(name)
    return _walk(model, "", chosen)


def _is_inside(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")


def _with_parameters(model: nn.Module, pieces: Sequence[str]) -> list[list[str]]:
    """See `sequence_of`."""
    modules = dict(model.named_modules(remove_duplicate=False))
    num_owners = Counter(param for name in set(pieces) for param in set(modules[name].parameters()))
    groups: list[list[str]] = []
    before: list[str] = []
    have_computed = False
    for name in pieces:
        if have_computed and isinstance(modules[name], nn.Embedding):  # a decoder's, which is called with tokens alone
            groups[-1].append(name)
        elif _numel(modules[name]) and not _is_never_called(model, name, num_owners):
            groups.append([*before, name])
            before = []
            have_computed = have_computed or not isinstance(modules[name], nn.Embedding)
        else:
            (groups[-1] if groups and not _numel(modules[name]) else before).append(name)
    if before and groups:
        groups[-1] += before
    return groups


def _is_never_called(model: nn.Module, name: str, num_owners: Mapping[nn.Parameter, int]) -> bool:
    """Whether a module only names parameters of others, like T5's `shared`: no stage can begin with it alone."""
    if any(num_owners[param] == 1 for param in model.get_submodule(name).parameters()):
        return False
    above, _, short = name.rpartition(".")
    from shardwise.parallel.pipeline.call_order import mentions  # only ranks that find stages load it

    used = set(mentions(model.get_submodule(above)))
    return bool(used) and not any(_is_inside(short, one) or _is_inside(one, short) for one in used)


def _without_inner(stage: Sequence[str]) -> tuple[str, ...]:
    """A stage without modules inside of others that it has: these are there anyway."""
    return tuple(name for name in stage if not any(name.startswith(f"{other}.") for other in stage))


def _walk(module: nn.Module, path: str, rows: Sequence[str]) -> list[str]:
    """The modules inside of the one at `path`, in order; those that contain `rows` are taken apart."""
    is_row = path in rows or isinstance(module, _LISTS)
    found: list[str] = []
    for short, child in module._modules.items():
        name = f"{path}.{short}" if path else short
        if child is None or not (_numel(child) or (is_row and _has_buffers(child))):
            continue
        if isinstance(child, _OF_PARAMETERS):
            continue
        is_above = not is_row and any(row and _is_inside(row, name) for row in rows)
        found += _walk(child, name, rows) if is_above or isinstance(child, _LISTS) else [name]
    if is_row:
        return found
    from shardwise.parallel.pipeline.call_order import in_order_of_calls  # likewise

    start = len(path) + 1 if path else 0
    ordered = in_order_of_calls(module, [name[start:] for name in found])
    return [f"{path}.{name}" if path else name for name in ordered]


def _called(model: nn.Module, name: str) -> list[str]:
    """The module itself, or if it is a list, those in it; nothing of a list of parameters."""
    module = model.get_submodule(name)
    if isinstance(module, _OF_PARAMETERS):
        return []
    return _walk(module, name, ()) if isinstance(module, _LISTS) else [name]


def _is_row(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return sum(1 for child in module.children() if _numel(child)) > 1
    return isinstance(module, nn.Sequential)


def _listed(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    modules = dict(model.named_modules(remove_duplicate=False))
    found: list[str] = []
    for pattern in patterns:
        matching = [name for name in modules if name and matches_by_parts(name, pattern)]
        named = [name for name in matching if _numel(modules[name]) or _keeps_buffers(modules, name, pattern)]
        if not named:
            raise ConfigError(
                f"pipeline.stages names {pattern!r}, but the model has no such module with parameters. "
                f"{nearest(pattern, modules)}"
            )
        found += named
    if not found:
        raise ConfigError("pipeline.stages lists a stage without modules; give each at least one.")
    return tuple(found)


def _check_cover(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    """Raise unless each parameter is in one of these modules, and each module is in one stage. What lies in a module of
    an earlier stage is called there by itself: see `guests`."""
    pieces = [name for stage in stages for name in stage]
    for name, count in Counter(pieces).items():
        if count > 1:
            raise ConfigError(f"pipeline.stages names {name!r} twice; a module is in one stage.")
    for number, stage in enumerate(stages):
        for name in stage:
            inside = [other for other in chain(*stages[: number + 1]) if other.startswith(f"{name}.")]
            if inside:
                raise ConfigError(f"pipeline.stages names {name!r} and also {inside[0]!r} inside of it; name either.")
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: dict[nn.Module, str] = {}
    for name in pieces:
        other = seen.setdefault(modules[name], name)
        if other != name:
            raise ModelError(
                f"{other} and {name} are one module, which a pipeline cannot have in two places. Keep such a model on "
                f"one stage: leave the axis {AXIS!r} out of the mesh."
            )
    covered = {*params_between(modules, pieces), *pieces}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if covered.isdisjoint(_upwards(name)):
            owner = name.rpartition(".")[0]
            raise ConfigError(f"The pipeline's stages miss {owner}, which has the parameter {name}. Add it to one.")


def params_between(modules: Mapping[str, nn.Module], pieces: Collection[str]) -> dict[str, nn.Parameter]:
    """Parameters, by name, of modules that have some of the `pieces`, but of none of these: what a forward uses between
    them, such as the embedding of masked frames in models of speech. See [Note: parameters between modules]."""
    parts = [piece.split(".") for piece in pieces]
    owners = dict.fromkeys(".".join(names[:depth]) for names in parts for depth in range(len(names)))
    found: dict[str, nn.Parameter] = {}
    for owner in owners:
        if not any(f"{owner}.".startswith(f"{piece}.") for piece in pieces):  # otherwise it has guests
            above = f"{owner}." if owner else ""
            holders = [("", modules[owner]), *_of_parameters(modules[owner])]
            for place, holder in holders:
                found |= {above + place + key: param for key, param in holder.named_parameters(recurse=False)}
    return found


def _of_parameters(owner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The lists and dicts of parameters of `owner`, with their names and a dot."""
    for name, child in owner.named_children():
        if isinstance(child, _OF_PARAMETERS):
            yield f"{name}.", child


def _upwards(name: str) -> Iterator[str]:
    """`h.0.weight`, `h.0` and `h`."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _has_buffers(module: nn.Module) -> bool:
    return any(True for _ in module.buffers())


def _keeps_buffers(modules: dict[str, nn.Module], name: str, pattern: str) -> bool:
    """Whether a module without parameters is listed: by its own name, or as one of a row. Others, such as tables of
    positions, may be needed on every stage."""
    is_in_row = isinstance(modules[name.rpartition(".")[0]], nn.ModuleList | nn.Sequential)
    return _has_buffers(modules[name]) and (pattern == name or is_in_row)


def _short(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ..., {names[-1]}"
