"""Operators that are called at once on the meta device find what torch's own fake mode finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shardwise.runtime.rehearsal.fake_mode import DIRECT, FakeMode
from shardwise.runtime.rehearsal.integers import NO_LARGER, Integers
from shardwise.system.torch_private import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    storage_id,
    tree_leaves,
)

aten = torch.ops.aten
CPU = torch.device("cpu")
SQUARE, WIDE, TURNED, HALF = "square", "wide", "turned", "half"
LINE, ROW, BATCH, SINGLE = "line", "row", "batch", "single"
HEADS, SUMS, NUMBER, PLACES, NUMBERS, MASK = "heads", "sums", "number", "places", "numbers", "mask"
PART, HALVES, POSITIONS, SPREAD, IMAGE, ALONE = "part", "halves", "positions", "spread", "image", "alone"
"""Tensors of `given`."""
CALLS: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    aten.alias.default: ((WIDE,), {}),
    aten.as_strided.default: ((WIDE, (2, 3), (1, 2), 1), {}),
    aten.detach.default: ((WIDE,), {}),
    aten.expand.default: ((LINE, (3, 4)), {}),
    aten.permute.default: ((BATCH, (2, 0, 1)), {}),
    aten.slice.Tensor: ((WIDE, 1, 2, 5), {}),
    aten.split.Tensor: ((WIDE, 4, 1), {}),
    aten.split_with_sizes.default: ((WIDE, (1, 5), 1), {}),
    aten.squeeze.dim: ((BATCH, 1), {}),
    aten.t.default: ((WIDE,), {}),
    aten.transpose.int: ((BATCH, 0, 2), {}),
    aten.unbind.int: ((WIDE,), {}),
    aten.unsqueeze.default: ((LINE, 0), {}),
    aten.view.default: ((WIDE, (3, 2, -1)), {}),
    aten._unsafe_view.default: ((WIDE, (2, 12)), {}),
    aten.add.Tensor: ((WIDE, ROW), {"alpha": 2}),
    aten.add_.Tensor: ((WIDE, ROW), {}),
    aten.addmm.default: ((LINE, SQUARE, SQUARE), {}),
    aten.baddbmm.default: ((BATCH, SINGLE, BATCH), {}),
    aten.bmm.default: ((SINGLE, BATCH), {}),
    aten.cat.default: (([WIDE, WIDE], 1), {}),
    aten.clone.default: ((TURNED,), {"memory_format": torch.contiguous_format}),
    aten.gelu_backward.default: ((TURNED, TURNED), {}),
    aten.silu_backward.default: ((TURNED, TURNED), {}),
    aten.slice_backward.default: ((SQUARE, (4, 6), 1, 1, 5, 1), {}),
    aten.mul.Scalar: ((WIDE, 2), {}),
    aten.div.Scalar: ((HALF, 3.0), {}),
    aten.new_empty.default: ((WIDE, (2, 3)), {"dtype": torch.bfloat16, "device": CPU}),
    aten.new_zeros.default: ((WIDE, (2, 3)), {}),
    aten.empty.memory_format: (((2, 3),), {"dtype": torch.bfloat16, "device": CPU}),
    aten.empty_strided.default: (((2, 3), (1, 2)), {"device": CPU, "pin_memory": False}),
    aten._scaled_dot_product_flash_attention_for_cpu.default: ((HEADS, HEADS, HEADS), {"is_causal": True}),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        (HEADS, HEADS, HEADS, HEADS, HEADS, SUMS, 0.0, True),
        {},
    ),
    aten.cos.default: ((TURNED,), {}),
    aten.div.Tensor: ((WIDE, ROW), {}),
    aten.exp.default: ((TURNED,), {}),
    aten.gelu.default: ((TURNED,), {}),
    aten.mean.dim: ((WIDE, [-1], True), {}),
    aten.mm.default: ((SQUARE, WIDE), {}),
    aten.mul.Tensor: ((HALF, WIDE), {}),
    aten.mul_.Tensor: ((WIDE, 2), {}),
    aten.neg.default: ((TURNED,), {}),
    aten.pow.Tensor_Scalar: ((HALF, 2), {}),
    aten.relu.default: ((TURNED,), {}),
    aten.rsqrt.default: ((WIDE,), {}),
    aten.sigmoid.default: ((WIDE,), {}),
    aten.silu.default: ((TURNED,), {}),
    aten.sin.default: ((TURNED,), {}),
    aten.sub.Tensor: ((WIDE, HALF), {}),
    aten.sum.default: ((WIDE,), {}),
    aten.sum.dim_IntList: ((HALF, [0]), {"dtype": torch.float32}),
    aten.tanh.default: ((WIDE,), {}),
    aten._log_softmax.default: ((WIDE, 1, False), {}),
    aten._log_softmax_backward_data.default: ((WIDE, WIDE, 1, torch.float32), {}),
    aten._softmax.default: ((HALF, 1, False), {}),
    aten._softmax_backward_data.default: ((HALF, HALF, 1, torch.bfloat16), {}),
    aten.arange.default: ((5,), {"device": CPU, "pin_memory": False}),
    aten.arange.start_step: ((1, 9, 2), {"dtype": torch.int32, "device": CPU}),
    aten.cumsum.default: ((PLACES, 0), {"dtype": torch.int32}),
    aten.div_.Tensor: ((WIDE, ROW), {}),
    aten.embedding.default: ((WIDE, PLACES), {}),
    aten.embedding_dense_backward.default: ((SQUARE, PLACES, 9, -1, False), {}),
    aten.empty_like.default: ((TURNED,), {"pin_memory": False}),
    aten.eq.Scalar: ((WIDE, 1), {}),
    aten.floor_divide.default: ((PLACES, 2), {}),
    aten.gather.default: ((LINE, 0, PLACES), {}),
    aten.histc.default: ((LINE, 3, 0, 2), {}),
    aten.index.Tensor: ((WIDE, [PLACES]), {}),
    aten.index_put.default: ((WIDE, [PLACES], ROW, True), {}),
    aten.index_put_.default: ((WIDE, [PLACES], ROW), {}),
    aten.masked_fill.Scalar: ((WIDE, MASK, 0.0), {}),
    aten.ne.Scalar: ((HALF, 1), {}),
    aten.nll_loss_backward.default: ((NUMBER, WIDE, PLACES, None, 1, -100, NUMBER), {}),
    aten.nll_loss_forward.default: ((WIDE, PLACES, None, 1, -100), {}),
    aten.ones_like.default: ((TURNED,), {"memory_format": torch.preserve_format}),
    aten.scatter.src: ((LINE, 0, PLACES, LINE), {}),
    aten.scatter.value: ((LINE, 0, PLACES, 2.0), {}),
    aten.sort.default: ((WIDE,), {}),
    aten.topk.default: ((WIDE, 2), {}),
    aten.zeros_like.default: ((WIDE,), {"dtype": torch.bfloat16}),
    aten._to_copy.default: ((TURNED,), {"dtype": torch.bfloat16, "device": CPU}),
    aten.zero_.default: ((WIDE,), {}),
    aten.fill_.Scalar: ((WIDE, 1), {}),
}


LAYOUTS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "of a slice": (aten.neg.default, (PART,), {}),
    "the first one decides": (aten.mul.Tensor, (HEADS, POSITIONS), {}),
    "the second one has the shape": (aten.mul.Tensor, (POSITIONS, HEADS), {}),
    "dims of one": (aten.mul.Tensor, (BATCH, SINGLE), {}),
    "an expanded one": (aten.add.Tensor, (SPREAD, WIDE), {}),
    "of other dtypes": (aten.mul.Tensor, (WIDE, HALF), {}),
    "two that are turned": (aten.add.Tensor, (TURNED, WIDE), {"alpha": 3}),
    "halves": (aten.cat.default, ([PART, HALVES], -1), {}),
    "images": (aten.cat.default, ([IMAGE, IMAGE],), {}),
    "one head": (aten.cat.default, ([ALONE, ALONE], 1), {}),
    "dtypes are joined": (aten.cat.default, ([WIDE, HALF], 0), {}),
    "copied as it lies": (aten._to_copy.default, (HEADS,), {"dtype": torch.bfloat16}),
    "copied in rows": (
        aten._to_copy.default,
        (HEADS,),
        {"dtype": torch.bfloat16, "memory_format": torch.contiguous_format},
    ),
    "a part is copied": (aten._to_copy.default, (PART,), {"dtype": torch.bfloat16}),
    "an expanded one is copied": (aten._to_copy.default, (SPREAD,), {"dtype": torch.bfloat16}),
    "a sum of several": (aten.sum.dim_IntList, (SQUARE, [0, -1]), {}),
    "a sum of all": (aten.sum.dim_IntList, (SQUARE, None), {}),
    "a sum that keeps dims": (aten.sum.dim_IntList, (IMAGE, [1], True), {}),
    "a sum of heads": (aten.sum.dim_IntList, (HEADS, [2], True), {}),
    "a mean in another dtype": (aten.mean.dim, (HALF, [0]), {"dtype": torch.float32}),
    "put back": (aten.slice_backward.default, (TURNED, (6, 6), 0, 1, 5, 1), {}),
    "rows of an expanded one": (aten.index.Tensor, (SPREAD, [PLACES]), {}),
    "rows of a turned one": (aten.index.Tensor, (TURNED, [PLACES]), {}),
    "columns": (aten.index.Tensor, (WIDE, [None, PLACES]), {}),
    "places in both dims": (aten.index.Tensor, (WIDE, [PLACES, PLACES]), {}),
    "put into a turned one": (aten.index_put.default, (TURNED, [PLACES], LINE), {}),
    "a softmax of heads": (aten._softmax.default, (HEADS, -1, False), {}),
    "its logarithm of a part": (aten._log_softmax.default, (PART, -1, False), {}),
    "its gradient of heads": (aten._softmax_backward_data.default, (HEADS, HEADS, -1, torch.float32), {}),
    "running sums of a turned one": (aten.cumsum.default, (TURNED, 0), {}),
    "the most of a turned one": (aten.topk.default, (TURNED, 2), {}),
    "a turned one in order": (aten.sort.default, (TURNED,), {}),
    "compared as it lies": (aten.ne.Scalar, (HEADS, 0), {}),
    "zeros like a part": (aten.zeros_like.default, (PART,), {}),
    "an empty one in rows": (aten.empty_like.default, (HEADS,), {"memory_format": torch.contiguous_format}),
    "masked as it lies": (aten.masked_fill.Scalar, (TURNED, MASK, 1.0), {}),
    "put there by places": (aten.scatter.src, (TURNED, 0, NUMBERS, SQUARE), {}),
    "taken by places": (aten.gather.default, (TURNED, 0, NUMBERS), {}),
    "gradients of words in places": (aten.embedding_dense_backward.default, (BATCH, NUMBERS, 9, -1, False), {}),
    "losses in half": (aten.nll_loss_forward.default, (HALF, PLACES, None, 2, -100), {}),
}
"""Operators whose results have a layout of their own, or another dtype: what is made at once, and what is left to
torch."""


def given() -> dict[str, torch.Tensor]:
    return {
        SQUARE: torch.ones(4, 4),
        WIDE: torch.ones(4, 6),
        LINE: torch.ones(4),
        ROW: torch.ones(6),
        BATCH: torch.ones(2, 1, 3).expand(2, 4, 3)[:, :1],
        SINGLE: torch.ones(2, 1, 1),
        TURNED: torch.ones(6, 4).t(),
        HALF: torch.ones(4, 6, dtype=torch.bfloat16),
        HEADS: torch.ones(2, 5, 3, 4).transpose(1, 2),
        SUMS: torch.ones(2, 3, 5),
        NUMBER: torch.ones(()),
        PLACES: torch.ones(4, dtype=torch.long),
        NUMBERS: torch.ones(2, 1, dtype=torch.long),
        MASK: torch.ones(4, 1, dtype=torch.bool).expand(6, 4, 1)[0],
        PART: torch.ones(2, 5, 3, 8).transpose(1, 2)[..., 2:6],
        HALVES: torch.ones(2, 3, 5, 4),
        POSITIONS: torch.ones(1, 1, 5, 4),
        SPREAD: torch.ones(4, 1).expand(4, 6),
        IMAGE: torch.ones(2, 3, 5, 4).to(memory_format=torch.channels_last),
        ALONE: torch.ones(2, 5, 1, 4).transpose(1, 2),
    }


def storage_of(tensor: torch.Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def found(
    mode: FakeTensorMode,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    with_values: Sequence[str] = (),
) -> list[object]:
    """Each result: which argument it is, and else of which it is a view, with all that is known of it."""
    real = given()
    with mode:
        tensors = {**given(), **{name: real[name] for name in with_values}}

        def filled(value: Any) -> Any:
            if isinstance(value, list):
                return [filled(one) for one in value]
            return tensors[value] if isinstance(value, str) else value

        result = func(*map(filled, args), **kwargs)
        found: list[object] = [type(result)]
        for one in tree_leaves(result):
            storage = one.untyped_storage()
            same = [name for name, other in tensors.items() if other is one]
            seen = [
                name for name, other in tensors.items() if storage_id(other.untyped_storage()) == storage_id(storage)
            ]
            layout = one.shape, one.stride(), one.storage_offset(), storage.nbytes()
            found.append((type(one), same, seen, layout, one.dtype, one.device, one.requires_grad))
        return found


@pytest.mark.parametrize("func", sorted(DIRECT, key=str), ids=str)
def test_an_operator_finds_what_it_does_in_torch(func: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = found(FakeTensorMode(), func, *CALLS[func])
    left = left_to_torch(monkeypatch)
    assert found(FakeMode(), func, *CALLS[func]) == expected
    assert func not in left


def left_to_torch(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The operators of which torch's own mode is asked from now on."""
    left, dispatch = list[object](), FakeTensorMode.dispatch

    def noted(mode: FakeTensorMode, func: object, *more: Any) -> object:
        left.append(func)
        return dispatch(mode, func, *more)  # type: ignore[arg-type]  # an operator

    monkeypatch.setattr(FakeTensorMode, "dispatch", noted)
    return left


