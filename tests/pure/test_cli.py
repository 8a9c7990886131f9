"""`shardwise COMMAND`: commands, error messages, exit statuses, and that help imports nothing large."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shardwise
from shardwise.cli.main import COMMANDS, main
from shardwise.errors import ConfigError
from tests.patience import PATIENCE

HEAVY = {"torch", "numpy", "pydantic", "yaml", "rich", "psutil"}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Add a command `try` to the table, whose `run` is given."""

    def add(run: Any) -> None:
        module = ModuleType("shardwise_try")
        module.add_arguments = lambda parser: parser.add_argument("number", type=int)  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "shardwise_try", module)
        monkeypatch.setitem(COMMANDS, "try", ("shardwise_try", "try something"))

    return add


def test_a_command_gets_its_arguments_and_gives_the_status(command: Any) -> None:
    command(lambda args: args.number)
    assert main(["try", "7"]) == 7


def test_a_command_has_its_own_help(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(lambda args: 0)
    assert main(["try", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: shardwise try [-h] number")
    assert "Try something." in out


def test_a_wrong_argument_is_a_usage_error(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(lambda args: 0)
    assert main(["try", "x"]) == 2
    assert "invalid int value: 'x'" in capsys.readouterr().err


def _refuse(args: object) -> int:
    raise ConfigError("plan.yaml:7: no.\nplan.yaml:8: no.")


def test_our_errors_are_printed_without_a_traceback(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARDWISE_TRACEBACK", raising=False)
    command(_refuse)
    assert main(["try", "1"]) == 2
    assert capsys.readouterr().err == "shardwise: plan.yaml:7: no.\nplan.yaml:8: no.\n"


def test_the_variable_shows_the_traceback(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_TRACEBACK", "1")
    command(_refuse)
    assert main(["try", "1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "in _refuse" in err
    assert err.endswith("shardwise: plan.yaml:7: no.\nplan.yaml:8: no.\n")


def test_other_errors_keep_their_traceback(command: Any) -> None:
    def run(args: object) -> int:
        raise KeyError("a defect")

    command(run)
    with pytest.raises(KeyError):
        main(["try", "1"])


def test_an_interrupt_is_130(command: Any) -> None:
    def run(args: object) -> int:
        raise KeyboardInterrupt

    command(run)
    assert main(["try", "1"]) == 130


def test_a_message_given_to_sys_exit_is_printed_and_fails(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a model's script that ends: it was silent, and the status was 0."""

    def run(args: object) -> int:
        sys.exit("no weights here")

    command(run)
    assert main(["try", "1"]) == 1
    assert capsys.readouterr().err == "no weights here\n"


def test_an_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lanch", "--nproc", "2"]) == 2
    err = capsys.readouterr().err
    assert err == "shardwise: there is no command 'lanch'. Did you mean 'launch'? See shardwise --help.\n"


def test_version_help_and_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardwise {shardwise.__version__}\n"
    assert main(["-h"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: shardwise")
    assert main(["--verson", "doctor"]) == 2
    assert "unrecognized arguments: --verson doctor. Did you mean '--version'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "zero3", "--wrld", "2"], "unrecognized arguments: --wrld 2. Did you mean '--world'?"),
        (["explain", "zero3", "--wrld=2"], "Did you mean '--world'?"),
        (["launch", "--npoc", "2", "train.py"], "Did you mean '--nproc'?"),
        (["explain", "zero3", "zero2"], "unrecognized arguments: zero2\n"),
        (["explain", "zero3", "--set", "mesh=dp:2", "mesh=tp:2"], "mesh=tp:2. Put a value with braces or spaces in"),
        (["launch", "--where", "slurn", "train.py"], "argument --where: there is no 'slurn'. Did you mean 'slurm'?"),
        (
            ["launch", "--bind", "core", "train.py"],
            "argument --bind/--numa-binding: there is no 'core'. Did you mean 'cores'?",
        ),
        (["launch", "--kind", "x", "train.py"], "there is no 'x'. Known: job, jobset, trainjob."),
        (["launch", "--profile", "12:10", "train.py"], "--profile 12:10: give the first and the last step"),
    ],
)
def test_an_unknown_option_or_choice_gets_the_nearest(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    """Not by the clock, which is unfair on a busy machine, but by what is imported."""
    probe = (
        "import sys, runpy\n"
        "sys.argv = ['shardwise', '--help']\n"
        "try:\n    runpy.run_module('shardwise', run_name='__main__', alter_sys=False)\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "print('imported:', *sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=PATIENCE, check=True)
    shown, _, imported = done.stdout.partition("imported: ")
    assert shown.startswith("usage: shardwise")
    assert not HEAVY & set(imported.split())


def test_help_of_no_command_imports_torch() -> None:
    probe = (
        "import sys\n"
        "from shardwise.cli.bench import OF_THIS_MACHINE\n"
        "from shardwise.cli.main import COMMANDS, main\n"
        "for words in [*([name] for name in COMMANDS), *(['bench', name] for name in OF_THIS_MACHINE)]:\n"
        "    assert main([*words, '--help']) == 0, words\n"
        "    assert not {'torch', 'numpy', 'transformers'} & sys.modules.keys(), words\n"
    )
    subprocess.run([sys.executable, "-c", probe], capture_output=True, timeout=PATIENCE, check=True)


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardwise", "nosuch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("shardwise: there is no command 'nosuch'.")


@pytest.mark.parametrize(
    "arguments", [(), ("explain", "--list"), ("explain", "zero3", "--world", "4", "--json"), ("explain", "x")]
)
def test_a_reader_that_has_gone_ends_it_quietly(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """As in `shardwise explain ... | head -1`, or with `2>&1` in it: the status is that of SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    with (tmp_path / "said").open("w") as said:
        stderr = writer if arguments[-1:] == ("x",) else said
        command = [sys.executable, "-m", "shardwise", *arguments]
        done = subprocess.run(command, stdout=writer, stderr=stderr, timeout=PATIENCE, check=False)
    os.close(writer)
    assert (done.returncode, (tmp_path / "said").read_text()) == (141, "")


def test_another_broken_pipe_stays_a_traceback(command: Any) -> None:
    def run(args: object) -> int:
        raise BrokenPipeError("a defect")

    command(run)
    with pytest.raises(BrokenPipeError, match="a defect"):
        main(["try", "1"])
