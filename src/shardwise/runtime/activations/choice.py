"""Which units' activations are kept, recomputed or offloaded: a plan's `activations` applied to one model.

Eligible units are the model's blocks: modules below the root that have submodules and contain no other unit. An
embedding or a head saves only its input, so treating it would gain nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from shardwise.errors import ConfigError
from shardwise.memory import UnitChoice, fits, owners_of, whole_numel
from shardwise.plan import Activations, Plan, PolicyName
from shardwise.runtime.activations.operators import operators_named
from shardwise.system.torch_private import OpOverload

SELECTIVE = ("matmul", "attention")
"""The operators whose results `selective` keeps by default."""


@dataclass(frozen=True)
class Treatment:
    """The treatment of one unit: the policy, and for `selective` the operators whose results are kept."""

    policy: PolicyName
    keep: tuple[str, ...] = ()

    def __str__(self) -> str:
        texts = {
            "recompute": "activations recomputed",
            "selective": f"activations recomputed but for {', '.join(self.keep)}",
            "offload": "activations on the host",
            "disk": "activations on a disk",
        }
        return texts.get(self.policy, "")

    @property
    def operators(self) -> frozenset[OpOverload]:
        return operators_named(self.keep)


@dataclass(frozen=True)
class Treatments:
    """The treatments by unit, for units whose activations are not simply kept, and the modules of each unit."""

    by_unit: dict[str, Treatment] = field(default_factory=dict)
    sites: dict[str, tuple[nn.Module, ...]] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return bool(self.by_unit)

    @property
    def by_site(self) -> dict[nn.Module, tuple[str, Treatment]]:
        """By module, the unit's name and treatment."""
        return {site: (unit, self.by_unit[unit]) for unit, sites in self.sites.items() for site in sites}

    def have(self, *policies: PolicyName) -> bool:
        return any(one.policy in policies for one in self.by_unit.values())

    def describe(self, unit: str) -> str:
        """A description of the unit's treatment; empty if its activations are kept."""
        return str(self.by_unit[unit]) if unit in self.by_unit else ""

    def check_stages(self, model: nn.Module, pieces: Sequence[str]) -> None:
        """Raise `ConfigError` if a pipeline splits a treated module; `pieces` are the modules of its stages."""
        modules = dict(model.named_modules(remove_duplicate=False))
        for unit, sites in self.sites.items():
            inside = {inner for site in sites for inner in site.modules() if inner is not site}
            cut = next((piece for piece in pieces if modules[piece] in inside), None)
            if cut is not None:
                raise ConfigError(
                    f"{unit} has activations {self.by_unit[unit].policy}, but the pipeline splits it at {cut}. Split "
                    f"between units (pipeline.stages), or leave its activations out by a rule with activations: keep."
                )

    def within(self, model: nn.Module) -> Treatments:
        """The treatments of the modules that are still in `model`; a pipeline rank has only some of them."""
        present = set(model.modules())
        sites = {unit: tuple(site for site in of if site in present) for unit, of in self.sites.items()}
        left = {unit: of for unit, of in sites.items() if of}
        return Treatments({unit: self.by_unit[unit] for unit in left}, left)


