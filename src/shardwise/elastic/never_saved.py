"""The state of a loop that has never been saved."""

from __future__ import annotations

from typing import Any

from shardwise.errors import StateError


class NeverSaved(dict[str, Any]):
    """Empty; whoever looks something up in it is told why it is not there."""

    def __missing__(self, key: str) -> Any:
        raise StateError(
            f"This rank has come to others who have not saved or resumed anything yet, so nobody knows their "
            f"state[{key!r}]. Ask for it with state.get(), or give what has it to engine.remember(), which tells ranks "
            f"that come without a checkpoint."
        )
