"""`shardwise report RUN`: writes a run as one HTML page."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.observe.html_report import html_report
from shardwise.observe.run_files import REPORT
from shardwise.observe.run_view import read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run (the key `run` of its plan), or its record.jsonl")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: report.html in RUN)")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path; returns 0."""
    view = read_run(args.run)
    path = args.out or view.folder / REPORT
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, html_report(view), follows_links=args.out is not None)
    except OSError as error:
        why = f"{path} cannot be written: {error.strerror}."
        raise ShardwiseError(f"{why} Give another file with --out FILE.") from error
    print(path)
    return 0


def _write(path: Path, page: str, *, follows_links: bool) -> None:
    """Whoever can write into the folder of a run may put a link or a pipe at the place of its report."""
    never_elsewhere = 0 if follows_links else os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | never_elsewhere, 0o666), "wb") as file:
        file.write(page.encode(errors="replace"))  # a name may have lone surrogates
