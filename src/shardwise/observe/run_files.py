"""Names of what a run has in its folder."""

from __future__ import annotations

RECORD, TABLE, TIMELINE = "record.jsonl", "metrics.csv", "timeline.json"
PREDICTED, PROGRAM, REPORT = "predicted.json", "program.txt", "report.html"
FILES = (RECORD, TABLE, TIMELINE, PREDICTED, PROGRAM, REPORT)
FOLDERS = ("tensorboard", "profile")
"""W&B, MLflow, Comet and trackio tell runs of one folder apart."""
NOTES = "notes-rank-*.jsonl"
