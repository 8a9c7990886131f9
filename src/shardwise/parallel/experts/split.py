"""Which experts of a model each rank along `ep` has: found and checked before anything is changed."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.comm import Line
from shardwise.errors import ConfigError, ModelError, some
from shardwise.parallel.experts.dispatch import DispatchedExperts
from shardwise.parallel.experts.layer import Experts
from shardwise.parallel.library_model import library_models
from shardwise.plan import Plan
from shardwise.plan.mesh import EXPERT_AXIS, Mesh
from shardwise.plan.placement import Box, Span
from shardwise.system.even_parts import even_bounds
from shardwise.system.name_patterns import matches_end

AXIS = EXPERT_AXIS
_ARGUMENTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
_STACKED = "grouped_gemm"
"""The value in an `ep_plan` of transformers for a parameter whose first dimension is the expert."""

_ADAPTED = "base_layer"
"""The attribute under which the peft library keeps a module that it wraps."""


@dataclass(frozen=True)
class ExpertModule:
    """A module with several experts, and its parameters whose first dimension is the expert."""

    path: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]
    num_experts: int
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the parameters with all experts."""

    @classmethod
    def of(cls, path: str, module: nn.Module, params: Iterable[nn.Parameter], num_experts: int) -> ExpertModule:
        """For a model whose parameters are whole."""
        every = tuple(params)
        return cls(path, module, every, num_experts, tuple(tuple(param.shape) for param in every))

    @property
    def hidden_size(self) -> int:
        """Elements per row that is sent."""
        width = getattr(self.module, "hidden_dim", None)
        return width if isinstance(width, int) else self.shapes[-1][1]

    def boxes(self, own: Span, copies: int, number: int) -> dict[nn.Parameter, Box]:
        """The boxes of a rank that has the experts `own`; see `ExpertSplit.boxes`."""
        pairs = zip(self.params, self.shapes, strict=True)
        return {param: Box.split(shape, 0, [own], copies, number) for param, shape in pairs}

    def carry_out(self, line: Line, deals: Sequence[Span]) -> None:
        """Change the module in place. Its parameters are already parts."""
        self.module.num_experts = deals[line.index].numel  # type: ignore[assignment]  # a module's own attribute
        self.module.__dict__["forward"] = DispatchedExperts(self.module, line, deals)

    def undo(self) -> None:
        """Restore the module. The caller restores its parameters, or cuts them anew."""
        self.module.num_experts = self.num_experts  # type: ignore[assignment]  # likewise
        self.module.__dict__.pop("forward", None)


@dataclass(frozen=True)
class ExpertSplit:
    """The experts of the rank at `index` of the axis. Constructing it changes nothing in the model.

    `deals[path][i]` are the numbers of the experts of rank i along it; modules with equally many experts are split
    alike.
    """

    index: int
    modules: tuple[ExpertModule, ...]
    deals: Mapping[str, tuple[Span, ...]]

    @property
    def params(self) -> frozenset[nn.Parameter]:
        return frozenset(param for found in self.modules for param in found.params)

    def boxes(self, copies: int, number: int) -> dict[nn.Parameter, Box]:
        """This rank's boxes of expert parameters, of which `copies` ranks have the same; this rank is the
        `number`-th."""
        found: dict[nn.Parameter, Box] = {}
        for one in self.modules:
            found |= one.boxes(self.deals[one.path][self.index], copies, number)
        return found

    @property
    def whole_shapes(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """The shapes of the parameters with all experts."""
        return {param: shape for found in self.modules for param, shape in zip(found.params, found.shapes, strict=True)}

    @property
    def line(self) -> Line | None:
        """Along which tokens are sent, once it is carried out."""
        forward = self.modules[0].module.__dict__.get("forward")
        return forward.line if isinstance(forward, DispatchedExperts) else None

    def carry_out(self, line: Line) -> None:
        """Change the modules in place. Their parameters are already parts."""
        for found in self.modules:
            found.carry_out(line, self.deals[found.path])

    def undo(self) -> None:
        """Restore the modules; the caller restores their parameters."""
        for found in self.modules:
            found.undo()

    def __str__(self) -> str:
        """Such as `ep 0: experts 0-3 of 8 in blocks.*.experts (2 modules)`, one line per rank and number of
        experts."""
        lines = []
        for (num_experts, paths), _ in itertools.groupby(_alike(self.modules)):
            deals = self.deals[paths[0]]
            shown = some(paths, 1)
            lines += [
                f"{AXIS} {index}: experts {_range(own)} of {num_experts} in {shown}" for index, own in enumerate(deals)
            ]
        return "\n".join(lines) + "\n"


def expert_split(
    model: nn.Module, plan: Plan, mesh: Mesh, rank: int, known: ExpertSplit | None = None
) -> ExpertSplit | None:
    """How `mesh` splits the experts of `model`, for `rank`; `None` if it does not. `known` is their current split, if
    any.

    Raises `ConfigError` or `ModelError` for a model or plan that does not support it.
    """
    if not mesh.has_experts:
        return None
    num_ranks = mesh.size(AXIS)
    if plan.compile is not None:
        raise ConfigError(f"compile needs units whose modules do not communicate. Leave it out of a plan with {AXIS}.")
    if plan.tensor.sequence and "tp" in mesh.model_axes:
        raise ConfigError(
            f"With tensor.sequence the ranks along tp have different tokens, but with {AXIS} they must send the same "
            f"ones to experts. Leave out either."
        )
    modules = tuple(expert_modules(model)) if known is None else known.modules
    if not modules:
        raise _nothing_known(model, mesh)
    deals = {found.path: _dealt(found, num_ranks) for found in modules}
    return ExpertSplit(mesh.coordinate(rank)[AXIS], modules, deals)


def _nothing_known(model: nn.Module, mesh: Mesh) -> ModelError:
    """The error for a model without known experts: its experts are a list of modules, or a class without an
    `ep_plan`."""
    for path, module in model.named_modules():
        classes = {type(child) for child in module.children()}
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) > 1 and len(classes) == 1
        last = path.rpartition(".")[2]
        if is_list and "expert" in f"{last} {next(iter(classes)).__name__}".lower():
            owner = path.rpartition(".")[0] or type(model).__name__
            return ModelError(
                f"{path} has {len(module)} experts as modules of their own, which {owner} calls one by one, so that no "
                f"tokens can be sent to those of other ranks along {AXIS}. Make them one module with "
                f"shardwise.experts.Experts.stacked(experts, gate=..., up=..., down=...) and call it with what the "
                f"router gives, (tokens, indices, weights), or build {owner} with shardwise.experts.MoE(..., "
                f"num_experts={len(module)}), or leave {AXIS} out of the mesh."
            )
    strange = next((path for path, one in model.named_modules() if type(one).__name__.endswith("Experts")), None)
    if strange is not None:
        return ModelError(
            f"{strange} ({type(model.get_submodule(strange)).__name__}) has no ep_plan that says which of its "
            f"parameters are stacked experts, so they cannot be dealt out along {AXIS}. Build it with "
            f"shardwise.experts.MoE, or leave {AXIS} out of the mesh."
        )
    return ModelError(
        f"The mesh {mesh} deals out experts along {AXIS}, but {type(model).__name__} has none that are known: "
        f"neither shardwise.experts.MoE nor an ep_plan, as models of transformers have. Leave {AXIS} out of the mesh."
    )


