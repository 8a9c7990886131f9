"""Names in the pages are there: what code calls on an engine, a world and its membership, with which arguments; and the
keys of a plan are all on the page that lists them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import shardwise as sw
from shardwise.comm.regrouping import Membership, Regrouped
from shardwise.plan.describe import schema_table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS_ENGINES = {"deepspeed.md", "deepspeed-names.md"}
"""Pages on which `engine` is DeepSpeed's."""
CALL = re.compile(r"\b(engine|world|membership|sw(?:\.data|\.optim|\.World)?)\.(\w+)\(((?:[^()]|\([^()]*\))*)\)")
NESTED = re.compile(r"\([^()]*\)|\[[^\]]*\]|\{[^}]*\}")
KEYWORD = re.compile(r"(?:^|,)\s*([a-z_]\w*)\s*=(?!=)")
OWNERS: dict[str, Any] = {
    "engine": sw.Engine,
    "world": sw.World,
    "membership": Membership,
    "sw": sw,
    "sw.data": sw.data,
    "sw.optim": sw.optim,
    "sw.World": sw.World,
}


def test_what_code_calls_is_there_and_takes_these_arguments() -> None:
    assert {page.name: wrong for page in PAGES if (wrong := wrong_in(page))} == {}


def wrong_in(page: Path) -> list[str]:
    """The calls of a page that cannot be made so."""
    wrong = []
    for owner, name, arguments in CALL.findall(page.read_text()):
        if owner == "engine" and (page.name in OTHERS_ENGINES or name == "module"):  # the model itself
            continue
        called = getattr(OWNERS[owner], name, None)
        if called is None:
            wrong.append(f"{owner}.{name}")
            continue
        taken = inspect.signature(called).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
            given = KEYWORD.findall(NESTED.sub("", arguments))
            wrong += [f"{owner}.{name}({key}=)" for key in given if key not in {parameter.name for parameter in taken}]
    return wrong


def test_a_loop_over_a_world_reads_what_a_regrouping_has() -> None:
    page = (ROOT / "docs" / "elastic.md").read_text()
    _, section = page.split("## A loop of your own over a world")
    read = set(re.findall(r"`?found\.(\w+)", section))
    assert {"world", "origins", "lost", "reports"} == read == set(Regrouped.__dataclass_fields__)


def test_the_page_of_all_keys_has_all_keys() -> None:
    page = (ROOT / "docs" / "plans.md").read_text()
    listed = set(re.findall(r"^(?:# )?(\w+):", page.split("## All keys")[1].split("```")[1], re.MULTILINE))
    assert {path.partition(".")[0] for path, _, _ in schema_table()} == listed


def test_the_page_of_a_run_has_every_kind_of_line() -> None:
    """Of the record: those that a run writes itself, and that of an elastic job's launcher."""
    source = "".join(path.read_text() for path in (ROOT / "src" / "shardwise").rglob("*.py"))
    written = set(re.findall(r"\b_?record\.write\(\s*\"(\w+)\"", source)) | {"run", "resume", "step", "fault"}
    assert {"stragglers", "memory", "end"} <= written
    rows = (ROOT / "docs" / "seeing.md").read_text().split("| `kind` of a line |")[1].split("\n\n")[0]
    listed = {kind for row in rows.splitlines() for kind in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}
    assert written <= listed
