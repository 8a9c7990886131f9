"""Which parameters are gathered together: units chosen from a module tree.

*Blocks* come first: the model's own repeated class, or what the plan asks for. Every other parameter belongs to the
module that owns it: an embedding or a head becomes its own unit, small ones (a last norm, a position table) form one
unit called `rest`. A parameter that several units use becomes a unit with several *sites*: modules before which it is
gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from shardwise.errors import ConfigError, nearest
from shardwise.plan import Plan
from shardwise.plan.placement import ALIGN, Box, Slot, pack, pack_boxes
from shardwise.system.name_patterns import matches_by_parts

REST = "rest"
SMALL_NUMEL = 2**14
"""Modules outside blocks with fewer elements share one unit, to save a message each."""

Selection = dict[str, nn.Module]
Numel = Callable[[nn.Module], int]
"""Elements of all parameters in a module."""
Groups = dict[str, tuple[str, ...]]
"""By unit name, the paths of the modules that it is made of."""


@dataclass(frozen=True)
class UnitChoice:
    """A unit before it has memory: its parameters by name, and the modules before which they are needed.

    `boxes` are this rank's parts of parameters that a model axis cuts or copies.
    """

    name: str
    params: dict[str, nn.Parameter]
    sites: tuple[nn.Module, ...]
    boxes: Mapping[nn.Parameter, Box] = field(default_factory=dict)
    spans_model: bool = False
    """See `UnitSpec`."""

    def slots(self, named: Iterable[tuple[str, nn.Parameter]], align: int = ALIGN) -> tuple[Slot, ...]:
        """Consecutive slots in a flat buffer for some of the parameters, at multiples of `align` elements; either all
        of them have boxes, or none."""
        laid = list(named)
        if not any(param in self.boxes for _, param in laid):
            return pack(((name, tuple(param.shape)) for name, param in laid), align)
        return pack_boxes(((name, self.boxes[param]) for name, param in laid), align)


def whole_numel(param: nn.Parameter, boxes: Mapping[nn.Parameter, Box]) -> int:
    """Elements of the unsplit parameter; `boxes` has its part, if it is split."""
    box = boxes.get(param)
    return param.numel() if box is None else math.prod(box.shape)


def choose_units(model: nn.Module, plan: Plan, known: Mapping[nn.Parameter, Box] | None = None) -> list[UnitChoice]:
    """All parameters of `model`, each in exactly one unit, in the order in which the model registers them.

    `known` are the boxes of a model that is already split: units are chosen by the sizes of whole parameters, so that
    they are the same on all ranks. Raises `ConfigError` for units that the model does not have.
    """

    def numel_of(module: nn.Module) -> int:
        return sum(whole_numel(param, known or {}) for param in module.parameters())

    groups = _grouped(model, plan, numel_of)
    homes = _homes(model, groups)
    owned: dict[tuple[str, ...], dict[str, nn.Parameter]] = {}
    for name, param in model.named_parameters():
        owned.setdefault(homes[param], {})[name] = param
    modules = dict(model.named_modules())
    choices, small = [], {}
    for home, params in owned.items():
        numel = sum(whole_numel(param, known or {}) for param in params.values())
        if len(home) == 1 and home[0] not in groups and numel < SMALL_NUMEL:
            small.update(dict.fromkeys(params, home[0]))
            continue
        name = home[0] or type(model).__name__
        paths = [path for unit in home for path in groups.get(unit, (unit,))]
        sites = tuple(site for path in paths for site in _callable(modules[path]))
        spans_model = any(site is model for site in sites)
        choices.append(UnitChoice(name if len(home) == 1 else f"{name}+", params, sites, spans_model=spans_model))
    if small:
        choices.append(_rest(model, modules, small))
    return choices


def _rest(model: nn.Module, modules: Mapping[str, nn.Module], small: Mapping[str, str]) -> UnitChoice:
    """The unit of small leftovers: gathered before the lowest module that contains all their owners, and again before
    an owner that is called by itself."""
    paths = [path.split(".") if path else [] for path in small.values()]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    owners = [modules[path] for path in dict.fromkeys(small.values())]
    above = next((modules[path] for path in _upwards(".".join(common)) if _has_forward(modules[path])), model)
    named = dict(model.named_parameters())
    sites = [above, *(owner for owner in owners if owner is not above)]
    return UnitChoice(REST, {name: named[name] for name in small}, tuple(sites), spans_model=above is model)


def _callable(module: nn.Module) -> Iterator[nn.Module]:
    """`module`, or if it has no forward of its own, like a `ModuleList`, the modules in it that are called."""
    if _has_forward(module) or not any(True for _ in module.children()):
        yield module
        return
    for child in module.children():
        yield from _callable(child)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _homes(model: nn.Module, groups: Groups) -> dict[nn.Parameter, tuple[str, ...]]:
    """For each parameter the blocks that use it, or the owning module if that is in no block."""
    units = {path: name for name, paths in groups.items() for path in paths}
    homes: dict[nn.Parameter, dict[str, None]] = {}
    for path, module in model.named_modules():
        home = next((units[above] for above in _upwards(path) if above in units), path)
        for param in module._parameters.values():
            if param is not None:
                homes.setdefault(param, {})[home] = None
    return {param: tuple(paths) for param, paths in homes.items()}


def _upwards(path: str) -> Iterator[str]:
    """`h.0.mlp`, `h.0`, `h` and the root."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _grouped(model: nn.Module, plan: Plan, numel_of: Numel) -> Groups:
    """The blocks that the plan asks for, each a unit by itself or several together."""
    wanted = plan.units
    if wanted == "auto":
        return _alone(dict(_repeated(model, "", numel_of)))
    if isinstance(wanted, tuple):
        return _by_name(model, wanted, numel_of)
    together = wanted.get("together", 1)
    match wanted:
        case {"class": str(name)}:
            return _in_chunks(_by_class(model, name, numel_of), int(together))
        case {"min_numel": int(numel)}:
            return _in_chunks(dict(_by_size(model, "", numel, numel_of)), int(together))
    raise ConfigError(f"units is {wanted!r}; write {{class: Block}} or {{min_numel: 1000000}}.")


