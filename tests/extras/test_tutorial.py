"""The tutorial: its program runs, what the page shows is in it, and two ranks do what one does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, BertModel

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "stdlib_search"
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_what_the_page_shows_is_in_the_program() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted(EXAMPLE.glob("*.py"))]
    blocks = BLOCKS.findall(PAGE)
    assert len(blocks) == 5
    for block in blocks:
        assert any(block in text for text in texts), textwrap.dedent(block)


def finetune(out: Path, nproc: int, *options: str) -> str:
    command = [sys.executable, "-m", "shardwise", "launch", "--nproc", str(nproc), "--threads", "1"]
    asked = [str(EXAMPLE / "finetune.py"), "--rows", "8", "--candidates", "16", "--out", str(out), *options]
    done = subprocess.run([*command, *asked], capture_output=True, text=True, cwd=out.parent, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def losses_of(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "record.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def test_two_ranks_fine_tune_it_as_one_does_into_a_folder_of_transformers(tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    said = finetune(two, 2, "--steps", "2")
    assert "before: finds" in said
    assert "after: finds" in said
    assert "step 3/4" in finetune(two, 2, "--steps", "4")
    finetune(one, 1, "--steps", "4", "--accumulate", "2")
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-4)
    assert len(losses_of(two)) == 4
    ours, alone = (load_file(folder / "model" / "model.safetensors") for folder in (two, one))
    assert ours.keys() == alone.keys()
    for name, value in alone.items():
        if not name.endswith("key.bias"):  # whose gradients are nothing but rounding
            assert torch.allclose(ours[name], value, rtol=1e-4, atol=1e-5), name

    model = AutoModel.from_pretrained(two / "model", add_pooling_layer=False)
    assert type(model) is BertModel
    assert all(torch.equal(value, ours[name]) for name, value in model.state_dict().items())
