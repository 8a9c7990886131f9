"""How long tests wait for what has to come."""

PATIENCE = 300.0
"""Seconds. It only ends tests that hang: beside other work, a machine may take minutes for what takes it a second.
pytest's own limit (`timeout` in pyproject.toml) is longer, so that a test can say what it waited for."""