def _alone(selection: Selection) -> Groups:
    return {path: (path,) for path in selection}


def _in_chunks(selection: Selection, num: int) -> Groups:
    """`num` modules per unit, in the order in which the model registers them."""
    paths = list(selection)
    chunks = [tuple(paths[start : start + num]) for start in range(0, len(paths), num)]
    return {chunk[0] if len(chunk) == 1 else f"{chunk[0]}-{chunk[-1]}": chunk for chunk in chunks}


def _repeated(module: nn.Module, path: str, numel_of: Numel) -> Iterator[tuple[str, nn.Module]]:
    """Children of a container that have a class at least twice: a model's own blocks, outermost."""
    children = {_join(path, name): child for name, child in module.named_children() if numel_of(child)}
    classes = [type(child) for child in children.values()]
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for name, child in children.items():
        if is_container and classes.count(type(child)) > 1 and _has_forward(child):
            yield name, child
        else:
            yield from _repeated(child, name, numel_of)


def _by_class(model: nn.Module, name: str, numel_of: Numel) -> Selection:
    found: Selection = {}
    for path, module in model.named_modules():
        inside = any(above in found for above in _upwards(path))
        if type(module).__name__ == name and not inside and numel_of(module):
            found[path] = module
    if not found:
        classes = {type(module).__name__ for module in model.modules() if numel_of(module)}
        raise ConfigError(f"units asks for class {name!r}, but the model has no such module. {nearest(name, classes)}")
    return found


def _by_name(model: nn.Module, wanted: tuple[str, ...], numel_of: Numel) -> Groups:
    """Each module that a pattern names is a unit; those of patterns joined by `+` form one."""
    groups: Groups = {}
    for patterns in wanted:
        found = [path for pattern in patterns.split("+") for path in _named(model, pattern.strip(), numel_of)]
        groups.update({patterns: tuple(dict.fromkeys(found))} if "+" in patterns else {path: (path,) for path in found})
    paths = [path for found in groups.values() for path in found]
    nested = [path for path in paths if any(above in paths for above in _upwards(path.rpartition(".")[0]))]
    twice = [path for path in paths if paths.count(path) > 1]
    if nested or twice:
        odd = (nested or twice)[0]
        what = "a module around it" if nested else "again in another unit"
        raise ConfigError(f"units names {odd!r} and also {what}; a parameter has one unit.")
    return groups


def _named(model: nn.Module, pattern: str, numel_of: Numel) -> list[str]:
    """The modules with parameters that `pattern` names."""
    modules = dict(model.named_modules())
    matches = [path for path in modules if path and matches_by_parts(path, pattern)]
    if not matches:
        raise ConfigError(f"units names {pattern!r}, but the model has no such module. {nearest(pattern, modules)}")
    return [path for path in matches if numel_of(modules[path])]


def _by_size(module: nn.Module, path: str, min_numel: int, numel_of: Numel) -> Iterator[tuple[str, nn.Module]]:
    """The smallest modules with at least `min_numel` parameters."""
    large = [(_join(path, name), child) for name, child in module.named_children() if numel_of(child) >= min_numel]
    if not large and path and numel_of(module) >= min_numel:
        yield path, module
    for name, child in large:
        yield from _by_size(child, name, min_numel, numel_of)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
