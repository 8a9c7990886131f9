"""What `resume` returns as the loop's state to a rank that joins a job which has never saved."""

from __future__ import annotations

from typing import Any

from shardwise.errors import StateError


class NeverSaved(dict[str, Any]):
    """Empty; a lookup raises `StateError` with the reason."""

    def __missing__(self, key: str) -> Any:
        raise StateError(
            f"This rank has joined a job that has not saved or resumed a checkpoint yet, so there is no "
            f"state[{key!r}]. Read it with state.get(), or register its object with engine.remember(): ranks that join "
            f"then receive its state without a checkpoint."
        )
