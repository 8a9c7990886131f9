"""Command lines of DeepSpeed's launcher."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.errors import ConfigError, LaunchError
from shardwise.integrations.deepspeed.command_line import Asked, add_options, understood


def asked(text: str, num_devices: int) -> Asked:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return understood(parser.parse_args([*text.split(), "train.py", "--deepspeed", "--num_gpus", "9"]), num_devices)


@pytest.mark.parametrize(
    ("text", "num_devices", "expected"),
    [
        ("", 4, (None, None)),
        ("--num_gpus 2 --num_nodes 1 --master_port 29501", 4, (2, None)),
        ("--num_accelerators=3", 0, (3, None)),
        ("--include localhost:1,3", 4, (2, (1, 3))),
        ("-i localhost", 4, (4, (0, 1, 2, 3))),
        ("--exclude worker-0:0", 4, (3, (1, 2, 3))),
        ("--include=localhost:0,1", 0, (2, None)),
    ],
)
def test_honoured(text: str, num_devices: int, expected: tuple[int | None, tuple[int, ...] | None]) -> None:
    found = asked(text, num_devices)
    assert ((found.nproc, found.devices), found.notes) == (expected, [])


def test_a_hostfile_of_one_host_counts_ranks(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# mine\n\nlocalhost slots=3\n")
    assert asked(f"--hostfile {file}", 0).nproc == 3
    assert asked(f"-H {file} --exclude localhost:1", 0).nproc == 2
    file.write_text("a slots=2\nb slots=2\n")
    with pytest.raises(LaunchError, match=r"there are 2, is about several hosts.*torchrun"):
        asked(f"--hostfile {file}", 0)
    file.write_text("a slot=2\n")
    with pytest.raises(ConfigError, match="not a line of a hostfile"):
        asked(f"--hostfile {file}", 0)


def test_what_means_nothing_is_told() -> None:
    notes = asked("--launcher pdsh --master_addr 10.0.0.1 --bind_cores_to_rank --hostfile nowhere", 2).notes
    assert [note.split()[0].rstrip(":") for note in notes] == [
        "--launcher", "--master_addr", "--bind_cores_to_rank", "--hostfile",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--num_nodes 2", "--num_nodes is about several hosts"),
        ("--node_rank 1", "--node_rank is about several hosts"),
        ("--include a:0@b:1", "is about several hosts"),
        ("--include localhost:x", "names no devices"),
        ("--exclude localhost", "leaves none"),
        ("--include localhost:0 --exclude localhost:1", "two choices"),
        ("--include localhost:0 --num_gpus 1", "Give one or the other"),
        ("--autotuning run", "--autotuning is not supported"),
        ("--no_python", "--no_python is not supported"),
        ("--elastic_training", "--elastic_training is not supported"),
    ],
)
def test_refused(text: str, sentence: str) -> None:
    with pytest.raises((ConfigError, LaunchError), match=sentence):
        asked(text, 2)


def test_a_dry_run_tells_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.touch()
    words = ["deepspeed", "--dry-run", "--num_gpus", "2", "--launcher", "pdsh", str(script), "--deepspeed", "-x", "1"]
    assert main(words) == 0
    said = capsys.readouterr()
    ran = f"shardwise.integrations.deepspeed --local-rank {script} --deepspeed -x 1"
    assert said.out.startswith("2 times: ")
    assert ran in said.out
    assert "--launcher is about other hosts" in said.err
