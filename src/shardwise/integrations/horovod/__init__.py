"""Scripts written for Horovod: `import shardwise.integrations.horovod.torch as hvd`. Horovod itself is not needed.

`torch` has Horovod's whole public surface for PyTorch; `numpy`, `jax`, `tensorflow` and `keras` the same collectives
for arrays of theirs. docs/horovod.md has both sides beside each other.

[Note: in any order] Ranks issue collectives by name, each in an order of its own. A rank tells the coordinator, a
thread of rank 0, what it has issued (`session.py`, `links.py`); the coordinator finds what all ranks have issued, or
what they contradict each other about (`matching.py`), and tells the ranks what to carry out, which makes one order for
all of them. A thread of each rank carries it out (`executor.py`), by the collectives of `sw.World` (`exchanges.py`).
Small all-reduces that are ready at the same time go as one message: while one is on its way, others collect.
"""
