"""`shardwise report` looked at in a real browser: something is drawn, and nothing is complained about."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from browser import look_at

import shardwise as sw
from shardwise.cli.main import main


def colours(picture: Path) -> int:
    """How many different ones a picture has."""
    pixels = pytest.importorskip("matplotlib.image").imread(picture)
    return len({tuple(pixel) for pixel in pixels.reshape(-1, pixels.shape[-1])[::7].tolist()})


def test_the_page_of_a_run_is_drawn_without_a_word_of_complaint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sw.shard(model, {"run": str(run)}, optimizer=optimizer, world=sw.World.join(environment={})) as engine:
        for _ in range(6):
            loss = engine.train_step(torch.randn(4, 8), loss_fn=lambda output: output.square().mean())
            engine.log({"loss": loss}, samples=4)
    assert main(["report", str(run)]) == 0
    assert look_at(run / "report.html", tmp_path / "page.png") == []
    assert colours(tmp_path / "page.png") > 50

    broken = tmp_path / "broken.html"  # what the browser would say, and how little an empty page shows
    broken.write_text("<html><body><script>console.error('not well')</script></body></html>")
    assert any("not well" in line for line in look_at(broken, tmp_path / "broken.png"))
    assert colours(tmp_path / "broken.png") == 1
