"""What tests draw without a seed of their own depends on no other test, fixture or example."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


FIRST = (
    float(torch.rand((), generator=torch.Generator().manual_seed(0))),
    random.Random(0).random(),
    float(np.random.RandomState(0).rand()),
)


@pytest.fixture(scope="module", params=["one", "other"])
def of_several_tests() -> tuple[float, float, float]:
    return drawn()


@pytest.mark.parametrize("number", [1, 2])
def test_tests_and_fixtures_draw_the_same(number: int, of_several_tests: tuple[float, float, float]) -> None:
    torch.rand(number)
    assert of_several_tests == FIRST


@pytest.mark.parametrize("number", [1, 2])
def test_each_begins_anew(number: int) -> None:
    assert drawn() == FIRST
    torch.rand(number)


@given(st.integers(1, 3))
def test_examples_do_too(number: int) -> None:
    assert drawn() == FIRST
    torch.rand(number)
