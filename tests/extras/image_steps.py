"""Carries out a Dockerfile without a daemon: in a folder instead of an image, with an environment instead of a base.

What is installed must be in this environment already: pip gets no index, and sees the packages here. Every instruction,
option and form that this does not know is an error, so that nothing is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

USERADD = '#!/bin/sh\nexec {useradd} --prefix "{root}" "$@"\n'
KEEPS_READING = "+dac_read_search"
"""The capability to read what root can read: the interpreter here may be root's alone, unlike an image's."""


class StepError(AssertionError):
    """A step that failed, or is unknown."""


class Image:
    """A folder that is filled like an image. `context` is the folder given to `docker build`."""

    def __init__(self, root: Path, context: Path, build_args: Mapping[str, str]) -> None:
        self.root, self._context, self._build_args = root, context, dict(build_args)
        self._args: dict[str, str] = {}
        self._env: dict[str, str] = {}
        self._workdir = root
        self._user: tuple[int, int] | None = None
        self.command: list[str] = []
        self._instructions: dict[str, Callable[[str], None]] = {
            "FROM": self._from,
            "ARG": self._arg,
            "ENV": self._set_env,
            "WORKDIR": self._enter,
            "COPY": self._copy,
            "RUN": self._run_shell,
            "USER": self._become,
            "CMD": self._keep_command,
        }

    def build(self, dockerfile: str) -> None:
        for name, words in instructions(dockerfile):
            if name not in self._instructions:
                raise StepError(f"the instruction {name} is not known here")
            self._instructions[name](words)
        unused = set(self._build_args) - set(self._args)  # Docker warns of these
        if unused:
            raise StepError(f"no ARG takes {sorted(unused)}")

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command as a container would."""
        found = subprocess.run(
            [*self._as_user(), *command],
            cwd=self._workdir,
            env=self._variables(),
            capture_output=True,
            text=True,
            check=False,
        )
        return subprocess.CompletedProcess(command, found.returncode, found.stdout, found.stderr)

    def _from(self, words: str) -> None:
        """An environment with the packages of this one in the place of the base."""
        if not re.fullmatch(r"python:3\.\d+-slim-\w+", words):
            raise StepError(f"FROM {words} is no image of Python")
        subprocess.run([sys.executable, "-m", "venv", self.root / "venv"], check=True, capture_output=True)
        without = [self.root / "venv/bin/python", "-m", "pip", "uninstall", "--yes", "setuptools"]
        subprocess.run(without, check=True, capture_output=True)  # Python 3.11 adds an old one, an image of 3.12 none
        (purelib,) = (self.root / "venv/lib").glob("python3*/site-packages")
        beneath = [path for path in sys.path if path.endswith("site-packages")]
        (purelib / "beneath.pth").write_text("\n".join(beneath))
        for folder in ("etc", "home", "tmp"):
            (self.root / folder).mkdir()
        (self.root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        (self.root / "etc/group").write_text("root:x:0:\n")
        useradd = shutil.which("useradd", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
        if os.getuid() != 0 or useradd is None:
            raise StepError("useradd is needed, and root to call it")
        shim = self.root / "venv/bin/useradd"  # else it would add a user to this machine
        shim.write_text(USERADD.format(useradd=useradd, root=self.root))
        shim.chmod(0o755)

    def _arg(self, words: str) -> None:
        name, has_default, default = words.partition("=")
        if not has_default and name not in self._build_args:
            raise StepError(f"ARG {name} has no value")
        self._args[name] = self._build_args.get(name, default)

    def _set_env(self, words: str) -> None:
        for word in shlex.split(words):
            name, is_pair, value = word.partition("=")
            if not is_pair or "$" in value:
                raise StepError(f"ENV {word} is not understood")
            self._env[name] = value

    def _enter(self, words: str) -> None:
        if not words.startswith("/"):
            raise StepError(f"WORKDIR {words} is not absolute")
        self._workdir = self.root / words.lstrip("/")
        self._workdir.mkdir(parents=True, exist_ok=True)

    def _copy(self, words: str) -> None:
        *sources, target = shlex.split(words)
        if target.startswith(("/", "--")) or not sources or any(re.search(r"[*?$]|^--|^/", one) for one in sources):
            raise StepError(f"COPY {words} is not understood")
        for source in sources:
            self._copy_one(source, self._workdir / target, target.endswith("/") or len(sources) > 1)

    def _copy_one(self, source: str, target: Path, is_folder: bool) -> None:
        here = self._context / source
        files = [here] if here.is_file() else sorted(path for path in here.rglob("*") if path.is_file())
        kept = [path for path in files if not is_ignored(path.relative_to(self._context), self._ignored())]
        if not kept:
            raise StepError(f"COPY {source}: it is not in the build context")
        for path in kept:
            inside = path.relative_to(here) if here.is_dir() else Path(path.name if is_folder else "")
            (target / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / inside)

    def _ignored(self) -> list[str]:
        lines = (self._context / ".dockerignore").read_text().splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    def _run_shell(self, words: str) -> None:
        if words.startswith(("[", "--")):
            raise StepError(f"RUN {words} is not understood")
        done = self.run(["sh", "-c", words])
        if done.returncode:
            raise StepError(f"RUN {words}\n{done.stdout}{done.stderr}")

    def _become(self, words: str) -> None:
        if not re.fullmatch(r"\d+:\d+", words):
            raise StepError(f"USER {words} is not by number")
        user, group = map(int, words.split(":"))
        self._user = user, group

    def _keep_command(self, words: str) -> None:
        self.command = json.loads(words)

    def _as_user(self) -> list[str]:
        if self._user is None:
            return []
        user, group = self._user
        reads = [f"--inh-caps={KEEPS_READING}", f"--ambient-caps={KEEPS_READING}"]
        return ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", *reads]

    def _variables(self) -> dict[str, str]:
        """A container's variables, and those that keep pip from the network."""
        homes = [line.split(":") for line in (self.root / "etc/passwd").read_text().splitlines()]
        user = 0 if self._user is None else self._user[0]
        (home,) = [fields[5] for fields in homes if int(fields[2]) == user] or ["/"]
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_ROOT_USER_ACTION": "ignore"}
        path = os.pathsep.join([str(self.root / "venv/bin"), "/usr/local/bin", "/usr/bin", "/bin"])
        places = {"PATH": path, "HOME": str(self.root / home.lstrip("/")), "TMPDIR": str(self.root / "tmp")}
        return self._args | self._env | offline | places


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Each instruction's name and the rest of its line, without comments and continuations."""
    lines = [line for line in dockerfile.splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    steps = [step.strip().partition(" ") for step in whole.splitlines() if step.strip()]
    return [(name, words.strip()) for name, _, words in steps]


def is_ignored(path: PurePosixPath | Path, patterns: list[str]) -> bool:
    """Whether the build context leaves a path out: the last pattern that matches it, or a folder above it, decides.

    See https://docs.docker.com/build/concepts/context/#dockerignore-files.
    """
    whole = [path, *path.parents][:-1]
    ignored = False
    for pattern in patterns:
        name = pattern.removeprefix("!").strip("/")
        expression = re.escape(name).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(expression, one.as_posix()) for one in whole):
            ignored = not pattern.startswith("!")
    return ignored
