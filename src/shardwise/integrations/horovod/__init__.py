"""Horovod's API: `import shardwise.integrations.horovod.torch as hvd`. Horovod itself is not needed.

`torch` has Horovod's complete public API for PyTorch; `numpy`, `jax`, `tensorflow` and `keras` have the same
collectives for their arrays. `basics` is the part that all of them share. docs/horovod.md lists the equivalents.

[Note: negotiation] Ranks issue named collectives, each rank in its own order. Each rank sends a request to the
coordinator, a thread of rank 0 (`session.py`, `links.py`). When all ranks have issued a collective, the coordinator
checks that their requests agree (`negotiation.py`, `mismatches.py`) and sends a response, in the same order to all
ranks. A thread in each rank executes the responses (`executor.py`), with collectives of `sw.World` (`collectives.py`).
All-reduces that are ready at the same time are fused: while one is executed, others accumulate.

In Horovod's cycles all ranks ask each other every millisecond what is new. Here messages are sent only when needed, and
no thread wakes up for nothing.
"""
