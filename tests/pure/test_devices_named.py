"""A script may call `torch.set_default_device("cuda")`, or "meta". Tensors that the library makes for itself, such as
messages between ranks and what is read from files, stay where its code says, so that code names the device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

import shardwise

SOURCE = Path(shardwise.__file__).parent
MAKERS = {function.__name__ for function in _device_constructors()}
"""Torch's own list of what the default device moves."""
CALLED = re.compile(rf"torch\.({'|'.join(MAKERS)})\(")
FOLLOWS = {
    "parallel/experts/layer.py": "parameters of a module that the script makes, as those of nn.Linear",
    "parallel/experts/router.py": "likewise",
}
"""Files whose tensors are to be on the default device."""


def makers(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch":
                yield node


def names_device(call: ast.Call) -> bool:
    return bool({"device", None} & {keyword.arg for keyword in call.keywords})


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    num_calls, bad = 0, []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        text = path.read_text()
        calls = list(makers(ast.parse(text))) if CALLED.search(text) else []  # to parse all files takes seconds
        unnamed = [call for call in calls if not names_device(call)]
        num_calls += len(calls)
        if name in FOLLOWS:
            assert unnamed, f"{name} is not an exception any more"
        else:
            bad += [f"{name}:{call.lineno}" for call in unnamed]
    assert num_calls > 200
    assert not bad, "\n".join(bad)


def test_the_search_finds_what_the_default_device_moves() -> None:
    assert {"empty", "tensor", "as_tensor", "randperm", "sparse_coo_tensor"} <= MAKERS
    (call,) = makers(ast.parse("torch.zeros(3, dtype=torch.int64)"))
    assert not names_device(call)
