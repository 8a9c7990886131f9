"""What errors say beside their message."""

from __future__ import annotations

import pytest

from shardwise import errors
from shardwise.errors import ModelError, StateError, engines_are_made_by, whose_engine

TEXT = "Use engine.clip_grad_norm_(max_norm)."


def made_by(monkeypatch: pytest.MonkeyPatch, *libraries: tuple[str, str]) -> None:
    monkeypatch.setattr(errors, "_made_by", [])
    for library, found_at in libraries:
        engines_are_made_by(library, found_at)


def test_an_error_that_names_the_engine_says_where_a_library_has_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by(monkeypatch, *[("Accelerate", "accelerator.engine_of(model)"), ("Trainer", "trainer.engine")] * 2)
    error = StateError(TEXT)
    assert str(error) == TEXT
    assert error.__notes__ == [
        "Where a library has made the engine, it is there (Accelerate: accelerator.engine_of(model), Trainer: "
        "trainer.engine)."
    ]
    assert "trainer.engine" in whose_engine(TEXT)


@pytest.mark.parametrize("text", [
    "Set it to 0.",
    "Generate inside trainer.engine.inference().",
    "Use engine.shardwise.memory().",
])  # fmt: skip
def test_an_error_that_names_no_engine_says_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by(monkeypatch, ("Trainer", "trainer.engine"))
    assert not hasattr(ModelError(text), "__notes__")


def test_nobody_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by(monkeypatch)
    assert not hasattr(StateError(TEXT), "__notes__")