def expert_modules(model: nn.Module) -> Iterator[ExpertModule]:
    """The modules of `shardwise.experts`, and those that the `ep_plan` of a transformers model names."""
    brought: dict[str, list[str]] = {}
    for part in library_models(model):
        plan = getattr(part.module, "_ep_plan", None) or {}
        stacked_here = [pattern for pattern, style in plan.items() if style == _STACKED]
        brought |= dict.fromkeys(part.paths.values(), stacked_here)
    for path, module in model.named_modules():
        patterns = brought.get(path, [])
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, Experts):
            yield ExpertModule.of(path, module, own.values(), module.num_experts)
            continue
        bare = path.replace(f".{_ADAPTED}", "")
        if bare != path and any(matches_end(f"{bare}.{name}", one) for name in own for one in patterns):
            raise ModelError(
                f"{bare} has adapters on the parameters of its experts (target_parameters of peft), which need "
                f"all experts at once, but along {AXIS} a rank has some of them. Adapt other modules (target_modules), "
                f"or leave {AXIS} out of the mesh."
            )
        stacked = [param for name, param in own.items() if any(matches_end(f"{path}.{name}", one) for one in patterns)]
        if stacked:
            yield _of_transformers(path, module, stacked)


def _of_transformers(path: str, module: nn.Module, stacked: Sequence[nn.Parameter]) -> ExpertModule:
    num_experts = getattr(module, "num_experts", None)
    takes = tuple(inspect.signature(type(module).forward).parameters)[1:4]
    own = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    if takes not in _ARGUMENTS and tuple(own)[1:4] not in _ARGUMENTS:
        raise ModelError(
            f"The experts of {path} ({type(module).__name__}) take {', '.join(takes) or 'nothing'}, where those that "
            f"can be dealt out along {AXIS} take {', '.join(_ARGUMENTS[0])}. Leave {AXIS} out of the mesh."
        )
    if any(param.shape[0] != num_experts for param in stacked):
        raise ModelError(
            f"{path} has num_experts {num_experts}, and parameters for {_counts(stacked)}, which have to be as many. "
            f"Leave {AXIS} out of the mesh."
        )
    return ExpertModule.of(path, module, stacked, int(num_experts or 0))


def _dealt(found: ExpertModule, num_ranks: int) -> tuple[Span, ...]:
    """Contiguous experts go to one rank; if they do not divide evenly, the first ranks get one more."""
    if found.num_experts < num_ranks:
        raise ModelError(
            f"{found.path} has {found.num_experts} experts for {num_ranks} ranks along {AXIS}. Choose a size of {AXIS} "
            f"of at most {found.num_experts}."
        )
    return tuple(Span(start, stop) for start, stop in itertools.pairwise(even_bounds(found.num_experts, num_ranks)))


def _alike(modules: Sequence[ExpertModule]) -> list[tuple[int, tuple[str, ...]]]:
    """Paths of modules grouped by their number of experts."""
    by_number: dict[int, list[str]] = {}
    for found in modules:
        by_number.setdefault(found.num_experts, []).append(found.path)
    return [(number, tuple(paths)) for number, paths in by_number.items()]


def _range(own: Span) -> str:
    return f"{own.start}" if own.numel == 1 else f"{own.start}-{own.stop - 1}"


def _counts(stacked: Sequence[nn.Parameter]) -> str:
    return " and ".join(str(param.shape[0]) for param in stacked)
