"""Commands and plans in the README and in docs/: every command line is parsed by the command's own parser, those that
start nothing are run, and every YAML block is read and looked through as a plan."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from shardwise.cli.main import COMMANDS, command_parser, main
from shardwise.cli.plan_lint import lint
from shardwise.system.machine import TorchFacts

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"(?:\$ )?((?:[A-Z_]+=\S+ )*)shardwise (.*?)(?: &)?$")
STARTS_NOTHING = {"launch", "deepspeed", "accelerate", "explain"}
"""Commands that end within a second: with `--dry-run`, if they have it."""
EIGHT_CORES = TorchFacts("2.13", "CPU", ("gloo",))


@dataclass(frozen=True)
class Line:
    """A command in a page."""

    page: str
    variables: tuple[str, ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def lines() -> Iterator[Line]:
    """Every line that begins with `shardwise`, in console blocks and in indented ones."""
    for page in PAGES:
        text = page.read_text()
        blocks = [body for kind, body in FENCE.findall(text) if kind in ("console", "bash")]
        blocks += re.findall(r"(?<=\n\n)(?:    .*\n)+", FENCE.sub("", text))
        for line in "".join(blocks).splitlines():
            found = LINE.match(line.strip())
            if found:
                words = shlex.split(found[2], comments=True)
                yield Line(page.name, tuple(found[1].split()), tuple(words))


def plans() -> dict[str, str]:
    """Every YAML block, by page and number."""
    return {
        f"{page.name}-{number}": body
        for page in PAGES
        for number, (kind, body) in enumerate(FENCE.findall(page.read_text()))
        if kind == "yaml"
    }


LINES = sorted({str(line): line for line in lines()}.values(), key=str)
SCRIPT = """
import torch
def build(): return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
def batch(): return torch.ones(2, 4)
sample_batch = batch
"""
DEEPSPEED = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
fsdp_config: {fsdp_version: 2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files that the pages name, and an environment that is restored."""
    scripts = ["train.py", "finetune.py", "run_clm.py", "train_text_to_image.py", "examples/stdlib_search/finetune.py"]
    for script in scripts:
        (tmp_path / script).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / script).write_text(SCRIPT)
    (tmp_path / "hosts").write_text("gpu1 slots=8\ngpu2 slots=8\n")
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho a:4\necho b:4\n")
    (tmp_path / "hosts.sh").chmod(0o755)
    (tmp_path / "plan.yaml").write_text("preset: zero2\n")
    (tmp_path / "config.yaml").write_text(ACCELERATE)
    for name in ("ds.json", "ds_config.json"):
        (tmp_path / name).write_text(json.dumps(DEEPSPEED))
    before = dict(os.environ)
    os.environ["DATA_ROOT"] = "/data"
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


def test_the_pages_are_read() -> None:
    assert len(LINES) > 60
    assert {line.words[0] for line in LINES} == set(COMMANDS)
    assert len(plans()) >= 16


def test_their_options_are_known() -> None:
    for line in LINES:
        try:
            command_parser(line.words[0]).parse_args(list(line.words[1:]))
        except SystemExit:  # it has said why
            pytest.fail(str(line))


@pytest.mark.parametrize("line", [line for line in LINES if line.words[0] in STARTS_NOTHING], ids=str)
def test_it_is_accepted(line: Line, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.update(pair.split("=", 1) for pair in line.variables)
    command, *rest = line.words
    if command != "explain":
        rest.insert(0, "--dry-run")
    if {"slurm", "--elastic"} <= set(rest):
        os.environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}  # within an allocation
    if "mpi" in rest:
        rest[:0] = ["--mpi", "openmpi"]  # else it looks for one
    assert main([command, *rest]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_a_deepspeed_config_becomes_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "plan.yaml").unlink()
    found = [line for line in LINES if line.words[:2] == ("convert", "ds_config.json")]
    assert found
    for line in found:
        assert main(list(line.words)) == 0, capsys.readouterr().err
        assert lint(str(folder / "plan.yaml"), 8, EIGHT_CORES, 8)[0].status != "fail"
        (folder / "plan.yaml").unlink()


@pytest.mark.parametrize("name", plans())
def test_a_yaml_block_is_a_plan(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folders are made elsewhere; disks, compilers and packages of trackers are not those of this machine."""
    monkeypatch.setattr("shardwise.observe.trackers.check_trackers", lambda *_: None)
    monkeypatch.setattr("shardwise.system.disk.mounts.check_local", lambda _: None)
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.chdir(tmp_path)
    text = plans()[name].replace("/scratch", str(tmp_path))
    (tmp_path / "plan.yaml").write_text(text)
    axes = (yaml.safe_load(text).get("mesh") or {"dp": 8}).values()
    num_ranks = math.prod(size for size in axes if size > 0)
    found = lint(str(tmp_path / "plan.yaml"), num_ranks, EIGHT_CORES, 8)
    assert not [check for check in found if check.status == "fail"], found


def test_what_would_be_found(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        command_parser("launch").parse_args(["--nprok", "2", "train.py"])
    (tmp_path / "plan.yaml").write_text("activation: recompute\n")
    assert lint(str(tmp_path / "plan.yaml"), 8, EIGHT_CORES, 8)[0].status == "fail"


@pytest.mark.parametrize(("preset", "optimizer"), [("zero3", "muon"), ("ddp", "onebit-adam")])
def test_a_step_on_the_page_of_optimizers_is_what_explain_prints(
    preset: str, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"explain {preset} --world 8 --optimizer {optimizer}"
    page = (ROOT / "docs" / "optimizers.md").read_text()
    block = FENCE.findall("```\n" + page.split(f"`shardwise {command}`")[1].split("```\n", 1)[1])[0][1]
    assert main([*command.split(), "--full"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "collect" in block
    assert " ".join(block.split()) in printed
