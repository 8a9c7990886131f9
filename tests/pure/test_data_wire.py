"""What goes to worker processes and back is what it was, and may be written to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.data.worker_wire import packed, unpacked

TENSORS = {
    "float": torch.arange(6.0).view(2, 3),
    "transposed": torch.arange(6).view(2, 3).t(),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "bf16": torch.ones(3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "complex": torch.ones(2, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back(name: str) -> None:
    tensor = TENSORS[name]
    (back,) = unpacked(packed([tensor]))
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)
    back.zero_()
    assert torch.equal(unpacked(packed(tensor)), tensor), "a copy was written to"


def test_a_slice_of_a_large_tensor_travels_alone() -> None:
    assert len(packed(torch.zeros(10**6)[:10])) < 1000


@pytest.mark.parametrize("shape", [(1000, 20), (20, 1000)])
def test_a_mapped_file_is_mapped_again(shape: tuple[int, int], tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.asfortranarray(np.arange(20000).reshape(shape)))
    rows: Any = np.load(tmp_path / "rows.npy", mmap_mode="r")
    message = packed({"rows": rows, "part": rows[3:5]})
    assert len(message) < 40000
    back = unpacked(message)
    assert isinstance(back["rows"], np.memmap)
    assert np.array_equal(back["rows"], rows)
    assert np.array_equal(back["part"], rows[3:5])
