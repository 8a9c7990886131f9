"""Every block of Python in the pages about other libraries runs as it stands, on two ranks."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import lightning_jobs
import pytest
import torch
import trainer_jobs as jobs
from rank_processes import on_ranks
from torch import nn
from transformers import Seq2SeqTrainingArguments

pytestmark = pytest.mark.timeout(300)

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("transformers.md", "accelerate.md", "lightning.md")
BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Summed(nn.Module):
    """Its output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x).square().mean()
        return loss


def given(page: str) -> dict[str, Any]:
    """The names that a page presumes."""
    if page == "accelerate.md":
        model = Summed()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = torch.utils.data.DataLoader(torch.arange(64.0).sin().reshape(16, 4), 2)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
    if page == "lightning.md":
        quiet = {**lightning_jobs.QUIET, "enable_checkpointing": False}
        loader = torch.utils.data.DataLoader(lightning_jobs.Rows(16), batch_size=2)
        known = {"module": lightning_jobs.Module(), "loader": loader, "quiet": quiet, "pl": lightning_jobs.pl}
        return {**known, "build": lightning_jobs.Net, "torch": torch}
    settings = {**jobs.DEFAULTS, "max_steps": 2}
    args = Seq2SeqTrainingArguments(tempfile.mkdtemp(), **settings)
    return {"model": jobs.llama(), "args": args, "dataset": jobs.rows(16), "tests": jobs.rows(4)}


def run(page: str, text: str, folder: str) -> bool:
    os.chdir(folder)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    names = given(page)
    exec(compile(text, page, "exec"), names)
    trainer = names.get("trainer")
    if page == "lightning.md":
        strategy = (trainer or names["fabric"]).strategy
        return strategy.plan.preset in ("zero3", "zero2")
    return trainer is None or trainer.engine is not None


def blocks() -> list[tuple[str, int]]:
    return [(page, number) for page in PAGES for number, _ in enumerate(BLOCKS.findall((DOCS / page).read_text()))]


def test_there_are_blocks() -> None:
    assert {page for page, _ in blocks()} == set(PAGES)


@pytest.mark.parametrize(("page", "number"), blocks())
def test_a_block_runs(page: str, number: int, tmp_path: Path) -> None:
    text = BLOCKS.findall((DOCS / page).read_text())[number]
    assert on_ranks(2, run, page, text, str(tmp_path)) == [True, True]
