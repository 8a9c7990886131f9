"""What errors say beside their message."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from shardwise.errors import ModelError, StateError, whose_engine

TEXT = "Use engine.clip_grad_norm_(max_norm)."


def loaded(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for name in [name for name in sys.modules if name.startswith("shardwise.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in modules:
        monkeypatch.setitem(sys.modules, f"shardwise.integrations.{name}", ModuleType(name))


def test_an_error_that_names_the_engine_says_where_a_library_has_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, "accelerate", "transformers")
    error = StateError(TEXT)
    assert str(error) == TEXT
    assert error.__notes__ == [
        "Where a library has made the engine, it is there (Trainer: trainer.engine, Accelerate: "
        "accelerator.engine_of(model))."
    ]
    loaded(monkeypatch, "deepspeed")
    assert "engine.shardwise" in whose_engine(TEXT)


@pytest.mark.parametrize("text", [
    "Set it to 0.",
    "Generate inside trainer.engine.inference().",
    "Use engine.shardwise.memory().",
])  # fmt: skip
def test_an_error_that_names_no_engine_says_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, "transformers")
    assert not hasattr(ModelError(text), "__notes__")


def test_nobody_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch)
    assert not hasattr(StateError(TEXT), "__notes__")
