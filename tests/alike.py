"""`python -m tests.alike FOLDERS`: functions and classes that are nearly the same by their syntax trees, such as tests
that were copied and changed in one place. They may want a common helper, or be one test with two cases, or nothing."""

from __future__ import annotations

import ast
import copy
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

LEAST_NODES = 60
"""Of a tree that is compared: shorter ones are alike by chance."""
LEAST_SHARE = 0.8
"""Of sequences of nodes, from which two are alike."""
LENGTH = 6
"""Of such a sequence."""
MOST_OWNERS = 12
"""A sequence that so many have says nothing."""

Tree = ast.FunctionDef | ast.ClassDef


def shape_of(tree: ast.AST) -> Iterator[str]:
    """The nodes of a tree, without names of variables, values and docstrings; those of attributes and keywords stay."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr_context | ast.arg) or (isinstance(node, ast.Expr) and _is_text(node.value)):
            continue
        yield f"{type(node).__name__} {getattr(node, 'attr', '')}{node.arg if isinstance(node, ast.keyword) else ''}"
        yield from shape_of(node)
    yield "end"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def sequences_of(tree: Tree) -> Counter[tuple[str, ...]]:
    bare = copy.copy(tree)
    bare.decorator_list = []
    shape = list(shape_of(bare))
    return Counter(zip(*(shape[first:] for first in range(LENGTH)), strict=False))


def alike(sources: dict[str, str]) -> list[tuple[float, str, str]]:
    """Pairs of functions and classes in the files `sources`, by the share of what is the same, which are not inside of
    each other: each as `FILE:LINE NAME`."""
    found: list[tuple[str, Tree, str, Counter[tuple[str, ...]]]] = []
    for file, text in sources.items():
        trees = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        large = [tree for tree in trees if sum(1 for _ in ast.walk(tree)) >= LEAST_NODES]
        found += [(file, tree, f"{file}:{tree.lineno} {tree.name}", sequences_of(tree)) for tree in large]
    owners = defaultdict(list)
    for place, one in enumerate(found):
        for sequence in one[3]:
            owners[sequence].append(place)
    near = {pair for own in owners.values() if len(own) <= MOST_OWNERS for pair in itertools.combinations(own, 2)}
    pairs = []
    for (file, one, name, mine), (other_file, other, other_name, theirs) in ((found[a], found[b]) for a, b in near):
        is_inside = file == other_file and one.lineno <= other.lineno <= (one.end_lineno or 0)
        share = 2 * (mine & theirs).total() / (mine.total() + theirs.total())
        if share >= LEAST_SHARE and not is_inside:
            pairs.append((share, name, other_name))
    return sorted(pairs, reverse=True)


if __name__ == "__main__":
    files = [path for folder in sys.argv[1:] or ["tests"] for path in sorted(Path(folder).rglob("*.py"))]
    for share, one, other in alike({str(path): path.read_text() for path in files}):
        print(f"{share:.2f}  {one}\n      {other}")
