"""The Dockerfile by hadolint's rules, and the shell in it by those of ShellCheck, which hadolint includes; and its
steps, carried out in a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from image_steps import Image, StepError, is_ignored

ROOT = Path(__file__).parents[2]
HADOLINT = Path(sys.executable).parent / "hadolint"
needs_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root, who can switch the user, and setpriv"
)


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "--no-color", "-"], input=text, capture_output=True, text=True, check=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="image-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_hadolint_has_nothing_to_say() -> None:
    text = (ROOT / "Dockerfile").read_text()
    done = hadolint(text)
    assert done.returncode == 0, done.stdout + done.stderr
    worse = hadolint(text.replace("USER 1000:1000", "USER root"))
    assert worse.returncode != 0
    assert "DL3002" in worse.stdout  # the last user should not be root


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_steps_install_shardwise_and_its_command_runs_as_its_user(folder: Path) -> None:
    """What is missing in a COPY, a requirement that the constraints rule out, or a home that is root's fails here."""
    image = Image(folder, ROOT, {"VERSION": "7.8.9"})
    image.build((ROOT / "Dockerfile").read_text())
    assert sorted(path.name for path in (folder / "opt/shardwise").iterdir() if path.name != "build") == [
        "LICENSE",
        "README.md",
        "constraints.txt",
        "pyproject.toml",
        "src",
    ]
    (installed,) = (folder / "venv/lib").glob("python3*/site-packages/shardwise")
    assert (installed / "py.typed").exists()
    assert image.run(["shardwise", "--version"]).stdout == "shardwise 7.8.9\n"
    assert image.run(["sh", "-c", "id -u; id -g; echo $HOME; pwd"]).stdout.split() == [
        "1000",
        "1000",
        *[str(folder / "home/ranks")] * 2,
    ]
    assert image.run(["touch", str(folder / "opt/shardwise/README.md")]).returncode != 0
    done = image.run(image.command)
    rows = {line[:20].strip(): line.split() for line in done.stdout.splitlines()}
    checks = {row[0]: row[1] for row in rows.values() if len(row) > 1}
    assert [checks[name] for name in ("python", "torch", "distributed", "loopback", "versions")] == ["ok"] * 5, done
    assert done.returncode in (0, 1)  # this machine may lack something else
    for step, reason in (("RUN exit 3", "RUN exit 3"), ("RUN useradd --no-such-option ranks", "no-such-option")):
        with pytest.raises(StepError, match=reason):
            image.build(step)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("FROM debian:12", "is no image of Python"),
        ("HEALTHCHECK CMD true", "the instruction HEALTHCHECK is not known"),
        ("COPY tests ./tests", "tests: it is not in the build context"),
        ("COPY --from=build src ./src", "is not understood"),
        ("RUN --mount=type=cache pip list", "is not understood"),
        ("USER ranks", "is not by number"),
        ("ARG VERSION", "ARG VERSION has no value"),
    ],
)
def test_a_step_that_is_unknown_or_needs_what_is_not_there(step: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(StepError, match=reason):
        Image(tmp_path, ROOT, {}).build(step)


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("src/shardwise/engine.py", False),
        ("src/shardwise/__pycache__/engine.pyc", True),
        ("__pycache__/a.pyc", True),
        ("README.md", False),
        ("docs/index.md", True),
        ("tests/thorough.py", True),
    ],
)
def test_the_build_context(path: str, ignored: bool) -> None:
    assert is_ignored(PurePosixPath(path), (ROOT / ".dockerignore").read_text().splitlines()) is ignored
