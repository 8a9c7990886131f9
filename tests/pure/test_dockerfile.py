"""The image, as far as it can be looked at without a daemon."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KNOWN = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "CMD"}


def steps() -> list[tuple[str, str]]:
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(step.split(maxsplit=1)[0], step.split(maxsplit=1)[1]) for step in whole.splitlines() if step.strip()]


def test_instructions_are_docker_s_and_the_base_is_pinned() -> None:
    found = steps()
    assert {name for name, _ in found} <= KNOWN
    (base,) = [words for name, words in found if name == "FROM"]
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", base)
    python = tuple(map(int, base.removeprefix("python:").partition("-")[0].split(".")))
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert python >= tuple(map(int, wanted.removeprefix(">=").split(".")))


def test_what_runs_is_shell_and_what_is_copied_is_there() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for name, words in steps():
        if name == "RUN":
            assert subprocess.run(["sh", "-n"], input=words, text=True, check=False).returncode == 0, words
            assert "apt-get" not in words or "rm -rf /var/lib/apt/lists" in words
        if name == "COPY":
            *sources, target = shlex.split(words)
            assert target.startswith("./")
            for source in sources:
                assert (ROOT / source).exists()
                assert f"!{source}" in ignored


def test_it_does_not_run_as_root() -> None:
    names = [name for name, _ in steps()]
    user = re.search(r"--uid (\d+)", next(words for name, words in steps() if "useradd" in words))
    assert user is not None
    assert dict(steps())["USER"] == f"{user[1]}:{user[1]}"  # by number: Kubernetes' runAsNonRoot knows no names
    assert int(user[1]) > 0
    assert names.index("USER") > max(place for place, name in enumerate(names) if name == "RUN")
    assert dict(steps())["CMD"] == '["shardwise", "doctor"]'


@pytest.mark.parametrize("extra", ["k8s"])
def test_what_the_docs_tell_to_install(extra: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extra in extras
    assert f"shardwise[{extra}]" in (ROOT / "docs/launching.md").read_text().replace("\n", "")
