"""A child that a rank forks is no rank: what it does with an engine is refused, and the rank goes on."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from shardwise.comm import Journal
from shardwise.comm.group import Group
from shardwise.errors import StateError


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_child_is_refused_and_the_rank_goes_on(is_elastic: bool) -> None:
    journal = Journal(3)
    journal.is_elastic = is_elastic
    journal.enter("exchange", Group("world", (0, 3), 1), 1, torch.uint8, "a test")
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own about threads: the child calls nothing that they could hold
        child = os.fork()
    if not child:
        for ask in (journal.require_usable, journal.check):
            try:
                ask()
            except StateError as error:
                os.write(writing, f"{error}\n".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        said = pipe.read().splitlines()
    assert len(said) == 2
    assert all("forked from rank 3" in line for line in said)
    journal.require_usable()
    journal.check()
