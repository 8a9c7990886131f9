"""The expected verdict of every action of the matrix: those of this table are refused, all others are equal."""

from __future__ import annotations

from collections.abc import Mapping

SHARDED = ("zero3",)

REFUSED: dict[str, str | Mapping[str, str]] = {
    "add_param_group": "was added to an optimizer whose model is sharded already",
}
"""By action: words of the sentence, or by preset where they are not the same in all of them."""


def sentence_of(name: str, preset: str) -> str:
    """The words by which an action is refused under a preset; empty where it is equal."""
    words = REFUSED.get(name, "")
    return words if isinstance(words, str) else words.get(preset, "")
