"""No write to logits that are split by vocabulary is lost: it does what it does to whole ones, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.dlpack import from_dlpack, to_dlpack
from twins import assert_gradients, sgd, work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from tests.ranks.test_cut_logits import LENGTH, PLAN, ROWS, VOCAB, numbers, seeded, tokens
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
Write = Callable[[Tensor], Any]

ONE_WORD = F.one_hot(torch.tensor(3), VOCAB).bool()
WHERE = numbers(ROWS, LENGTH, VOCAB) > 0


def item(*index: Any, value: Any = 2.0) -> Write:
    return lambda logits: logits.__setitem__(index, value)


def of_single_words(view: Callable[[Tensor], Tensor]) -> Write:
    return lambda logits: view(logits).fill_(2.0)


def added(logits: Tensor) -> None:
    logits += 1


def rows_added(logits: Tensor) -> None:
    logits[0] += numbers(LENGTH, VOCAB)


def words_multiplied(logits: Tensor) -> None:
    logits[..., 4:] *= 2


def twice(logits: Tensor) -> None:
    """A write through a view of a view, and one to what they are views of."""
    row, words = logits[1], logits[1][..., 2:20]
    words.mul_(3)
    row.add_(1)
    words[0] = 0.5


def through_numpy(logits: Tensor) -> None:
    logits.detach().numpy()[...] = 0


def data_replaced(logits: Tensor) -> None:
    logits.data = numbers(ROWS, LENGTH, VOCAB)


RIGHT: dict[str, Write] = {
    "add_": lambda logits: logits.add_(numbers(LENGTH, 1)).mul_(2),
    "iadd": added,
    "clamp_": lambda logits: logits.clamp_(-0.1, 0.1),
    "lerp_": lambda logits: logits.lerp_(numbers(VOCAB), 0.3),
    "relu_": F.relu_,
    "copy_": lambda logits: logits.copy_(numbers(LENGTH, VOCAB)),
    "copy_ of parts": lambda logits: logits.copy_(logits.detach() * 2),
    "zero_": lambda logits: logits.zero_(),
    "masked_fill_": lambda logits: logits.masked_fill_(WHERE, 2.0),
    "masked_fill_ of a word": lambda logits: logits.masked_fill_(ONE_WORD, 2.0),
    "masked_fill_ by parts": lambda logits: logits.masked_fill_(logits > 0, 2.0),
    "everything": item(..., value=numbers(VOCAB)),
    "row": item(1, value=numbers(LENGTH, VOCAB)),
    "last row": item(-1, -1),
    "rows": item(slice(1, None, 2), slice(None), value=numbers(VOCAB)),
    "rows by index": item(torch.tensor([0, 2]), torch.tensor([1, 4])),
    "rows by list": item([0, 2], value=numbers(LENGTH, VOCAB)),
    "rows by mask": item(WHERE[..., 0], value=numbers(VOCAB)),
    "words": item(Ellipsis, slice(20, None), value=-30.0),
    "last words": item(Ellipsis, slice(-3, None), value=numbers(3)),
    "words of a row": item(0, slice(None), slice(2, 20), value=numbers(LENGTH, 18)),
    "words behind the last": item(Ellipsis, slice(VOCAB, None), value=-30.0),
    "words of rows by index": item(torch.tensor([0, 2]), slice(None), slice(2, 20)),
    "row +=": rows_added,
    "words *=": words_multiplied,
    "view of a row": lambda logits: logits[0].mul_(2),
    "view of words": lambda logits: logits[..., 2:20].mul_(2),
    "view of words of rows": lambda logits: logits[1:, -1, 2:20].exp_(),
    "views of views": twice,
    "narrow": lambda logits: logits.narrow(-1, 3, 15).zero_(),
    "narrow of rows": lambda logits: logits.narrow(0, 1, 2).zero_(),
    "select of a row": lambda logits: logits.select(1, 2).fill_(2.0),
    "view": lambda logits: logits.view(-1, VOCAB)[3].zero_(),
    "reshape": lambda logits: logits.reshape(-1, VOCAB)[2:4].zero_(),
    "flatten": lambda logits: logits.flatten(0, 1).mul_(2),
    "transpose": lambda logits: logits.transpose(0, 2)[2:20].mul_(2),
    "permute": lambda logits: logits.permute(2, 1, 0).add_(numbers(VOCAB, 1, 1)),
    "unsqueeze": lambda logits: logits.unsqueeze(1)[:, 0, 0].mul_(2),
    "data": lambda logits: logits.data.mul_(2),
    "row of data": item(0),
    "detach": lambda logits: logits.detach()[..., 2:20].zero_(),
    "words of data": lambda logits: logits.data[..., 2:20].zero_(),
    "contiguous words": lambda logits: logits[..., :20].contiguous().zero_(),
    "contiguous words of a row": lambda logits: logits[0, :, 3:21].contiguous().zero_(),
    "contiguous rows": lambda logits: logits[1:].contiguous().zero_(),
    "contiguous": lambda logits: logits.contiguous().mul_(2),
    "transposed and contiguous": lambda logits: logits.transpose(0, 1).contiguous().zero_(),
    "flattened words": lambda logits: logits[..., :20].flatten(0, 1).zero_(),
    "flattened copies": lambda logits: logits[:, :3, :20].flatten(0, 1).zero_(),
    "same dtype": lambda logits: logits.float().to(torch.float32).mul_(2),
    "clone": lambda logits: logits.clone().zero_(),
    "words by index, a copy": lambda logits: logits[..., [3, 20]].zero_(),
    "rows by index, a copy": lambda logits: logits[[0, 2]].zero_(),
    "index_put_": lambda logits: logits.index_put_((torch.tensor([0, 2]),), numbers(LENGTH, VOCAB)),
    "index_put_ that adds": lambda logits: logits.index_put_((torch.tensor([1, 1]),), torch.ones(()), accumulate=True),
}

REFUSED: dict[str, Write] = {
    "word": item(Ellipsis, 3),
    "entry": item(0, 1, 3),
    "words by index": item(Ellipsis, [3, 20]),
    "words of rows": item(torch.arange(ROWS), 0, torch.tensor([1, 2, 3, 4])),
    "every other word": item(Ellipsis, slice(None, None, 2)),
    "mask of words": item(Ellipsis, ONE_WORD),
    "mask of entries": item(WHERE),
    "view of a word": of_single_words(lambda logits: logits[..., 3]),
    "view of an entry": of_single_words(lambda logits: logits[0, 1, -1]),
    "view of a view of a word": of_single_words(lambda logits: logits[0][..., 3]),
    "view of every other word": of_single_words(lambda logits: logits[..., ::2]),
    "select": of_single_words(lambda logits: logits.select(-1, 3)),
    "row of a word": of_single_words(lambda logits: logits.select(-1, 3)[0]),
    "detached word": of_single_words(lambda logits: logits.detach()[..., 3]),
    "word of data": of_single_words(lambda logits: logits.data[..., 3]),
    "data of a word": of_single_words(lambda logits: logits[..., 3].data),
    "detach of a word": of_single_words(lambda logits: logits.select(-1, 3).detach()),
    "unbind": of_single_words(lambda logits: logits.detach().unbind(-1)[3]),
    "split": of_single_words(lambda logits: logits.detach().split(5, -1)[1]),
    "chunk": of_single_words(lambda logits: logits.detach().chunk(2, -1)[0]),
    "one dimension": of_single_words(lambda logits: logits.view(-1)),
    "one dimension, flattened": of_single_words(lambda logits: logits.flatten()[:3]),
    "one dimension, item": lambda logits: logits.view(-1).__setitem__(3, 0.0),
    "unflatten": of_single_words(lambda logits: logits[..., :20].unflatten(-1, (4, 5))[..., 0]),
    "diagonal": of_single_words(lambda logits: logits[0].diagonal()),
    "unfold": of_single_words(lambda logits: logits.unfold(-1, 3, 3)),
    "as_strided": of_single_words(lambda logits: logits.as_strided((3,), (1,))),
    "bits": lambda logits: logits.detach().view(torch.int32).zero_(),
    "row of a transposed": of_single_words(lambda logits: logits.transpose(0, 2)[3]),
    "scatter_": lambda logits: logits.scatter_(-1, torch.zeros(ROWS, LENGTH, 1, dtype=torch.int64), 2.0),
    "scatter_add_": lambda logits: logits.scatter_add_(
        -1, torch.zeros(ROWS, LENGTH, 1, dtype=torch.int64), torch.ones(ROWS, LENGTH, 1)
    ),
    "index_fill_": lambda logits: logits.index_fill_(-1, torch.tensor([3]), 2.0),
    "index_fill_ of rows": lambda logits: logits.index_fill_(0, torch.tensor([3]), 2.0),
    "index_add_": lambda logits: logits.index_add_(0, torch.tensor([3]), numbers(1, LENGTH, VOCAB)),
    "index_copy_": lambda logits: logits.index_copy_(0, torch.tensor([3]), numbers(1, LENGTH, VOCAB)),
    "index_put_": lambda logits: logits.index_put_((torch.tensor(0), torch.tensor(1), torch.tensor(3)), torch.ones(())),
    "put_": lambda logits: logits.put_(torch.tensor([3]), torch.ones(1)),
    "masked_scatter_": lambda logits: logits.masked_scatter_(WHERE, numbers(ROWS * LENGTH * VOCAB)),
    "fill_diagonal_": lambda logits: logits[0].fill_diagonal_(2.0),
    "cumsum_": lambda logits: logits.cumsum_(-1),
    "tril_": lambda logits: logits.tril_(),
    "renorm_": lambda logits: logits.renorm_(2, 0, 1.0),
    "normal_": lambda logits: logits.detach().normal_(),
    "bernoulli_": lambda logits: logits.detach().bernoulli_(),
    "dropout_": lambda logits: F.dropout(logits, 0.5, inplace=True),
    "masked_fill_ of whole words by a word": lambda logits: logits.masked_fill_(logits[..., :1].unsqueeze(0) > 0, 2.0),
    "out=": lambda logits: torch.mul(numbers(ROWS, LENGTH, VOCAB), 2, out=logits.detach()),
    "out= of parts": lambda logits: torch.mul(logits.detach(), 2, out=logits.detach()),
    "out= of a softmax": lambda logits: torch.softmax(logits.detach(), -1, out=logits.detach()),
    "foreach": lambda logits: torch._foreach_mul_([logits.detach()], 2.0),
    "data =": data_replaced,
    "set_": lambda logits: logits.detach().set_(numbers(ROWS, LENGTH, VOCAB)),
    "resize_": lambda logits: logits.detach().resize_(3),
    "unsqueeze_": lambda logits: logits.unsqueeze_(0),
    "t_": lambda logits: logits.transpose_(0, 1),
    "memory": lambda logits: logits.untyped_storage(),
    "address": lambda logits: logits[..., 3].data_ptr(),
}

FRESH: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda logits, out: torch.add(logits, 1, out=out),
    "softmax": lambda logits, out: torch.softmax(logits, -1, out=out),
    "log_softmax": lambda logits, out: torch.log_softmax(logits, -1, out=out),
    "copy_": lambda logits, out: out.copy_(logits),
    "item": lambda logits, out: out.__setitem__((slice(1, None),), logits[1:]),
    "mask": lambda logits, out: out.masked_fill_(logits > 0, 1.0),
    "cumsum": lambda logits, out: torch.cumsum(logits, -1, out=out),
    "cat": lambda logits, out: torch.cat([logits[:2], logits[2:]], out=out),
    "stack": lambda logits, out: torch.stack(list(logits), out=out),
    "where": lambda logits, out: torch.where(WHERE, logits, torch.zeros(()), out=out),
    "mul_": lambda logits, out: out.mul_(logits),
    "sum": lambda logits, out: torch.sum(logits, -1, out=out[0, 0]),
    "mean": lambda logits, out: torch.mean(logits, -1, out=out[0, 0]),
    "logsumexp": lambda logits, out: torch.logsumexp(logits, -1, out=out[0, 0]),
    "amax": lambda logits, out: torch.amax(logits, -1, out=out[0, 0]),
    "word": lambda logits, out: out.copy_(logits.select(-1, 3).unsqueeze(-1)),
}
"""What writes to tensors that are not split. `out` has the shape of the logits; a result of another shape resizes a
view of it, and is what the function returns."""


def over_two(work: Callable[[sw.Engine, nn.Module], Any]) -> list[Any]:
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "tensor": PLAN}
    return work_on_ranks(2, lambda engine: work(engine, engine.module), plan, seeded, sgd)


def written(model: nn.Module, write: Write) -> Tensor:
    logits: Tensor = model(tokens()[:, :-1]) * 1.0
    write(logits)
    return logits


def refusal_of(write: Write, logits: Tensor) -> str:
    try:
        write(logits)
    except ModelError as error:
        return str(error)
    return "it was taken"


def loss_of(logits: Tensor) -> Tensor:
    return (logits.log_softmax(-1) * numbers(ROWS, LENGTH, VOCAB, seed=7)).sum()


@thorough_only("slow; smaller tests beside it cover the same code")
def test_right_writes() -> None:
    """Values, and gradients of what was there before."""
    expected = {}
    for name, write in RIGHT.items():
        twin = seeded()
        logits = written(twin, write)
        loss_of(logits).backward()
        expected[name] = logits.detach(), {key: param.grad for key, param in twin.named_parameters()}

    def work(engine: sw.Engine, model: nn.Module) -> None:
        for name, write in RIGHT.items():
            wanted, grads = expected[name]
            logits = written(model, write)
            found = sw.tensor.full_tensor(logits.detach())
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=name)
            engine.backward(loss_of(logits))
            assert_gradients(engine, grads, name)
            engine.zero_grad()

    over_two(work)


@sampled
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_other_writes_are_refused(mode: Any) -> None:
    """With what to do instead, and before anything is written."""

    def work(engine: sw.Engine, model: nn.Module) -> None:
        logits = model(tokens()[:, :-1]) * 1.0
        before = sw.tensor.full_tensor(logits.detach()).clone()
        for name, write in REFUSED.items():
            with mode():
                mine = logits.detach() * 1.0
                assert "full_tensor(logits) first" in refusal_of(write, mine), name
                torch.testing.assert_close(sw.tensor.full_tensor(mine), before, msg=name)

    over_two(work)


@sampled
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_without_gradients(mode: Any) -> None:
    def found(model: nn.Module, write: Write) -> Tensor:
        with torch.no_grad():
            logits = model(tokens()[:, :-1])
        with mode():
            logits = logits * 1.0
            write(logits)
            return sw.tensor.full_tensor(logits)

    expected = {name: found(seeded(), write) for name, write in RIGHT.items()}

    def work(engine: sw.Engine, model: nn.Module) -> None:
        for name, write in RIGHT.items():
            torch.testing.assert_close(found(model, write), expected[name], rtol=1e-5, atol=1e-6, msg=name)

    over_two(work)


def test_an_array_of_logits_is_a_copy_that_refuses_writes() -> None:
    def work(engine: sw.Engine, model: nn.Module) -> None:
        logits = model(tokens()[:, :-1]).detach()
        for one in (logits, logits[..., 3]):
            with pytest.raises(ValueError, match="read-only"):
                through_numpy(one)
            assert one.clone().numpy().flags.writeable == (one is not logits)

    over_two(work)


EXCHANGES: dict[str, Callable[[Any], Any]] = {
    "to_dlpack": to_dlpack,  # asks no subclass, so torch's own words refuse it
    "dlpack.from_dlpack": from_dlpack,
    "torch.from_dlpack": torch.from_dlpack,
    "numpy.from_dlpack": np.from_dlpack,
    "__dlpack__": lambda logits: logits.__dlpack__(max_version=(1, 0)),
    "__cuda_array_interface__": lambda logits: logits.__cuda_array_interface__,
    "share_memory_": lambda logits: logits.share_memory_(),
    "memoryview": memoryview,
}


def test_what_hands_memory_to_others() -> None:
    """An array is a copy of all logits. Everything that would hand out their address is refused: they have none."""

    def work(engine: sw.Engine, model: nn.Module) -> None:
        logits = model(tokens()[:, :-1]).detach()
        for one in (logits, logits[0], logits[..., 3], logits[..., 2:20], logits[:0], logits.clone()):
            whole = sw.tensor.full_tensor(one).clone()
            for array in (one.numpy(), one.numpy(force=True), np.asarray(one), one.__array__()):
                torch.testing.assert_close(torch.tensor(array), torch.as_tensor(whole.tolist()).view(whole.shape))
            assert np.asarray(one, dtype=np.float64).dtype == np.float64
            for name, exchange in EXCHANGES.items():
                with pytest.raises((ModelError, RuntimeError, TypeError, AttributeError)) as raised:
                    print(name, "gave", exchange(one))
                assert raised.type is not AttributeError or name == "__cuda_array_interface__"

    over_two(work)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_writes_to_tensors_that_are_not_split() -> None:
    def found(model: nn.Module, write: Callable[[Tensor, Tensor], Any]) -> tuple[Tensor, Any]:
        with torch.no_grad():
            out = numbers(ROWS, LENGTH, VOCAB)
            return out, write(model(tokens()[:, :-1]), out)

    expected = {name: found(seeded(), write) for name, write in FRESH.items()}

    def work(engine: sw.Engine, model: nn.Module) -> None:
        for name, write in FRESH.items():
            torch.testing.assert_close(found(model, write), expected[name], rtol=1e-5, atol=1e-6, msg=name)

    over_two(work)