def treatments_for(
    model: nn.Module, choices: Sequence[UnitChoice], plan: Plan, *, of_stage: bool = False
) -> Treatments:
    """The treatments that `plan` asks for. Raises `ConfigError` if they do not apply to this model. With `of_stage`
    other ranks have the rest of the model."""
    asked = [plan.activations, *(rule.activations for rule in plan.rules.values())]
    for one, where in zip(asked, ("activations", *(f"rules.{name}.activations" for name in plan.rules)), strict=True):
        _check(one, where, plan)
    if all(one.policy in (None, "keep") for one in asked):
        return Treatments()
    candidates = _candidates(model, choices)
    if not candidates and of_stage:
        return Treatments()
    if not candidates:
        raise ConfigError(
            f"The plan sets activations, but none of the units of {type(model).__name__} is a module with modules in "
            f"it, below the model. Say which modules are units: units: {{class: Block}}."
        )
    found: dict[str, Treatment] = {}
    by_rule = _by_rule(model, candidates, plan)
    counts: dict[str, int] = {}
    for choice in candidates:
        rule = by_rule.get(choice.name)
        wanted = plan.activations if rule is None else plan.rules[rule].activations
        place = counts[rule or ""] = counts.get(rule or "", -1) + 1
        if wanted.policy not in (None, "keep") and place % wanted.every == 0:
            keep = (wanted.keep or SELECTIVE) if wanted.policy == "selective" else ()
            assert wanted.policy is not None
            found[choice.name] = Treatment(wanted.policy, keep)
    sites = {choice.name: choice.sites for choice in candidates if choice.name in found}
    _refuse_own_recomputing(model, found, sites)
    return Treatments(found, sites)


def _check(asked: Activations, where: str, plan: Plan) -> None:
    if asked.keep is not None and asked.policy != "selective":
        raise ConfigError(
            f"{where}.keep names operators whose results are kept, which is for policy selective, and the policy is "
            f"{asked.policy or 'not given'}. Set {where}.policy=selective, or leave out keep."
        )
    if asked.policy == "selective":
        operators_named(asked.keep if asked.keep is not None else SELECTIVE, f"{where}.keep")
        if plan.compile is not None:
            raise ConfigError(
                f"{where} is selective and compile is {plan.compile!r}: a compiled unit has no single operators "
                f"whose results could be kept. Take recompute or offload, or leave out compile."
            )
    if asked.policy == "disk" and plan.disk is None:
        raise ConfigError(
            f"{where} is disk, and the plan names no folder. Give it one on a local disk, such as disk: /scratch/run."
        )


def _candidates(model: nn.Module, choices: Sequence[UnitChoice]) -> list[UnitChoice]:
    """The units that can be treated; a module belongs to the first of its units."""
    every = {site for choice in choices for site in choice.sites}
    candidates: list[UnitChoice] = []
    taken: set[nn.Module] = set()
    for choice in choices:
        is_alone = all(
            site is not model
            and site not in taken
            and any(True for _ in site.children())
            and not any(inner in every for inner in site.modules() if inner is not site)
            for site in choice.sites
        )
        if is_alone and choice.sites:
            candidates.append(choice)
            taken.update(choice.sites)
    return candidates


def _by_rule(model: nn.Module, candidates: Sequence[UnitChoice], plan: Plan) -> dict[str, str]:
    """For each unit the first rule with activations that matches all its parameters."""
    owners = owners_of(model)
    found: dict[str, str] = {}
    for name, rule in plan.rules.items():
        if rule.activations.policy is None:
            continue
        fitting = [
            choice
            for choice in candidates
            if all(
                fits(rule, path, owners[param], whole_numel(param, choice.boxes))
                for path, param in choice.params.items()
            )
        ]
        if not fitting:
            known = ", ".join(choice.name for choice in candidates[:4])
            raise ConfigError(
                f"The plan's rule {name!r} has activations, but there is no unit all of whose parameters fit it. Name "
                f"all parameters of a unit, such as {candidates[0].name}.*; units are {known} and so on."
            )
        for choice in fitting:
            found.setdefault(choice.name, name)
    return found


def _refuse_own_recomputing(
    model: nn.Module, found: dict[str, Treatment], sites: dict[str, tuple[nn.Module, ...]]
) -> None:
    for unit, treatment in found.items():
        if treatment.policy not in ("recompute", "selective"):
            continue
        for site in sites[unit]:
            if any(getattr(module, "gradient_checkpointing", False) is True for module in site.modules()):
                raise ConfigError(
                    f"{unit} recomputes its activations itself (gradient_checkpointing), and the plan recomputes them "
                    f"too. Turn it off in {type(model).__name__}, or leave out activations."
                )
