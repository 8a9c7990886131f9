"""Command lines of DeepSpeed's launcher."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from shardwise.cli.deepspeed_hosts import deepspeed_env
from shardwise.cli.main import main
from shardwise.errors import ConfigError, LaunchError
from shardwise.integrations.deepspeed.command_line import LocalLaunch, add_options, local_launch, refuse_options


def asked(text: str, num_devices: int) -> LocalLaunch:
    parser = argparse.ArgumentParser()
    add_options(parser)
    args = parser.parse_args([*text.split(), "train.py", "--deepspeed", "--num_gpus", "9"])
    refuse_options(args)
    return local_launch(args, num_devices)


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
def test_options_of_deepspeed_that_are_honoured(
    text: str, num_devices: int, expected: tuple[int | None, tuple[int, ...] | None]
) -> None:
    found = asked(text, num_devices)
    assert ((found.nproc, found.devices), found.notes) == (expected, [])


def test_a_hostfile_of_one_host_counts_ranks(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# mine\n\nlocalhost slots=3\n")
    assert asked(f"--hostfile {file}", 0).nproc == 3
    assert asked(f"-H {file} --exclude localhost:1", 0).nproc == 2
    file.write_text("a slot=2\n")
    with pytest.raises(ConfigError, match="is not a valid line"):
        asked(f"--hostfile {file}", 0)


def test_options_without_effect_are_reported() -> None:
    notes = asked("--launcher pdsh --master_addr 10.0.0.1 --bind_core_list 0-3 --hostfile nowhere", 2).notes
    assert [note.split()[0].rstrip(":") for note in notes] == [
        "--launcher", "--master_addr", "--bind_core_list", "--hostfile",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--num_nodes 2", "--num_nodes 2 needs several hosts.*Give --hostfile"),
        ("--node_rank 1", "starts one of several hosts by hand"),
        ("--include a:0@b:1", "needs several hosts"),
        ("--include localhost:x", "is not a list of devices"),
        ("--exclude localhost", "excludes all 2 devices"),
        ("--include localhost:0 --exclude localhost:1", "--include and --exclude both select devices"),
        ("--include localhost:0 --num_gpus 1", "--num_gpus and --include or --exclude both"),
        ("--no_python", "--no_python is not supported"),
        ("--elastic_training", "--elastic_training is not supported"),
    ],
)
def test_options_of_deepspeed_that_are_refused(text: str, sentence: str) -> None:
    with pytest.raises((ConfigError, LaunchError), match=sentence):
        asked(text, 2)


def test_a_dry_run_prints_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.touch()
    words = ["deepspeed", "--dry-run", "--num_gpus", "2", "--launcher", "pdsh", str(script), "--deepspeed", "-x", "1"]
    assert main(words) == 0
    said = capsys.readouterr()
    ran = f"shardwise.integrations.deepspeed --local-rank {script} --deepspeed -x 1"
    assert said.out.startswith("2 ranks run: ")
    assert ran in said.out
    assert "--launcher has no effect" in said.err


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In an empty folder that is the home too: a script, and a file of three hosts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    (tmp_path / "train.py").touch()
    file = tmp_path / "hosts"
    file.write_text("gpu1 slots=2\ngpu2 slots=4  # the new one\ngpu3 slots=2\n")
    return file


def dry(*words: str) -> int:
    return main(["deepspeed", "--dry-run", *words, "train.py", "--deepspeed"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["ranks 0 to 1 on gpu1:", "ranks 2 to 5 on gpu2:", "ranks 6 to 7 on gpu3:"]),
        ("--num_nodes 2 --launcher pdsh", ["ranks 0 to 1 on gpu1:", "ranks 2 to 5 on gpu2:"]),
        ("--num_nodes=2 --num_gpus=1", ["rank 0 on gpu1:", "rank 1 on gpu2:"]),
        ("--include gpu1@gpu2:0,3", ["ranks 0 to 1 on gpu1:", "ranks 2 to 3 on gpu2, devices 0, 3:"]),
        ("--exclude gpu1@gpu2", ["ranks 0 to 1 on gpu3:"]),
    ],
)
def test_hosts_of_a_file_are_reached_by_ssh(
    text: str, expected: list[str], hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry("-H", "hosts", *text.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("rank")] == expected
    assert lines[-1].endswith("-m shardwise.integrations.deepspeed --local-rank train.py --deepspeed")


def test_ports_addresses_and_variables_go_along(hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("home").mkdir()
    Path("home/.deepspeed_env").write_text("DATA_ROOT=/far\nTOKEN=a=b\n")
    Path(".deepspeed_env").write_text("# here\nDATA_ROOT=/data\n")
    text = "--hostfile hosts --master_addr 10.0.0.1 --master_port 29501 --ssh_port 2222 --launcher ssh --no_local_rank"
    assert dry(*text.split(), "--launcher_args=-J gateway") == 0
    said = capsys.readouterr()
    assert "rendezvous: 10.0.0.1, port 29501" in said.out
    line = next(line for line in said.out.splitlines() if line.startswith("with the variables"))
    assert {"DATA_ROOT", "TOKEN"} <= set(line.removeprefix("with the variables ").split(", "))
    assert "-p 2222 -J gateway gpu1" in said.out
    assert "--local-rank" not in said.out
    assert said.err == ""
    assert deepspeed_env() == {"DATA_ROOT": "/data", "TOKEN": "a=b"}
    Path(".deepspeed_env").write_text("export A\n")
    assert dry("--hostfile", "hosts") == 2
    assert ".deepspeed_env, line 1: write NAME=VALUE" in capsys.readouterr().err


def test_mpirun_of_a_family_is_taken(hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry("--hostfile", "hosts", "--launcher", "OpenMPI", "--master_addr", "10.0.0.1") == 0
    said = capsys.readouterr()
    assert "mpirun" in said.out
    assert "--master_addr is for ssh" in said.err


def test_a_hostfile_that_is_not_text_is_refused(hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended the command with a traceback of UnicodeDecodeError."""
    hosts.write_bytes(b"gpu\xe9 slots=2\ngpu2 slots=2\n")
    assert dry("--hostfile", "hosts") == 2
    assert capsys.readouterr().err == "shardwise: hosts is not a text file: byte 3 is not UTF-8.\n"


def test_one_host_of_a_file_only_by_force(hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts.write_text("gpu1 slots=2\n")
    assert dry("--hostfile", "hosts") == 0
    assert capsys.readouterr().out.startswith("2 ranks run: ")
    assert dry("--hostfile", "hosts", "--force_multi") == 0
    assert "ranks 0 to 1 on gpu1:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "--launcher slurm",
            "--launcher slurm is not supported for the hosts of a file. Use `shardwise launch --where slurm`",
        ),
        ("--launcher mvapich", "Use one of impi, mpich, openmpi, pdsh, ssh."),
        ("--num_gpus 1 --include gpu1", "both select devices. Use only one of them"),
        ("--include gpu4", "which is not in the host list"),
        ("--num_nodes 4", "--nodes is 4, but 3 hosts are named"),
        ("--node_rank 1", "starts one of several hosts by hand"),
        ("--autotuning run", "--autotuning is for ranks of one host"),
    ],
)
def test_refused_for_hosts_of_a_file(text: str, sentence: str, hosts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry("--hostfile", "hosts", *text.split()) == 2
    assert sentence in capsys.readouterr().err
