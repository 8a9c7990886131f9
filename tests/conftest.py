"""Settings that every test shares."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import settings

from tests.thorough import divided

torch.set_num_threads(1)
settings.register_profile("busy", deadline=None)  # a machine that does other things must not fail a test
settings.load_profile("busy")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to `make thorough` what is its part, unless tests were named one by one."""
    if any("::" in argument for argument in config.args):
        return
    items[:], later = divided(items)
    config.hook.pytest_deselected(items=later)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is imported by now stays: the search for garbage need not go through it again and again."""
    gc.collect()
    gc.freeze()
