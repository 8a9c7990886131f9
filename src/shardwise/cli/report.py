"""`shardwise report RUN`: writes a run as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.monitor.html_report import html_report
from shardwise.monitor.run_view import read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run (the key `run` of its plan), or its record.jsonl")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: report.html in RUN)")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path; returns 0."""
    view = read_run(args.run)
    path = args.out or view.folder / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html_report(view), encoding="utf-8", errors="replace")  # a name may have lone surrogates
    except OSError as error:
        why = f"{path} cannot be written: {error.strerror}."
        raise ShardwiseError(f"{why} Give another file with --out FILE.") from error
    print(path)
    return 0
