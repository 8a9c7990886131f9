"""How fast this processor multiplies in bf16.

A processor without bf16 instructions converts each element before it multiplies. Compared with fp32, a product of
matrices in bf16 took 45 times as long with AVX2, 5 times with AVX-512 alone, 1.7 times with its bf16, and 0.2 times
with AMX (torch 2.13). The flags of a processor do not tell it: oneDNN may be told to use fewer (ONEDNN_MAX_CPU_ISA). So
it is measured.
"""

from __future__ import annotations

import functools
import threading
import time

import torch

_SIZE = 256
_SECONDS = 0.02
_alone = threading.Lock()


@functools.cache
def bf16_ratio() -> float:
    """How many times as long as in fp32 a product of matrices takes in bf16 on this processor. Takes 0.1 s at most on
    those that are slow at it.

    Counts this thread's own time, without helpers, for which it would wait, and takes the shortest of several tries, so
    that a loaded machine gives the same.
    """
    with _alone:  # ranks may be threads, and the number of threads is the process's
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            fp32, bf16 = (_seconds(dtype) for dtype in (torch.float32, torch.bfloat16))
        finally:
            torch.set_num_threads(num_threads)
    return bf16 / fp32


def _seconds(dtype: torch.dtype) -> float:
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype, device="cpu")
    times: list[float] = []
    with torch.no_grad():
        matrix @ matrix  # prepares kernels
        while len(times) < 2 or sum(times) < _SECONDS:
            started = time.thread_time()
            matrix @ matrix
            times.append(max(time.thread_time() - started, 1e-6))
    return min(times)
