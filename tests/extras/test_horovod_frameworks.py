"""Numpy, JAX, TensorFlow and Keras on every backend: collectives, their gradients, and a loop compared with whole
batches."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# Not imported while tests are collected: triton, which files behind this one import, aborts beside tensorflow.
for name in ("tensorflow", "jax"):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"could not import {name!r}", allow_module_level=True)

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_loops_equal_those_on_whole_batches(tmp_path: Path) -> None:
    """A failed assertion in a job is returned as the text of its traceback."""
    import horovod_jobs as jobs

    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "horovod_ranks.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results.pop("numpy") == [None, None]
    assert results.pop("the page") == [None, None]
    losses, weights = jobs.plain_losses()
    for job, ranks in results.items():
        for rank in ranks:
            assert isinstance(rank, dict), f"{job}: {rank}"
            expected = [float(np.mean(losses))] if job.startswith("keras") else losses
            np.testing.assert_allclose(rank["losses"], expected, rtol=1e-5, err_msg=job)
            np.testing.assert_allclose(rank["weights"], weights, rtol=1e-5, atol=1e-6, err_msg=job)
