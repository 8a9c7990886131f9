"""The sdist and the wheel that people install: built, checked, installed into a clean environment and used there.

The environment finds the packages of this one, without those that shardwise does not require.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
USE = """
import pathlib, sys, torch, shardwise as sw
assert pathlib.Path(sw.__file__).is_relative_to(sys.prefix), sw.__file__
model = torch.nn.Linear(4, 4)
with sw.shard(model, "zero3", optimizer=torch.optim.AdamW(model.parameters())) as engine:
    engine.backward(engine(torch.randn(2, 4)).square().mean())
    engine.step()
print(sw.__version__)
"""


DECLARED_ONLY = """
import sys
from importlib.machinery import PathFinder

class Declared:
    invalidate_caches = PathFinder.invalidate_caches

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name in {modules} else PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*args, **kwargs):
        found = PathFinder.find_distributions(*args, **kwargs)
        return (one for one in found if one.name.lower().replace("_", "-").replace(".", "-") in {names})

sys.meta_path[:] = [Declared if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both; the wheel is built from the sdist, as installers would."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


def with_all_required(requirements: Iterable[str]) -> set[str]:
    """The names of packages that `requirements` and what they require bring along, as installed here."""
    waiting, known = list(requirements), set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name not in known and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            known.add(name)
            with suppress(PackageNotFoundError):  # an optional part that is not installed here
                waiting += requires(name) or []
    return known


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_clean_environment_can_use_the_wheel(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "clean", cwd=tmp_path)
    python = tmp_path / "clean/bin/python"
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    purelib = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    beneath = [path for path in sys.path if path.endswith("site-packages")]
    declared = run(
        python, "-c", "import importlib.metadata as m; print(*m.requires('shardwise'), sep='\\n')", cwd=tmp_path
    )
    names = {"shardwise", *with_all_required(declared.strip().splitlines())}
    owners = packages_distributions()
    modules = {module for module, its in owners.items() if not names.intersection(map(canonicalize_name, its))}
    (purelib / "declared_only.py").write_text(DECLARED_ONLY.format(modules=modules, names=names))
    (purelib / "dependencies.pth").write_text("\n".join([*beneath, "import declared_only"]))
    assert run(python, "-c", "import importlib.util as u; print(u.find_spec('transformers'))", cwd=tmp_path) == "None\n"
    version = wheel.name.split("-")[1]
    assert run(python, "-c", USE, cwd=tmp_path).strip() == version
    shardwise = tmp_path / "clean/bin/shardwise"
    assert run(shardwise, "--version", cwd=tmp_path).strip() == f"shardwise {version}"
    assert "reduce_scatter" in run(shardwise, "explain", "zero3", "--world", "8", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_in_them(built: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert sources <= in_wheel
    assert "shardwise/py.typed" in in_wheel
    assert any(name.endswith("licenses/LICENSE") for name in in_wheel)
    assert all(name.startswith("shardwise") for name in in_wheel)
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "Makefile", "tests/thorough.py", "docs/plans.md"} <= in_sdist
    assert not [name for name in in_sdist if name.startswith((".venv", "runs"))]
