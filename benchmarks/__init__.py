"""Races against the peers, and a few measurements of single parts. `make bench`, or see docs/benchmarks.md."""