@pytest.mark.parametrize("case", LAYOUTS)
def test_results_lie_as_in_torch(case: str) -> None:
    assert found(FakeMode(), *LAYOUTS[case]) == found(FakeTensorMode(), *LAYOUTS[case])


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.embedding.default, (WIDE, PLACES)),
        (aten.embedding_dense_backward.default, (SQUARE, PLACES, 9, -1, False)),
        (aten.index.Tensor, (WIDE, [PLACES])),
        (aten.index_put_.default, (WIDE, [PLACES], ROW)),
        (aten.masked_fill.Scalar, (WIDE, MASK, 0.0)),
        (aten.nll_loss_backward.default, (NUMBER, WIDE, PLACES, None, 1, -100, NUMBER)),
        (aten.nll_loss_forward.default, (WIDE, PLACES, None, 1, -100)),
    ],
    ids=str,
)
def test_operands_may_have_values(
    func: Callable[..., Any], args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels, token ids, places, masks: the result has none, and lies as in torch."""
    in_torch = found(FakeTensorMode(allow_non_fake_inputs=True), func, args, {}, (PLACES, MASK))
    left = left_to_torch(monkeypatch)
    assert found(FakeMode(allow_non_fake_inputs=True), func, args, {}, (PLACES, MASK)) == in_torch
    assert func not in left


SMALL: dict[Any, tuple[Any, ...]] = {
    aten.alias.default: (),
    aten.clone.default: (),
    aten.cumsum.default: (1,),
    aten.detach.default: (),
    aten.neg.default: (),
    aten.select.int: (1, 2),
    aten.slice.Tensor: (1, 1, 3),
    aten.squeeze.dim: (0,),
    aten.unsqueeze.default: (0,),
    aten.view.default: ((2, 6),),
    aten.add.Tensor: (2,),
    aten.sub.Tensor: (2,),
    aten.mul.Tensor: (0.5,),
    aten.eq.Scalar: (3,),
    aten.ne.Scalar: (3,),
    aten._to_copy.default: (),
    aten.all.default: (),
    aten.all.dim: (1,),
    aten.any.default: (),
    aten.any.dim: (1,),
    aten.bitwise_not.default: (),
    aten.logical_not.default: (),
}


@pytest.mark.parametrize("func", sorted(NO_LARGER, key=str), ids=str)
def test_small_integers_are_computed_with_at_once(func: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the result has no more elements than they have: nobody asks first how large it is."""
    ids = torch.arange(12).view(3, 4)
    expected = func(ids, *SMALL[func])
    left = left_to_torch(monkeypatch)
    with FakeMode(allow_non_fake_inputs=True), Integers():
        result = func(ids, *SMALL[func])
    assert type(result) is torch.Tensor
    assert torch.equal(result, expected)
    assert result.dtype == expected.dtype
    assert result.numel() <= ids.numel()
    assert not left


def test_what_a_mask_selects_is_left_to_torch() -> None:
    """How many rows those are is not known."""
    for func, more in ((aten.index.Tensor, ()), (aten.index_put.default, (torch.ones(()),))):
        with FakeMode(allow_non_fake_inputs=True) as mode:
            wide, mask = (mode.from_tensor(one) for one in (torch.ones(4, 6), torch.ones(4, dtype=torch.bool)))
            if more:
                assert func(wide, [mask], *more).shape == (4, 6)
            else:
                with pytest.raises(DynamicOutputShapeException):
                    func(wide, [mask])


def test_what_is_not_all_fake_on_one_device_is_left_to_torch() -> None:
    """Real integers, a scalar of another device, constants, a device that is asked for."""
    mode = FakeMode(allow_non_fake_inputs=True)
    real = torch.arange(4)
    with mode:
        there, here = torch.ones(4), torch.tensor(2)
        for one in (torch.add(there, real), there + here, torch.cat([there, real])):
            assert (type(one), one.device.type) == (FakeTensor, "cpu")
        assert int(here + 1) == 3, "torch knows its value"
        with pytest.raises(RuntimeError, match="size"):
            there.view(3)
