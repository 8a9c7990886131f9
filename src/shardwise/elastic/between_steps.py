"""Exchanges outside steps: `engine.mean`, `any_rank`, `save`, `state_dict`.

They are numbered within their iteration. A rank that has the result of one reports it to those that a fault has kept
from getting theirs.

[Note: large results] Whole tensors (`state_dict()`, `get()`) are not reported. After such a call ranks exchange one
more message (`confirm`), so no rank returns before all have the result. A rank that is interrupted in that message
keeps its result if another one reports to have returned; if none has, all repeat the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shardwise.checkpoint.json_codec import decode, encode
from shardwise.elastic.regroup_reports import Report
from shardwise.errors import CommError, ConfigError

Result = TypeVar("Result")
_NUM_REMEMBERED = 8


class BetweenSteps:
    """One rank's exchanges outside steps."""

    def __init__(self) -> None:
        self.results: list[tuple[int, int, Any]] = []
        """Of the last calls: iteration, number, encoded value; `None` for large ones."""
        self._known: dict[tuple[int, int], Any] = {}
        """Such results as reported by other ranks."""
        self._returned: set[tuple[int, int]] = set()
        """The calls that any rank has returned from."""
        self._number = 0

    def begin(self) -> None:
        """An iteration begins."""
        self._number = 0

    def hear(self, reports: Sequence[Report]) -> None:
        """Note what all ranks report after a fault."""
        results = [one for each in reports for one in each.results]
        self._known = {(one[0], one[1]): decode(one[2]["is"]) for one in results if one[2]}
        self._returned = {(one[0], one[1]) for one in results}

    def call(
        self,
        iteration: int,
        work: Callable[[], Result],
        confirm: Callable[[], object] | None,
        recover: Callable[[CommError], None],
    ) -> Result:
        """The result of `work`, a call after `iteration` has begun. `confirm` is given for large results; `recover` is
        called after a fault."""
        key = (iteration, self._number)
        while True:
            found: list[Result] = []
            try:
                found.append(work())
                if confirm is not None:
                    confirm()
                break
            except CommError as error:
                recover(error)
                if key in self._known:
                    found = [self._known[key]]
                    break
                if found and key in self._returned:
                    break
        self._number += 1
        encoded = None if confirm is not None else _encoded(found[0])
        self.results = [*self.results[1 - _NUM_REMEMBERED :], (*key, encoded)]
        return found[0]


def _encoded(result: Any) -> Any:
    """`None` if `result` cannot be encoded."""
    try:
        return {"is": encode(result)}
    except ConfigError:
        return None
