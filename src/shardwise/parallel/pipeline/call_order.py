"""The order in which a forward calls the modules of its model, read from its source.

[Note: order] Stages are cut before there is a batch, so no forward can be followed yet. Modules are often registered in
the order of their calls, but not always: a U-Net's middle block comes after its up blocks, BART's norm of embeddings
after its layers, and a vision-language model embeds tokens, in a module of its language model, before it calls the
image tower. So the text of `forward` decides where it says something: a module is called where it is called, iterated
over, passed on, or assigned; methods of the model are followed. Modules that are not mentioned, or whose source is not
there, stay behind the one before which they are registered. A wrong order is refused in the first step.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from functools import lru_cache
from threading import Lock
from types import FunctionType
from typing import Any

from torch import nn

_EMBEDDINGS = "get_input_embeddings"
_ASKING = frozenset({"hasattr", "isinstance", "getattr", "len", "type", "callable", "setattr"})
"""Functions that look at a module and do not call it."""
_UNKNOWN = object()
_PARSING = Lock()
"""CPython 3.11 parses on one thread at a time: on several, it may raise that its depth of recursion is wrong."""


def in_order_of_calls(module: nn.Module, inner: Sequence[str]) -> list[str]:
    """The names `inner` of modules inside of `module`, in the order in which its forward calls them or what contains
    them. Of modules in them that it calls by themselves afterwards, the names come there as well."""
    left = list(inner)
    placed: list[str] = []
    for mentioned in mentions(module):
        found = [name for name in left if name == mentioned or name.startswith(f"{mentioned}.")]
        placed += found
        left = [name for name in left if name not in found]
        if mentioned not in placed and any(mentioned.startswith(f"{name}.") for name in placed):
            placed.append(mentioned)
    for name in left:
        before = inner.index(name) - 1
        placed.insert(placed.index(inner[before]) + 1 if before >= 0 else 0, name)
    return placed


def mentions(module: nn.Module) -> Iterator[str]:
    """The names of the modules inside of `module` that its forward uses, in order."""
    yield from _Reader(module).of_method(type(module), "forward")


@lru_cache(maxsize=256)
def _source_of(function: FunctionType) -> ast.FunctionDef | None:
    """The definition of a method, if its source is there and still that of what was imported."""
    try:
        with _PARSING:
            definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        return None
    names = tuple(one.arg for one in (*definition.args.posonlyargs, *definition.args.args))
    code = function.__code__
    is_same = (definition.name, names) == (code.co_name, code.co_varnames[: code.co_argcount])
    return definition if is_same else None


class _Reader:
    """Reads methods of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = {id(one): name for name, one in module.named_modules() if name}
        self._read: set[Any] = set()

    def of_method(self, owner: type, name: str) -> Iterator[str]:
        """What a method uses, as the class `owner` or one above it defines it; nothing if that cannot be read."""
        defining = next((one for one in owner.__mro__ if name in vars(one)), None)
        function = inspect.unwrap(vars(defining)[name]) if defining is not None else None
        if not isinstance(function, FunctionType) or function in self._read:
            return
        self._read.add(function)
        definition = _source_of(function)
        if definition is not None:
            assert defining is not None
            for statement in definition.body:
                yield from self._uses(statement, definition.args.args[0].arg, defining)

    def _uses(self, node: ast.AST, me: str, defining: type) -> Iterator[str]:
        """What a statement or expression uses, in the order of its evaluation. `me` is the name of the module."""
        if isinstance(node, ast.Compare):
            return
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            children: list[ast.AST | None] = [node.value]
        elif isinstance(node, ast.For):
            children = [node.iter, *node.body, *node.orelse]
        elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
            children = [*(one.iter for one in node.generators), node.elt]
        elif isinstance(node, ast.If | ast.IfExp):
            body, orelse = ([one] if isinstance(one, ast.expr) else one for one in (node.body, node.orelse))
            holds = self._holds(node.test, me)
            children = [node.test, *(body if holds is not False else ()), *(orelse if holds is not True else ())]
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in _ASKING:
                return
            given: list[ast.expr] = [*node.args, *(one.value for one in node.keywords)]
            given.sort(key=lambda one: self._module_at(one, me) is not None)  # what is passed on runs last
            children = [*given]
        elif isinstance(node, ast.Attribute | ast.Subscript):
            found = self._module_at(node, me) or self._owner_of_method(node, me)
            if found:
                yield found
            is_read = self._module_at(node.value, me)  # a weight's dtype, say
            children = [] if found or is_read else [node.value]
        else:
            children = list(ast.iter_child_nodes(node))
        for child in filter(None, children):
            yield from self._uses(child, me, defining)
        if isinstance(node, ast.Call):
            yield from self._called(node.func, me, defining)

    def _holds(self, test: ast.expr, me: str) -> bool | None:
        """Whether a condition on attributes of the module, such as `self.pre_norm`, holds; `None` if that is open."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            holds = self._holds(test.operand, me)
            return None if holds is None else not holds
        if isinstance(test, ast.Compare):
            operator, value, other = test.ops[0], self._value(test.left, me), self._value(test.comparators[0], me)
            if isinstance(operator, ast.Is | ast.IsNot) and other is None and value is not _UNKNOWN:
                return (value is None) == isinstance(operator, ast.Is)
            if isinstance(operator, ast.Eq | ast.NotEq) and isinstance(value, bool) and isinstance(other, bool):
                return (value == other) == isinstance(operator, ast.Eq)
            return None
        value = self._value(test, me)
        return value if isinstance(value, bool) else None

    def _value(self, node: ast.expr, me: str) -> object:
        """The value of a constant, or of `self.a.b`, if the module has that as such, and does not compute it. Modules
        are in training: RWKV's forward goes through all blocks before the embedding if it has to rescale them for
        inference, and models come from `from_pretrained` in evaluation."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id == me:
            return self._module
        if not isinstance(node, ast.Attribute):
            return _UNKNOWN
        owner = self._value(node.value, me)
        if owner is _UNKNOWN or hasattr(type(owner), node.attr):
            return _UNKNOWN
        is_mode = node.attr == "training" and isinstance(owner, nn.Module)
        return True if is_mode else getattr(owner, node.attr, _UNKNOWN)

    def _called(self, function: ast.expr, me: str, defining: type) -> Iterator[str]:
        """What a call uses by itself: a module, or a method of the model."""
        if not isinstance(function, ast.Attribute):
            yield from self._uses(function, me, defining)
            return
        owner = function.value
        if function.attr == _EMBEDDINGS:
            embedding = self._embedding_of(owner, me)
            if embedding is not None:
                yield embedding
                return
        is_super = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
        if is_super:
            yield from self._above(defining, function.attr)
        elif isinstance(owner, ast.Name) and owner.id == me and self._module_at(function, me) is None:
            yield from self.of_method(type(self._module), function.attr)
        else:
            yield from self._uses(function, me, defining)

    def _above(self, defining: type, name: str) -> Iterator[str]:
        """What the method that `super()` gives uses."""
        order = type(self._module).__mro__
        above = next((one for one in order[order.index(defining) + 1 :] if name in vars(one)), None)
        if above is not None:
            yield from self.of_method(above, name)

    def _embedding_of(self, owner: ast.expr, me: str) -> str | None:
        """The embedding of tokens that a method of transformers' models returns."""
        path = "" if isinstance(owner, ast.Name) and owner.id == me else self._module_at(owner, me)
        if path is None:
            return None
        try:
            return self._names.get(id(self._module.get_submodule(path).get_input_embeddings()))  # type: ignore[operator]
        except (AttributeError, NotImplementedError, TypeError):
            return None

    def _owner_of_method(self, node: ast.expr, me: str) -> str | None:
        """The module of which `node` is the forward, or a way to iterate over it."""
        path = self._module_at(node.value, me) if isinstance(node, ast.Attribute) else None
        if not path or not isinstance(node, ast.Attribute):
            return None
        is_list = isinstance(self._module.get_submodule(path), nn.ModuleList | nn.ModuleDict | nn.Sequential)
        return path if is_list or node.attr == "forward" else None

    def _module_at(self, node: ast.expr, me: str) -> str | None:
        """The name of the module that `self.a.b[0]` means, or of the one that contains it if the index is not known."""
        if isinstance(node, ast.Name):
            return "" if node.id == me else None
        if isinstance(node, ast.Attribute):
            path = self._module_at(node.value, me)
            key: object = node.attr
        elif isinstance(node, ast.Subscript):
            path = self._module_at(node.value, me)
            if not path:
                return None
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if not isinstance(key, int | str):
                return path
        else:
            return None
        if path is None:
            return None
        inner = self._module.get_submodule(path)._modules
        if isinstance(key, int):
            key = list(inner)[key] if -len(inner) <= key < len(inner) else None
        return None if inner.get(str(key)) is None else f"{path}.{key}".removeprefix(".")
