"""Whose code a frame is in, by the name of its file."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import system
from shardwise.errors import ConfigError
from shardwise.system.whose_code import called_by_script, whose, whose_class

SITE_PACKAGES = Path(torch.__file__).parent.parent


@pytest.mark.parametrize("library", ["torchvision/ops.py", "torch_geometric/pool.py", "transformers/trainer.py"])
def test_a_library_named_after_torch_is_not_torch(library: str) -> None:
    """Errors would otherwise name the line that called the library, not the line in it that they are about."""
    assert whose(str(SITE_PACKAGES / library)) == "the user's"


def test_files_of_this_library_and_of_torch_and_those_between_are_known_as_such() -> None:
    assert whose(str(system.__file__)) == "ours"
    assert whose(str(nn.__file__)) == "others'"
    assert {whose(name) for name in (threading.__file__, contextlib.__file__, "<string>")} == {"others'"}
    assert whose("/home/me/train.py") == "the user's"


def test_whose_a_class_is() -> None:
    """Also that of a script, and of a module that nobody can import any more."""
    assert {whose_class(kind) for kind in (ValueError, torch.OutOfMemoryError, nn.Linear)} == {"others'"}
    assert whose_class(ConfigError) == "ours"
    of_script, of_nobody = (type("Found", (Exception,), {"__module__": name}) for name in ("__main__", "gone"))
    assert {whose_class(kind) for kind in (of_script, of_nobody, pytest.Module)} == {"the user's"}


@pytest.mark.parametrize(
    ("caller", "is_told"),
    [
        ("/home/me/train.py", True),
        ("/home/me/transformers/train.py", True),
        ("/home/me/.venv/lib/python3.12/site-packages/transformers/trainer.py", False),
        ("/usr/lib/python3/dist-packages/any_library.py", False),
    ],
)
@pytest.mark.parametrize("method", [nn.Module.parameters, nn.Module.named_parameters])
def test_what_a_script_called_is_found_past_torch_and_not_for_a_library(
    caller: str, is_told: bool, method: Any
) -> None:
    seen: list[FrameType | None] = []

    class Watched(nn.Linear):
        def named_modules(self, *_: Any, **__: Any) -> Any:
            seen.append(called_by_script(sys._getframe()))
            return iter(())

    source = compile("list(method(model))", caller, "exec")
    exec(source, {"method": method, "model": Watched(2, 2)})
    (called,) = seen
    assert (called is not None) is is_told
    assert called is None or called.f_code is method.__code__
