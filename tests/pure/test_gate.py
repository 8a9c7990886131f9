"""What continuous integration runs after `make test`, by what has changed."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest, gate
from tests.gate import Check, changed_paths, checks, passes, share_until

ROOT = Path(__file__).parents[2]
TESTS = {
    "tests/ranks/twins.py": "",
    "tests/ranks/pairs.py": "from twins import train",
    "tests/ranks/test_pipeline.py": "from tests.thorough import sampled",
    "tests/ranks/test_pipeline_memory.py": "import pairs\nfrom tests.thorough import thorough_only",
    "tests/ranks/test_late_early.py": "from twins import train\nfrom tests.thorough import varies",
    "tests/ranks/test_comm.py": "make test runs all of it",
    "tests/extras/test_trainer.py": "",
    "tests/extras/test_zoo.py": "",
    "tests/cluster/test_launch_ssh.py": "",
}
PIPELINE = Check("thorough", ("tests/ranks/test_pipeline.py", "tests/ranks/test_pipeline_memory.py"))
EVERY_PLAN = [
    Check("thorough", ("tests/ranks/test_late_early.py",)),
    Check("extras", ("tests/extras/test_trainer.py",)),
    Check("zoo", ("tests/extras/test_zoo.py",)),
]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["CHANGELOG.md"], []),
        (["src/shardwise/parallel/pipeline/schedule.py"], [PIPELINE]),
        (["src/shardwise/launch/job.py"], [Check("test-cluster", ("tests/cluster/test_launch_ssh.py",))]),
        (["src/shardwise/sharded/sharding.py"], EVERY_PLAN),
        (["src/shardwise/py.typed"], EVERY_PLAN),  # no line of its own
        (["a_new_folder/x.py"], EVERY_PLAN),
        (["tests/ranks/test_comm.py"], []),
        (["tests/ranks/test_pipeline.py"], [Check("thorough", ("tests/ranks/test_pipeline.py",))]),
    ],
)
def test_what_a_change_touches(changed: list[str], expected: list[Check]) -> None:
    assert checks(changed, TESTS) == expected


def test_what_is_changed_itself_is_first_and_what_only_uses_a_changed_helper_last() -> None:
    changed = ["tests/ranks/twins.py", "src/shardwise/launch/job.py", "tests/ranks/test_pipeline.py"]
    assert checks(changed, TESTS) == [
        Check("thorough", ("tests/ranks/test_pipeline.py",)),
        Check("test-cluster", ("tests/cluster/test_launch_ssh.py",)),
        Check("thorough", ("tests/ranks/test_late_early.py", "tests/ranks/test_pipeline_memory.py")),  # by pairs.py
    ]


def test_all_where_nothing_is_known_of_a_change() -> None:
    files = {path for check in checks(None, TESTS) for path in check.files}
    assert files == {path for path in TESTS if "/test_" in path} - {"tests/ranks/test_comm.py"}


def test_the_table_names_what_there_is() -> None:
    tests = [str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")]
    for beginning, patterns in gate.TOUCHES.items():
        assert list(ROOT.glob(f"{beginning}*")) or (ROOT / beginning).exists(), beginning
        for pattern in patterns:
            assert any(fnmatch(test, pattern) for test in tests), (beginning, pattern)


def test_every_room_of_the_package_has_a_line_and_every_folder_of_tests_a_target() -> None:
    package = ROOT / "src/shardwise"
    rooms = [path.name for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    lines = [one.removeprefix("src/shardwise/") for one in gate.TOUCHES]
    without = [
        name for name in rooms if not name.startswith("__") and not any(map(name.startswith, filter(None, lines)))
    ]
    assert [name for name in without if f"{name}/" not in lines] == []
    makefile = (ROOT / "Makefile").read_text()
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert [name for name in sorted(folders) if f"tests/{name}" not in makefile] == []


@pytest.mark.parametrize(
    ("origin", "landed", "expected"),
    [
        ("point", "older", (["a.py", "b.py"], "since point (origin/main)")),
        ("head", "older", (["a.py", "b.py"], "since older (.ci/landed)")),  # main itself
        ("", "older", (["a.py", "b.py"], "since older (.ci/landed)")),
        ("head", "", (None, "unknown")),
        ("", "unheard", (None, "unknown")),  # a shallow clone
    ],
)
def test_since_when_a_change_is(origin: str, landed: str, expected: tuple[list[str] | None, str]) -> None:
    def git(*words: str) -> str:
        answers = {
            ("rev-parse", "HEAD"): "head",
            ("merge-base", "HEAD", "origin/main"): origin,
            ("merge-base", "HEAD", "older"): "older",
            ("diff", "--name-only", "--no-renames", expected[1].split(" ")[1] if expected[0] else ""): "a.py\nb.py",
        }
        return answers.get(words, "")

    paths, since = changed_paths(git, landed)
    assert paths == expected[0]
    assert since.startswith(expected[1])


def test_what_fails_is_run_once_more_alone_and_that_is_said() -> None:
    check, said = Check("thorough", ("a.py", "b.py")), list[str]()
    ran: list[list[str]] = []

    def run(command: list[str], statuses: list[bool]) -> bool:
        ran.append(command)
        return statuses.pop(0)

    assert passes(check, lambda command: run(command, [True]), said, "TESTS_UNTIL=5")
    assert (ran, said) == ([["make", "thorough", "TESTS=a.py b.py", "TESTS_UNTIL=5"]], [])
    statuses = [False, True]
    assert passes(check, lambda command: run(command, statuses), said, "TESTS_UNTIL=5")
    assert ran[-1] == ["make", "thorough", "TESTS=a.py b.py", "AGAIN=1"]
    assert said == ["make thorough: a test failed beside others and passed alone; see its output above."]
    statuses = [False, False]
    assert not passes(check, lambda command: run(command, statuses), said)


def test_each_part_has_half_of_the_time_that_is_left_and_the_last_one_all() -> None:
    assert share_until(100, 400, 3) == 250
    assert share_until(150, 400, 2) == 275  # what one leaves, the others have
    assert share_until(300, 400, 1) == 400
    assert share_until(500, 400, 2) == 500


def test_no_test_begins_after_the_time_and_what_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    conftest.pytest_runtest_setup()
    monkeypatch.setattr(conftest, "UNTIL", 5.0)
    with pytest.raises(pytest.skip.Exception, match=conftest.NO_TIME) as skipped:
        conftest.pytest_runtest_setup()

    def report(nodeid: str, why: str) -> SimpleNamespace:
        return SimpleNamespace(nodeid=nodeid, longrepr=("conftest.py", 1, why))

    why, lines = f"Skipped: {skipped.value}", list[str]()
    reports = [report("a.py::x", why), report("b.py::x", why), report("b.py::y[1]", why), report("c.py::z", "no GPU")]
    conftest.pytest_terminal_summary(SimpleNamespace(stats={"skipped": reports}, line=lines.append))  # type: ignore[arg-type]
    assert lines == ["Left out, as there was no time: 1 of a.py", "Left out, as there was no time: 2 of b.py"]
