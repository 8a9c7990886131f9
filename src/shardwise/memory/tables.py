"""The table of each parameter: the plan's own, or that of the first rule that fits.

So a rule makes more flat buffers, not another scheme: a unit has one for each distinct table, and nothing above knows
of rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shardwise.errors import ConfigError, nearest
from shardwise.memory.dtypes import dtype_of_codes, own_precision
from shardwise.memory.select import UnitChoice, choose_units, whole_numel
from shardwise.plan import DtypeName, Offload, Plan, Rule
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import (
    Box,
    Dtype,
    Offloaded,
    Table,
    UnitNumel,
    check_offload,
    resident_table,
    ruled_tables,
    table_for,
)
from shardwise.system.name_patterns import matches

SMALL, WHOLE, SUMMANDS = "small", "whole", "summands"
ROUTERS = frozenset({"router", "gate", "wg"})
"""What routers of experts are called: Mixtral and Qwen-MoE `gate`, Switch and DBRX `router`, DeepSpeed `wg`. Modules of
these names that have no fewer outputs than inputs are parts of gated MLPs."""


@dataclass(frozen=True)
class LabelledTable:
    """A table, and the label of the flat buffers under it; "" for the plan's own."""

    label: str
    table: Table

    def stored_as(self, dtype: Dtype) -> LabelledTable:
        """The row of codes of `dtype`."""
        return self.also(dtype, self.table.stored_as(dtype))

    def with_summands(self) -> LabelledTable:
        """The row of parameters that are updated with summands of their gradients."""
        return self.also(SUMMANDS, self.table.with_summands())

    def for_frozen(self) -> LabelledTable:
        """The row of frozen parameters under the same table; the names of their flat buffers say that they are."""
        return LabelledTable(self.label, self.table.for_frozen())

    def without_codes(self) -> LabelledTable:
        """The row of parameters that are sent whole though others under the same table are sent as codes."""
        if not self.table.sends_codes:
            return self
        return self.also(WHOLE, self.table.without_codes())

    def also(self, label: str, table: Table) -> LabelledTable:
        """`table`, with the label that tells it from those under this one."""
        return LabelledTable(f"{self.label}-{label}" if self.label else label, table)


def tables_for(
    model: nn.Module, plan: Plan, mesh: Mesh, known: Mapping[nn.Parameter, Box] | None = None
) -> dict[nn.Parameter, LabelledTable]:
    """The table of every parameter, by the sizes of whole ones; `known` are the boxes of a model that is already split.

    If plan and rule say no precision, a parameter computes in its own dtype. Raises `ConfigError` for a rule that fits
    no parameter.
    """
    if plan.follows_model:
        return _tables_by_precision(model, plan, mesh, known)
    boxes = known or {}
    owners = owners_of(model) if plan.rules else {}
    common = LabelledTable("", table_for(plan, mesh))
    small = LabelledTable(SMALL, resident_table(plan, mesh)) if plan.resident_below else common
    ruled = {name: LabelledTable(name, table) for name, table in ruled_tables(plan, mesh).items()}
    rows, used = {}, set()
    for name, param in model.named_parameters():
        fitting = next(
            (rule for rule in ruled if fits(plan.rules[rule], name, owners[param], whole_numel(param, boxes))),
            None,
        )
        if fitting is not None:
            used.add(fitting)
            rows[param] = ruled[fitting]
        else:
            rows[param] = small if whole_numel(param, boxes) < plan.resident_below else common
    for unused in sorted(set(ruled) - used):
        raise _fits_nothing(unused, plan.rules[unused], model, owners)
    if plan.offload != Offload():
        rows = _offloaded(rows, model, plan, mesh, boxes)
    rows = {param: row if param.requires_grad else row.for_frozen() for param, row in rows.items()}
    if any(row.table.sends_codes for row in rows.values()):
        rows |= {param: rows[param].without_codes() for param in sent_whole(model) if param in rows}
    codes = {param: dtype for param in rows if (dtype := dtype_of_codes(param)) is not None}
    return rows | {param: rows[param].stored_as(dtype) for param, dtype in codes.items()}


