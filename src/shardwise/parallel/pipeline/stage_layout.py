"""Which modules make up each stage: found in the model or listed in the plan, and checked before anything is
changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError, nearest
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.program.schedule import Schedule, schedule_of, timed
from shardwise.system.name_patterns import matches_by_parts

AXIS = "pp"
_ROUTERS = "output_router_logits"
_LIBRARIES = frozenset({"shardwise", "torch", "transformers", "accelerate", "peft"})
"""Their hooks on modules are right in stages, or refused by name."""


@dataclass(frozen=True)
class StageLayout:
    """The stages of one model over the ranks along the mesh axis `pp`. Stage s is on pipeline rank s modulo their
    number.

    `stages[s]` are the names of its modules, in the order in which the model's forward calls them.
    """

    stages: tuple[tuple[str, ...], ...]
    num_ranks: int
    schedule: Schedule

    @property
    def pieces(self) -> tuple[str, ...]:
        """All modules of all stages, in the order of the forward."""
        return tuple(name for stage in self.stages for name in stage)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def at(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of `pp_rank`."""
        return tuple(range(pp_rank, len(self.stages), self.num_ranks))

    def params_of(self, model: nn.Module, stage: int) -> set[torch.Tensor]:
        """The parameters of the modules of that stage."""
        modules = dict(model.named_modules(remove_duplicate=False))
        return {param for name in self.stages[stage] for param in modules[name].parameters()}

    def params_at(self, model: nn.Module, pp_rank: int) -> set[torch.Tensor]:
        """The parameters of the stages of `pp_rank`."""
        return set().union(*(self.params_of(model, stage) for stage in self.at(pp_rank)))

    def pp_rank_of(self, stage: int) -> int:
        return stage % self.num_ranks

    def __str__(self) -> str:
        lines = []
        for pp_rank in range(self.num_ranks):
            held = (f"stage {stage} ({_short(self.stages[stage])})" for stage in self.at(pp_rank))
            lines.append(f"{AXIS} {pp_rank}: {', '.join(held)}")
        return "\n".join(lines) + "\n"


def stage_warnings(model: nn.Module, layout: StageLayout) -> list[str]:
    """What is likely to be a mistake in stages that can be trained."""
    return list(filter(None, (_few_micro_batches(layout.schedule), _hooks_in_stages(model, layout))))


def _few_micro_batches(schedule: Schedule) -> str:
    """A warning about ranks that wait because a step has fewer micro-batches than they are. "" otherwise."""
    if schedule.num_micro_batches >= schedule.num_ranks:
        return ""
    return (
        f"engine.train_step runs {schedule.num_micro_batches} micro-batches for {schedule.num_ranks} pipeline ranks, "
        f"which wait {timed(schedule).bubble:.0%} of the time. Set accumulate (DeepSpeed's "
        f"gradient_accumulation_steps) to {4 * schedule.num_ranks} or so. Calls of the model split their batch."
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


def _is_users(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] not in _LIBRARIES


def has_pipeline(mesh: Mesh) -> bool:
    """Whether this mesh splits models into stages."""
    return AXIS in mesh.axes and mesh.size(AXIS) > 1


def stage_layout(model: nn.Module, plan: Plan, mesh: Mesh) -> StageLayout:
    """The stages that `plan` requests. Raises `ConfigError` or `ModelError` if the model cannot be split that way."""
    num_ranks, asked = mesh.size(AXIS), plan.pipeline
    config = getattr(model, "config", None)
    refuse_sums_over_layers(config, "The model's config")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder model, whose decoder blocks all need the encoder's output, "
            f"but a pipeline passes the output of a block to the next one only. Leave {AXIS} out of the mesh."
        )
    schedule = schedule_of(plan, num_ranks)
    if asked.schedule == "zb-h1" and plan.compile is not None:
        raise ConfigError(
            "The schedule zb-h1 splits the backward of linear layers, which is impossible in a compiled unit. Leave "
            "compile out, or take schedule 1f1b."
        )
    num_stages = schedule.num_stages
    if asked.stages == "auto":
        groups = _with_parameters(model, _found(model))
        if len(groups) < num_stages:
            raise ConfigError(
                f"{num_stages} pipeline stages need as many modules, but {type(model).__name__} has {len(groups)} in a "
                f"row: {_short([name for group in groups for name in group])}. Use fewer stages."
            )
        modules = dict(model.named_modules(remove_duplicate=False))
        costs = [sum(_numel(modules[name]) for name in group) for group in groups]
        cuts = [0, *balanced(costs, num_stages), len(groups)]
        stages = tuple(tuple(chain(*groups[start:stop])) for start, stop in pairwise(cuts))
    else:
        stages = tuple(_listed(model, names) for names in asked.stages)
        if len(stages) != num_stages:
            raise ConfigError(
                f"pipeline.stages lists {len(stages)} stages, but {num_ranks} ranks with "
                f"{num_stages // num_ranks} each make {num_stages}. List as many."
            )
    _check_cover(model, [name for stage in stages for name in stage])
    return StageLayout(stages, num_ranks, schedule)


