"""Models that torch.compile's own backend compiles train like their eager twins, in processes: the whole model before
and after `shard`, its blocks before, and units by the plan."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from inductor_rank import PRESETS, WAYS
from launching import launch

from tests.thorough import thorough_only

SCRIPT = Path(__file__).with_name("inductor_rank.py")


@thorough_only(
    "compiles C++, for a minute or two; test_compile.py covers the same code with a backend that only traces"
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles for processors with g++")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_inductor_compiles_trains_like_its_twin(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # and leave nothing in the user's
    done = launch(SCRIPT, num_ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.splitlines()) == sorted(f"{preset} {way}: equal" for preset in PRESETS for way in WAYS)