def sent_whole(model: nn.Module) -> set[nn.Parameter]:
    """[Note: what is sent whole] Vectors and scalars (norms, biases), embeddings, a head that is tied to one included,
    and routers of experts.

    Vectors are too few to save anything. In an embedding rows of rare tokens would share nothing but the largest
    gradient of their block, and what a router loses sends tokens elsewhere. They are among what DeepSeek-V3 keeps in
    higher precision too (arXiv:2412.19437), and DeepSpeed sends gradients of vectors as they are.
    """
    return {
        param
        for path, module in model.named_modules()
        for param in module._parameters.values()
        if param is not None and (param.dim() < 2 or _is_embedding(module) or _is_router(path, module, param))
    }


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Embedding" in type(module).__name__


def _is_router(path: str, module: nn.Module, param: nn.Parameter) -> bool:
    if "Router" in type(module).__name__:
        return True
    return path.rpartition(".")[2] in ROUTERS and param.shape[0] < param.shape[-1]


def in_own_precision(plan: Plan, model: nn.Module) -> Plan:
    """`plan` in the precision that all parameters of `model` have; unchanged if it says one, or if they have several.
    Then each parameter keeps its own."""
    kinds = _own_precisions(model)
    return plan.with_own_precision(kinds[0]) if plan.follows_model and len(kinds) == 1 else plan


def _own_precisions(model: nn.Module) -> list[DtypeName]:
    kinds = map(own_precision, model.parameters())
    return list(dict.fromkeys(kind for kind in kinds if kind is not None))


def _tables_by_precision(
    model: nn.Module, plan: Plan, mesh: Mesh, known: Mapping[nn.Parameter, Box] | None
) -> dict[nn.Parameter, LabelledTable]:
    """The tables of a plan that says no precision. Labels name those that are not in the first, fp32 if there is
    any."""
    kinds: list[DtypeName] = sorted(_own_precisions(model) or ["fp32"], key=lambda kind: kind != "fp32")
    rows, *others = (tables_for(model, plan.with_own_precision(kind), mesh, known) for kind in kinds)
    for kind, tables in zip(kinds[1:], others, strict=True):
        for param, row in tables.items():
            if own_precision(param) == kind and row != rows[param]:
                rows[param] = row.also(kind, row.table)
    return rows


def _offloaded(
    rows: dict[nn.Parameter, LabelledTable],
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    boxes: Mapping[nn.Parameter, Box],
) -> dict[nn.Parameter, LabelledTable]:
    """The tables with the plan's shares of units moved off the device."""
    units = choose_units(model, plan, boxes)
    sizes = [unit_numel(unit, boxes) for unit in units]
    check_offload(plan, mesh, sizes)
    offloaded = Offloaded.of(plan.offload, sizes)
    changed = dict(rows)
    for place in offloaded.updated | offloaded.resting:
        for param in units[place].params.values():
            row = rows[param]
            table = offloaded.table(place, row.table, is_trained=param.requires_grad)
            changed[param] = LabelledTable(row.label, table)
    return changed


def unit_numel(unit: UnitChoice, known: Mapping[nn.Parameter, Box] | None = None) -> UnitNumel:
    """The elements of a unit by which shares of a model are counted; `known` as in `choose_units`."""
    sizes = [(whole_numel(param, known or {}), param.requires_grad) for param in unit.params.values()]
    return UnitNumel(sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes))


def owners_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """The class of the module that owns each parameter; the first one's, if several do."""
    owners: dict[nn.Parameter, str] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, type(module).__name__)
    return owners


def fits(rule: Rule, name: str, owner: str, numel: int) -> bool:
    """Whether the rule names a parameter of that name and size, owned by a module of class `owner`."""
    return (
        (rule.params is None or any(matches(name, pattern) for pattern in rule.params))
        and (rule.classes is None or owner in rule.classes)
        and (rule.max_numel is None or numel <= rule.max_numel)
    )


def _fits_nothing(name: str, rule: Rule, model: nn.Module, owners: Mapping[nn.Parameter, str]) -> ConfigError:
    hint = "No rule before it may take all of its parameters."
    for pattern in rule.params or ():
        names = [known for known, _ in model.named_parameters()]
        if not any(matches(known, pattern) for known in names):
            hint = f"No parameter is called {pattern!r}. {nearest(pattern, names)}"
    for owner in sorted(set(rule.classes or ()) - set(owners.values())):
        hint = f"No module of class {owner!r} has parameters. {nearest(owner, owners.values())}"
    return ConfigError(f"The plan's rule {name!r} fits none of the model's parameters. {hint}")
