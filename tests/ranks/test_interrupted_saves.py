"""Ctrl-C at any line of what writes a checkpoint leaves the earlier one, and no draft."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.published import mapped_tensors
from tests.thorough import drawn

WAYS: dict[str, Callable[[sw.Engine, Path], Any]] = {
    "save": lambda engine, folder: engine.save(folder),
    "save_pretrained": lambda engine, folder: engine.save_pretrained(folder, overwrite=True),
    "publish": lambda engine, folder: engine.publish(folder),
}
NUM_LAST = 16


class CtrlC:
    """Raises `KeyboardInterrupt` in this thread at the `number`-th line of the package `checkpoint`, once."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._home = str(Path(folders.__file__).parent)

    def __enter__(self) -> CtrlC:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._home) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.number -= 1
            if self.number == 0:
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_at_any_line_leaves_what_was_there_and_no_draft(way: str, tmp_path: Path) -> None:
    """Drawn lines, and all where the new one takes the place of the old."""
    stride = drawn(307, 3)
    num_lines = -_interrupted(way, tmp_path / "whole", 0)
    for number in sorted({*range(stride, num_lines, stride), *range(num_lines - NUM_LAST, num_lines)}):
        assert _interrupted(way, tmp_path / str(number), number) == 0


def _interrupted(way: str, home: Path, number: int) -> int:
    """Interrupt the second call of `way` at that line; none is the 0th. What is left of `number` then: 0 if it was
    interrupted."""
    folder, model = home / "there", torch.nn.Linear(2, 2)
    engine = sw.shard(model, "zero3", optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for is_second in (False, True):
        model(torch.ones(1, 2)).sum().backward()
        engine.step()
        if not is_second:
            WAYS[way](engine, folder)
    ctrl_c = CtrlC(number)
    try:
        with ctrl_c:
            WAYS[way](engine, folder)
    except KeyboardInterrupt:
        pass
    hidden = [path.name for path in home.rglob(".*") if path.name != ".lock"]
    assert not hidden, f"line {number} of {way} left {hidden}"
    _require_whole(way, folder)
    engine.close()
    return ctrl_c.number


def _require_whole(way: str, folder: Path) -> None:
    """One of the two is there."""
    model = torch.nn.Linear(2, 2)
    if way == "save":
        engine = sw.shard(model, "zero3", optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loaded = engine.resume(folder)
        assert loaded is not None
        engine.close()
    elif way == "publish":
        found = sw.published(folder)
        assert found is not None
        model.load_state_dict(found.tensors())
    else:
        model.load_state_dict(mapped_tensors(folder))
