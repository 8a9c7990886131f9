"""Files that people name, or have in a run's folder, and others may have written: bounded, or refused in words."""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.deepspeed_hosts import deepspeed_env
from shardwise.errors import ConfigError, LaunchError
from shardwise.integrations.accelerate_config import read_accelerate_config
from shardwise.integrations.deepspeed.command_line import _slots
from shardwise.integrations.deepspeed.config import load_config
from shardwise.integrations.horovod.command_line_hosts import parse_hosts
from shardwise.launch.places.hosts import parse_host_file
from shardwise.observe.trackers import CSV
from shardwise.system.safe_files import MAX_CONFIG_BYTES, read_config_text

CPU_SECONDS = 5
"""Quadratic time takes minutes for a file of the allowed size."""

READERS: dict[str, Callable[[Path], Any]] = {
    "DeepSpeed's config": load_config,
    "Accelerate's config": read_accelerate_config,
    "DeepSpeed's host file": lambda path: _slots(str(path)),
    "Horovod's host file": lambda path: parse_hosts(None, path),
    "host file": lambda path: parse_host_file(read_config_text(path), str(path)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_of_a_tebibyte_is_refused(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises((ConfigError, LaunchError), match="more than"):
        READERS[reader](path)


@pytest.mark.parametrize("reader", READERS)
def test_bytes_that_are_no_text_are_refused(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xff\xfe\x00slots=1")
    with pytest.raises((ConfigError, LaunchError), match="UTF-8"):
        READERS[reader](path)


@pytest.mark.parametrize(
    "start_and_repeated",
    [
        ("[", "/*\n"),
        ("", "/*"),
        ("[", "'''"),
        ("[", "1 "),
        ("[", '"\\'),
        ("[", "["),
        ("{", '{"a":'),
        ("a", " "),
        ("a", " slots "),
        ("a ", "slots="),
        ("a slots=", "1"),
        ("a:", "9"),
        ("", "a slots=1 # "),
        ("distributed_type: NO\nx: ", "- "),
        ("distributed_type: NO\nx: ", "&a *a "),
    ],
)
@pytest.mark.parametrize("reader", READERS)
def test_hostile_text_is_read_or_refused_in_linear_time(
    reader: str, start_and_repeated: tuple[str, str], tmp_path: Path
) -> None:
    start, repeated = start_and_repeated
    path = tmp_path / "file"
    path.write_text(start + repeated * ((MAX_CONFIG_BYTES - 100) // len(repeated)) + "x")
    began = time.process_time()
    with contextlib.suppress(ConfigError, LaunchError):
        READERS[reader](path)
    assert time.process_time() - began < CPU_SECONDS


def test_many_hosts_are_read_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("".join(f"h{number}\n" for number in range(100_000)))
    began = time.process_time()
    assert len(READERS["host file"](path)) == 100_000
    assert time.process_time() - began < CPU_SECONDS


@pytest.mark.parametrize("count", ["0", "²", "9" * 5000, "-1", "1e3", "٣"])
@pytest.mark.parametrize("reader", ["DeepSpeed's host file", "Horovod's host file", "host file"])
def test_a_number_of_slots_that_is_none(reader: str, count: str, tmp_path: Path) -> None:
    if reader == "DeepSpeed's host file" and count == "0":
        pytest.skip("a job of no ranks is refused when it starts")
    path = tmp_path / "hosts"
    path.write_text(f"localhost slots={count}\n", encoding="utf-8")
    with pytest.raises((ConfigError, LaunchError)):
        READERS[reader](path)


def test_a_config_in_base64_is_read_alike() -> None:
    assert load_config(base64.urlsafe_b64encode(b'{"a": 1}').decode()) == {"a": 1}


def test_variables_for_ranks(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("A=" + "x" * MAX_CONFIG_BYTES)
    with pytest.raises(ConfigError, match="more than"):
        deepspeed_env({"HOME": str(tmp_path), "DS_ENV_FILE": ".deepspeed_env"})


# -- tables of the CSV tracker -----------------------------------------------------------------------------


def link_to_a_table(folder: Path) -> None:
    (folder / "elsewhere.csv").write_text("step,loss\n1,2\n")
    (folder / "metrics.csv").symlink_to(folder / "elsewhere.csv")


TABLES: dict[str, Callable[[Path], object]] = {
    "link": link_to_a_table,
    "pipe": lambda folder: os.mkfifo(folder / "metrics.csv"),
    "folder": lambda folder: (folder / "metrics.csv").mkdir(),
    "one line without an end": lambda folder: (folder / "metrics.csv").write_text("step" + "," * 2**21 + "\n"),
    "a field without an end": lambda folder: (folder / "metrics.csv").write_text('step,"' + "x" * 2**18 + '"\n'),
    "another table": lambda folder: (folder / "metrics.csv").write_text("a,b\n"),
}


@pytest.mark.parametrize("table", TABLES)
def test_what_is_no_table_of_ours_is_left_alone(table: str, tmp_path: Path) -> None:
    TABLES[table](tmp_path)
    with pytest.raises(ConfigError, match="not a table of this tracker"):
        CSV(tmp_path, {}, {})
    if table == "link":
        assert (tmp_path / "elsewhere.csv").read_text() == "step,loss\n1,2\n"


def test_links_that_appear_later_are_not_followed(tmp_path: Path) -> None:
    """A run goes on with a warning: what the tracker raises is an `OSError`."""
    other = tmp_path / "other"
    other.write_text("step,loss\n")
    tracker = CSV(tmp_path, {}, {})
    (tmp_path / "metrics.csv.new").symlink_to(other)
    tracker.begin(0)
    tracker.log(1, {"loss": 2.0})
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,2.0\n"
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "metrics.csv").symlink_to(other)
    with pytest.raises(OSError, match="link"):
        tracker.log(2, {"loss": 3.0})
    assert other.read_text() == "step,loss\n"
