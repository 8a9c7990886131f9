"""The main job before it starts: where a run is kept, how its rows divide, and what `make train` passes on."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.errors import ConfigError
from shardwise.plan.placement import mesh_for, table_for
from tests.patience import PATIENCE

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def job() -> ModuleType:
    """`examples/stdlib_gpt/train.py`, with the modules beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "examples" / "stdlib_gpt"))
        train = importlib.import_module("train")
    for name in ("train", "corpus", "model", "report", "tokens"):  # plain names, which others may have as well
        del sys.modules[name]
    return train


@pytest.mark.parametrize(("parts", "rows"), [(1, 8), (2, 8), (3, 9), (4, 8), (5, 10), (6, 12), (32, 32)])
def test_rows_come_out_even_on_any_number_of_ranks(job: ModuleType, parts: int, rows: int) -> None:
    assert job.batch_rows(argparse.Namespace(batch=None), parts, parts) == rows


def test_rows_that_were_asked_for_are_taken_or_refused(job: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HINTS", raising=False)
    assert job.batch_rows(argparse.Namespace(batch=12), 3, 3) == 12
    with pytest.raises(ConfigError, match=r"--batch 16 does not divide among 3 ranks .*: --batch 15"):
        job.batch_rows(argparse.Namespace(batch=16), 3, 3)
    monkeypatch.setenv("HINTS", "make")
    with pytest.raises(ConfigError, match='multiple of 4: ARGS="--batch 4"'):
        job.batch_rows(argparse.Namespace(batch=1), 4, 2)


@pytest.mark.parametrize(
    ("option", "in_make"),
    [
        ("--fresh", 'ARGS="--fresh"'),
        ("--steps N", "STEPS=N"),
        ("--out FOLDER", "OUT=FOLDER"),
        ("--lr 0.1", 'ARGS="--lr 0.1"'),
    ],
)
def test_hints_are_in_the_words_of_the_command(
    job: ModuleType, option: str, in_make: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HINTS", raising=False)
    assert job.as_given(option) == option
    monkeypatch.setenv("HINTS", "make")
    assert job.as_given(option) == in_make


@pytest.mark.parametrize(
    ("plan", "out", "folder"),
    [
        ("zero3", None, "runs/stdlib_gpt/zero3"),
        ("plans/mine.yaml", None, "runs/stdlib_gpt/mine"),
        ("zero3", "my runs/a", "my runs/a"),
    ],
)
def test_each_plan_has_a_folder_of_its_own(job: ModuleType, plan: str, out: str | None, folder: str) -> None:
    assert job.folder_of(argparse.Namespace(plan=plan, out=out)) == Path(folder)


@pytest.mark.parametrize(
    ("plan", "num_ranks", "mesh"),
    [
        ("3d", 8, {"pp": 2, "dp": 2, "tp": 2}),
        ("3d", 4, {"pp": 2, "dp": 1, "tp": 2}),
        ("tp", 4, {"dp": 2, "tp": 2}),
        ("tp", 8, {"dp": 4, "tp": 2}),
        ("pp", 4, {"pp": 2, "dp": 2}),
        ("pp", 8, {"pp": 2, "dp": 4}),
    ],
)
def test_the_plans_beside_the_job_fit_the_ranks_that_they_name(
    job: ModuleType, plan: str, num_ranks: int, mesh: dict[str, int]
) -> None:
    """As the job loads them, with its own wishes."""
    path = REPOSITORY / "examples" / "stdlib_gpt" / f"{plan}.yaml"
    loaded = job.load_plan(argparse.Namespace(plan=str(path), set=["precision=fp32"], out=None))
    found = mesh_for(loaded, num_ranks)
    assert {axis: found.size(axis) for axis in found.axes} == mesh
    table_for(loaded, found)


def make_train(*settings: str, dry: bool) -> subprocess.CompletedProcess[str]:
    """`make train` with this Python; nothing is installed."""
    here = f"BIN={Path(sys.executable).parent}"
    command = ["make", *(["-n"] if dry else []), "-o", ".venv/.train", "train", here, *settings]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_folders_and_plans_may_have_spaces() -> None:
    shown = make_train("OUT=my run", "PLAN=my plan.yaml", "STEPS=50", "ARGS=--fresh", dry=True).stdout
    assert '--plan "my plan.yaml" --steps 50 --out "my run" --fresh' in " ".join(shown.split())
    assert "--out" not in make_train(dry=True).stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("PLAN=nonsense",), "There is no preset 'nonsense'."),
        (("PLAN=nofile.yaml",), "There is no plan file 'nofile.yaml'"),
        (("NPROC=0",), "The number of ranks is unknown."),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused_before_ranks_start(settings: tuple[str, ...], said: str) -> None:
    done = make_train(*settings, dry=False)
    assert done.returncode != 0
    assert said in done.stderr
    assert "pyproject" not in done.stderr
    assert "Training" not in done.stdout
