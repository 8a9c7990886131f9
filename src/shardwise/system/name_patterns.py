"""Shell-style patterns of parameters' and modules' names: `*`, `?`, `[abc]`, `[!abc]`."""

from __future__ import annotations

import fnmatch
import functools


def matches(name: str, pattern: str) -> bool:
    """Whether the whole name matches; `*` also matches dots."""
    return fnmatch.fnmatchcase(name, _with_closed_brackets(pattern))


def matches_end(name: str, pattern: str) -> bool:
    """Whether the name, or the end of it after a dot, matches."""
    return matches(name, pattern) or matches(name, f"*.{pattern}")


def matches_by_parts(name: str, pattern: str) -> bool:
    """Matches part by part: `h.*` names the blocks `h.0`, `h.1`, and not what is inside them."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(matches, parts, patterns))


@functools.lru_cache(maxsize=1024)
def _with_closed_brackets(pattern: str) -> str:
    """The same pattern, in which every `[` that no `]` closes, and so stands for itself, is written as `[[]`.

    For each of them `fnmatch` would search the rest of the pattern: 3 s for 5,000, and plans come from others too.
    """
    start = pattern.find("[")
    while start >= 0:
        first = start + 1
        first += pattern.startswith("!", first)
        first += pattern.startswith("]", first)  # as the first of a set it does not close it
        end = pattern.find("]", first)
        if end < 0:  # then no later one is closed either
            return pattern[:start] + pattern[start:].replace("[", "[[]")
        start = pattern.find("[", end + 1)
    return pattern
