"""A connection that ends while a large message is on its way, of which gloo tells nobody."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

import warm
from tests.faults import mid_transfer
from tests.patience import PATIENCE


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_ranks_in_the_middle_of_a_message_hear_that_the_other_end_is_gone(how: str, tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)
    command = [warm.python(), mid_transfer.__file__]
    ranks = [subprocess.Popen([*command, str(rank), port, str(tmp_path), how]) for rank in range(3)]
    try:
        for rank in (0, 2):
            assert ranks[rank].wait(PATIENCE) == 0
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    for rank in (0, 2):
        said = (tmp_path / f"fault-{rank}").read_text()
        assert ("Rank 1 is gone" if how == "killed" else "Ranks 0 and 1 could not reach each other") in said
