"""What a process on a CPU takes from its heap, which does not return it.

[Note: the heap does not shrink] Under the launcher's settings glibc takes blocks below `HEAP_BLOCK_BYTES` from one
heap, and larger ones from the system, to which they return. The heap can return nothing below a live block, and there
always is one near its top: it stays as large as it has been. A GPT of 34 M parameters in bf16, whose blocks of
activations have 512 KiB, held 57 MiB of free heap at the end of its backward, beside all of its gradients; in fp32,
with blocks of 1 MiB, none.
"""

from __future__ import annotations

HEAP_BLOCK_BYTES = 1_000_000


def heap_bytes(num_bytes: int) -> int:
    """Those of a block of `num_bytes` that come from the heap: all or none."""
    return num_bytes if num_bytes < HEAP_BLOCK_BYTES else 0
