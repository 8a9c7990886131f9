"""A script may call `torch.set_default_device("cuda")`. Tensors that the library makes for itself, such as messages
between ranks, stay where its code says, so that code names the device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import shardwise

SOURCE = Path(shardwise.__file__).parent
PACKAGES = ("comm", "memory", "runtime", "sharded", "checkpoint", "elastic", "system", "optim")
ELSEWHERE = {"mpi", "formats", "rehearsal"}
"""Folders whose code runs outside a user's loop, or on fake tensors."""
MAKERS = {
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "as_tensor",
    "arange",
    "linspace",
    "eye",
    "rand",
    "randn",
    "randint",
}


def makers(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch":
                yield node


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    num_calls, bad = 0, []
    for package in PACKAGES:
        for path in sorted((SOURCE / package).rglob("*.py")):
            if ELSEWHERE & set(path.parts):
                continue
            for call in makers(ast.parse(path.read_text())):
                num_calls += 1
                if not {"device", None} & {keyword.arg for keyword in call.keywords}:
                    bad.append(f"{path.relative_to(SOURCE)}:{call.lineno}")
    assert num_calls > 100
    assert not bad, "\n".join(bad)
