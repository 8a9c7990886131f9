"""`deepspeed.utils.z3_leaf_module`: modules that DeepSpeed's stage 3 gathers as a whole.

Here a unit, usually a block of the model, is always gathered whole, whichever of its modules a rank's data uses. So a
mark has no effect but to be remembered, for scripts that read marks back. To gather another module as a whole, list it
in the plan's `units`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import nn

_MARKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is marked."""
    return model in _MARKED


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether this parameter is in a marked module."""
    return any(param is model for module in list(_MARKED) for param in module.parameters())


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules in `model`."""
    return [module for module in model.modules() if module in _MARKED]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this module, or unmark it."""
    (_MARKED.add if flag else _MARKED.discard)(model)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, given themselves or by name. Returns them.

    Raises `ValueError` if there are none, unless `raise_if_not_found` is false.
    """
    return _set(model, leaf_module_classes, raise_if_not_found, True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Unmark the modules of these classes; see `set_z3_leaf_modules`."""
    return _set(model, leaf_module_classes, raise_if_not_found, False)


def _set(
    model: nn.Module, classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool, flag: bool
) -> list[nn.Module]:
    wanted = list(classes)

    def is_wanted(module: nn.Module) -> bool:
        kind = type(module)
        known = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        return any(one in known if isinstance(one, str) else isinstance(module, one) for one in wanted)

    found = list(filter(is_wanted, model.modules()))
    if not found and raise_if_not_found:
        raise ValueError(f"There are no modules of the classes {wanted} in the {type(model).__name__}.")
    _mark(found, flag)
    return found


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these full names in `model`, or unmark them. Returns them, and the names without a module.

    Raises `ValueError` if there are any such names, unless `raise_if_not_found` is false.
    """
    known = dict(model.named_modules())
    matches = {name: [known[name]] if name in known else [] for name in module_names}
    return _set_each(model, matches, flag, "named" if raise_if_not_found else None)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same for modules whose names end so; see `set_z3_leaf_modules_by_name`."""
    known = dict(model.named_modules())
    matches = {end: [module for name, module in known.items() if name.endswith(end)] for end in module_name_suffixes}
    return _set_each(model, matches, flag, "whose names end with" if raise_if_not_found else None)


def mark_by_config(model: nn.Module, section: Mapping[str, Iterable[str]]) -> None:
    """Mark what `zero_optimization.leaf_module` lists, as far as there is such."""
    set_z3_leaf_modules(model, section.get("classes", ()), raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, section.get("names", ()), raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, section.get("name_suffixes", ()), raise_if_not_found=False)


def _set_each(
    model: nn.Module, matches: dict[str, list[nn.Module]], flag: bool, required: str | None
) -> tuple[list[nn.Module], list[str]]:
    missing = [one for one, found in matches.items() if not found]
    every = list(dict.fromkeys(module for found in matches.values() for module in found))
    _mark(every, flag)
    if missing and required is not None:
        raise ValueError(f"There are no modules {required} {missing} in the {type(model).__name__}.")
    return every, missing


def _mark(found: Iterable[nn.Module], flag: bool) -> None:
    for module in found:
        set_z3_leaf_module(module, flag)
