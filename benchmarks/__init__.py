"""Races against the peers, and a few measurements of single parts. `make bench`, or see docs/benchmarks.md.

They are beside the package, and the peers in an environment on top of the project's: no test can come to need one of
them, and all engines share one torch. Each run is a fresh process under our launcher, because allocator settings and
what an earlier engine left behind change a peak by more than engines differ.
"""