def refuse_sums_over_layers(settings: object, what: str) -> None:
    """Raise `ModelError` if a transformers model adds a loss over the routers of all layers to its own loss."""
    asked = settings.get(_ROUTERS) if isinstance(settings, dict) else getattr(settings, _ROUTERS, False)
    if asked:
        raise ModelError(
            f"{what} has {_ROUTERS}, which makes the last stage add a loss over the routers of all layers, and it has "
            f"only its own. Set it to False."
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
        for stop in range(part, num + 1):
            for start in range(part - 1, stop):
                worst = max(best[part - 1][start], total[stop] - total[start])
                if worst < best[part][stop]:
                    best[part][stop], cut[part][stop] = worst, start
    cuts, stop = [], num
    for part in range(num_parts, 1, -1):
        stop = cut[part][stop]
        cuts.append(stop)
    return cuts[::-1]


# -- finding the modules of a model -----------------------------------------------------------------------


def _found(model: nn.Module) -> list[str]:
    """The modules of a sequential model in order: those before its blocks, the blocks, those after.

    The blocks are the largest container with several modules of one class; the other modules own all other parameters.
    """
    rows = [(name, module) for name, module in model.named_modules() if _is_row(module)]
    if not rows:
        raise ModelError(
            f"{type(model).__name__} has no sequence of blocks (an nn.ModuleList or nn.Sequential of one class), so "
            f"it cannot be split into stages automatically. List the modules of each: "
            f"pipeline: {{stages: [[...], [...]]}}."
        )
    row, _ = max(rows, key=lambda row: _numel(row[1]))
    registered = list(_walk(model, "", row))
    blocks = [name for name in registered if name.startswith(f"{row}.") or not row]
    late = [name for name in registered if "final" in name.rpartition(".")[2] and name not in blocks]
    first = registered.index(blocks[0])
    before = [name for name in registered[:first] if name not in late]
    after = [name for name in registered[first + len(blocks) :] if name not in late]
    return [*before, *blocks, *late, *after]  # a `final_layer_norm` runs last wherever it is registered (as in OPT)


def _with_parameters(model: nn.Module, pieces: Sequence[str]) -> list[list[str]]:
    """Groups that begin with a module with parameters, each with the modules after it that have buffers alone."""
    modules = dict(model.named_modules(remove_duplicate=False))
    groups: list[list[str]] = []
    before: list[str] = []
    for name in pieces:
        if _numel(modules[name]):
            groups.append([*before, name])
            before = []
        else:
            (groups[-1] if groups else before).append(name)
    return groups


def _walk(module: nn.Module, path: str, row: str) -> Iterator[str]:
    for short, child in module._modules.items():
        name = f"{path}.{short}" if path else short
        if child is None or not (_numel(child) or (path == row and _has_buffers(child))):
            continue
        if path != row and (name == row or row.startswith(f"{name}.")):
            yield from _walk(child, name, row)
        else:
            yield name


def _is_row(module: nn.Module) -> bool:
    classes = [type(child) for child in module.children() if _numel(child)]
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    return is_container and (len(set(classes)) < len(classes) or isinstance(module, nn.Sequential))


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


def _check_cover(model: nn.Module, pieces: Sequence[str]) -> None:
    """Raise unless each parameter is in one of these modules, and each module is in one stage."""
    for name in pieces:
        if pieces.count(name) > 1:
            raise ConfigError(f"pipeline.stages names {name!r} twice; a module is in one stage.")
        inside = [other for other in pieces if other.startswith(f"{name}.")]
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
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not any(name.startswith(f"{piece}.") for piece in pieces):
            owner = name.rpartition(".")[0]
            if owner:
                raise ConfigError(f"The pipeline's stages miss {owner}, which has the parameter {name}. Add it to one.")
            raise ModelError(
                f"{name} is a parameter of {type(model).__name__} itself, which runs on every stage. Put it into a "
                f"module of its own, which can be in one."
            )


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
