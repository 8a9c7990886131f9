"""`deepspeed.utils.z3_leaf_module`: modules that DeepSpeed's stage 3 gathers as a whole.

Here a unit, usually a block of the model, is always gathered whole, whichever of its modules a rank's data uses. So a
mark has no effect but to be remembered, for scripts that read marks back. To gather another module as a whole, list it
in the plan's `units`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

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

    def is_wanted(name: str, module: nn.Module) -> bool:
        kind = type(module)
        known = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        return any(one in known if isinstance(one, str) else isinstance(module, one) for one in wanted)

    return _marked(model, is_wanted, flag, f"of the classes {wanted}" if raise_if_not_found else None)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these full names in `model`; see `set_z3_leaf_modules`."""
    wanted = list(module_names)
    return _marked(model, lambda name, _: name in wanted, True, f"named {wanted}" if raise_if_not_found else None)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules whose names end so; see `set_z3_leaf_modules`."""
    ends = tuple(module_name_suffixes)
    what = f"whose names end with {list(ends)}" if raise_if_not_found else None
    return _marked(model, lambda name, _: name.endswith(ends), True, what)


def _marked(
    model: nn.Module, is_wanted: Callable[[str, nn.Module], bool], flag: bool, required: str | None
) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if is_wanted(name, module)]
    if not found and required is not None:
        raise ValueError(f"There are no modules {required} in the {type(model).__name__}.")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found
