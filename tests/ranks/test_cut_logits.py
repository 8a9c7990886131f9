"""Logits that are split by vocabulary mean all logits to every operator: values, gradients and what is gathered."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from twins import assert_gradients, sgd, work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks
from tests.thorough import sampled

Tensor = torch.Tensor
Use = Callable[[Tensor, Tensor], Any]
VOCAB, WIDTH, ROWS, LENGTH = 23, 8, 4, 5


class Model(nn.Module):
    """Returns logits [ROWS, LENGTH, VOCAB]; 23 words are an uneven number for two and for three ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.up, self.down = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.emb(x)
        logits: Tensor = self.head(hidden + self.down(torch.tanh(self.up(hidden))))
        return logits


PLAN = {"plan": {"up": "column", "down": "row", "emb": "vocabulary", "head": "vocabulary_cut"}}


def seeded() -> Model:
    torch.manual_seed(0)
    return Model()


def tokens() -> Tensor:
    numbers = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=numbers)


def numbers(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- what people do with logits ------------------------------------------------------------------------------


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.float().view(-1, VOCAB), labels.reshape(-1)


def causal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers' models have it."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.float().view(-1, VOCAB), shifted, ignore_index=-100, reduction="mean")


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.size(-1)), labels[..., 1:].contiguous().view(-1))


def label_smoother(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers' Trainer has it."""
    log_probs = -F.log_softmax(logits, dim=-1)
    labels = labels.unsqueeze(-1)
    is_padding = labels.eq(3)
    nll = log_probs.gather(dim=-1, index=torch.clamp(labels, min=0))
    smoothed = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32)
    nll.masked_fill_(is_padding, 0.0)
    smoothed.masked_fill_(is_padding, 0.0)
    counted = is_padding.numel() - is_padding.long().sum()
    return 0.9 * nll.sum() / counted + 0.1 * smoothed.sum() / (counted * log_probs.shape[-1])


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """As TRL's trainers have it, for fp32."""
    selected = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def selective_log_softmax_by_rows(logits: Tensor, index: Tensor) -> Tensor:
    """As TRL's trainers have it, for bf16."""
    rows = []
    for row, labels in zip(logits, index, strict=True):
        rows.append(F.log_softmax(row, dim=-1).gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def entropy_in_chunks(logits: Tensor, _: Tensor) -> Tensor:
    """As TRL's trainers have it."""
    found = []
    for chunk in logits.reshape(-1, logits.shape[-1]).split(7, dim=0):
        logps = F.log_softmax(chunk, dim=-1)
        found.append(-(torch.exp(logps) * logps).sum(-1))
    return torch.cat(found).reshape(logits.shape[:-1])


def dpo(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-ratio of the chosen and the rejected half of a batch, and a mean of logits, as in TRL's DPOTrainer."""
    mask = labels != 3
    logps = selective_log_softmax(logits, labels)
    logps[~mask] = 0
    ratio = logps.sum(-1)[: ROWS // 2] - logps.sum(-1)[ROWS // 2 :]
    return -F.logsigmoid(0.1 * ratio).mean() + 0.01 * logits[: ROWS // 2][mask[: ROWS // 2]].mean()


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    nll = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (1 - (-nll).exp()).pow(2) * nll


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, labels)) + 0.01 * logits.logsumexp(-1).square().mean()


def distilled(logits: Tensor, _: Tensor) -> Tensor:
    teacher = F.log_softmax(numbers(ROWS, LENGTH, VOCAB), -1)
    return F.kl_div(F.log_softmax(logits / 2.0, -1), teacher, log_target=True, reduction="batchmean") * 4.0


def tempered(logits: Tensor, labels: Tensor) -> Tensor:
    capped = 5.0 * torch.tanh(logits / 5.0)
    capped = capped * 1.5 + numbers(VOCAB)
    return F.cross_entropy(*flat(capped, labels), label_smoothing=0.1)


def in_place(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits * 1.0
    logits.div_(0.7).add_(numbers(LENGTH, 1))
    logits *= 2
    logits[labels == 3] = 0.0
    return logits.log_softmax(-1)


def written_views(logits: Tensor, _: Tensor) -> Tensor:
    """Whose backward makes whole gradients."""
    logits = logits * 1.0
    logits[..., 20:] = -30.0
    logits[:, 0] = numbers(VOCAB)
    return logits.log_softmax(-1)


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    is_allowed = numbers(VOCAB) > -1
    logits = logits.masked_fill(~is_allowed, -1e4)
    return torch.where(numbers(ROWS, LENGTH, VOCAB) > 0, logits, numbers(1, seed=3)).softmax(-1)


def two_logits(logits: Tensor, _: Tensor) -> Tensor:
    reference = logits.detach() * 0.9
    return (torch.exp(reference - logits) - (reference - logits) - 1).mean(-1)


def categorical(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = torch.distributions.Categorical(logits=logits)
    return chosen.log_prob(labels) + chosen.entropy()


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float()


def top_values(logits: Tensor, _: Tensor) -> Tensor:
    return logits.topk(3, dim=-1).values


LOCAL: dict[str, Use] = {
    "causal loss": causal_loss,
    "shifted loss": shifted_loss,
    "label smoother": label_smoother,
    "selective log-softmax": selective_log_softmax,
    "selective log-softmax by rows": selective_log_softmax_by_rows,
    "entropy in chunks": entropy_in_chunks,
    "DPO": dpo,
    "focal loss": focal,
    "z-loss": z_loss,
    "distillation": distilled,
    "temperature and caps": tempered,
    "in place": in_place,
    "masks": masked,
    "two logits": two_logits,
    "accuracy": accuracy,
    "categorical": categorical,
    "top values": top_values,
    "top indices": lambda logits, _: logits.topk(2).indices,
    "bottom": lambda logits, _: torch.topk(logits, 2, dim=-1, largest=False).values,
    "max": lambda logits, _: logits.max(-1).values,
    "max indices": lambda logits, _: torch.max(logits, dim=-1, keepdim=True).indices,
    "min": lambda logits, _: logits.min(dim=-1)[0],
    "max of all": lambda logits, _: logits.amax(),
    "amin": lambda logits, _: logits.amin(-1, keepdim=True),
    "argmin": lambda logits, _: logits.argmin(-1, keepdim=True),
    "argmax of rows": lambda logits, _: logits.argmax(0),
    "sum": lambda logits, _: logits.sum(),
    "sum of words": lambda logits, _: logits.sum((1, 2)),
    "sum of rows": lambda logits, _: logits.sum(1, keepdim=True),
    "mean": lambda logits, _: logits.mean(),
    "mean of words": lambda logits, _: logits.mean(-1),
    "mean of rows": lambda logits, _: logits.mean((0, 1)),
    "logsumexp of all": lambda logits, _: logits.logsumexp((0, 1, 2)),
    "logsumexp of rows": lambda logits, _: logits.logsumexp(1),
    "softmax of rows": lambda logits, _: logits.softmax(1),
    "normalized": lambda logits, _: logits - logits.logsumexp(-1, keepdim=True),
    "confidence": lambda logits, _: logits.softmax(-1).amax(-1),
    "any": lambda logits, _: (logits > 0.8).any(-1),
    "all": lambda logits, _: torch.isfinite(logits).all(),
    "rank of a label": lambda logits, y: (logits > logits.gather(-1, y[..., None])).sum(-1),
    "words by index": lambda logits, _: logits[:, :, [3, 20, 3]],
    "one word": lambda logits, _: logits[..., -1],
    "words of rows": lambda logits, y: flat(logits, y)[0][torch.arange(ROWS * LENGTH), y.flatten()],
    "words of a row": lambda logits, y: logits[0, torch.arange(LENGTH), y[0]],
    "rows by mask": lambda logits, y: logits[y != 3],
    "last of each": lambda logits, _: logits[torch.arange(ROWS), torch.tensor([0, 3, 2, 4])],
    "a range of words": lambda logits, _: logits[1:, -1, 2:20].log_softmax(-1),
    "few words": lambda logits, _: logits[..., :4] * 2,
    "transposed": lambda logits, _: logits.transpose(0, 2).permute(1, 2, 0) + numbers(VOCAB),
    "flattened": lambda logits, _: logits.flatten(0, 1).unsqueeze(1).expand(-1, 2, -1).squeeze(0).reshape(2, -1, VOCAB),
    "repeated cat": lambda logits, _: torch.cat([logits, numbers(1, LENGTH, VOCAB), logits * 2]),
    "stacked": lambda logits, _: torch.stack([logits, logits.exp()], dim=-2).unbind(-2)[1],
    "weights": lambda logits, y: F.cross_entropy(*flat(logits, y), weight=numbers(VOCAB).abs(), ignore_index=3),
    "everything": lambda logits, y: F.cross_entropy(
        *flat(logits, y), numbers(VOCAB).abs(), ignore_index=3, label_smoothing=0.2
    ),
    "sums": lambda logits, y: F.cross_entropy(*flat(logits, y), ignore_index=3, reduction="sum", label_smoothing=0.2),
    "each": lambda logits, y: nn.CrossEntropyLoss(reduction="none", label_smoothing=0.2)(*flat(logits, y)),
    "NLL": lambda logits, y: F.nll_loss(flat(logits, y)[0].log_softmax(-1), y.flatten(), ignore_index=3),
    "soft targets": lambda logits, _: F.cross_entropy(
        logits.flatten(0, 1), numbers(ROWS * LENGTH, VOCAB).softmax(-1), label_smoothing=0.1
    ),
    "one-hot": lambda logits, y: -(F.one_hot(y, VOCAB) * logits.log_softmax(-1)).sum(-1),
    "ours": lambda logits, y: sw.tensor.cross_entropy(*flat(logits, y), label_smoothing=0.3, ignore_index=3),
}
GATHERED: dict[str, Use] = {
    "written views": written_views,
    "sorted": lambda logits, _: logits.sort(-1).values,
    "top_p": lambda logits, _: logits.softmax(-1).cumsum(-1),
    "soft embeddings": lambda logits, _: logits.softmax(-1) @ numbers(VOCAB, 3),
    "deviation": lambda logits, _: logits.std(-1),
    "norm": lambda logits, _: logits.norm(dim=-1),
    "many of the top": lambda logits, _: logits.topk(15).values,
    "every other word": lambda logits, _: logits[..., ::2],
    "binary": lambda logits, y: F.binary_cross_entropy_with_logits(logits, F.one_hot(y, VOCAB).float()),
    "squared": lambda logits, _: F.mse_loss(logits, numbers(ROWS, LENGTH, VOCAB)),
    "one row of words": lambda logits, _: logits.reshape(-1),
    "rolled": lambda logits, _: logits.roll(1, -1),
    "whole": lambda logits, _: sw.tensor.full_tensor(logits).cumsum(-1),
}


def result_of(model: nn.Module, use: Use) -> tuple[Tensor, Tensor]:
    """What `use` makes of the logits, and a loss to which its entries contribute differently."""
    batch = tokens()
    made = use(model(batch[:, :-1]), batch[:, 1:])
    weights = numbers(*made.shape, seed=7)
    loss = (made * weights).sum() if made.requires_grad else sum(param.sum() for param in model.head.parameters()) * 0
    return made, loss


@sampled
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("are_gathered", [False, True])
def test_every_use_of_logits_is_that_of_whole_logits(
    are_gathered: bool, num_ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    uses = GATHERED if are_gathered else LOCAL
    expected = {}
    for name, use in uses.items():
        twin = seeded()
        made, loss = result_of(twin, use)
        loss.backward()
        expected[name] = made.detach(), loss.item(), {key: param.grad for key, param in twin.named_parameters()}
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": num_ranks}, "tensor": PLAN}

    def work(engine: sw.Engine) -> None:
        model = engine.module
        for name, use in uses.items():
            wanted, loss, grads = expected[name]
            made, found = result_of(model, use)
            assert made.shape == wanted.shape
            torch.testing.assert_close(sw.tensor.full_tensor(made.detach()), wanted, rtol=1e-5, atol=1e-6, msg=name)
            assert found.item() == pytest.approx(loss, rel=1e-4, abs=1e-5), name
            engine.backward(found)
            assert_gradients(engine, grads, name)
            engine.zero_grad()
            if engine.world.rank == 0:
                said = [record.message for record in caplog.records if "so they are gathered" in record.message]
                assert bool(said) == (are_gathered and name != "whole"), (name, said)
                model.head.forward._gathered.clear()
                caplog.clear()

    with caplog.at_level(logging.WARNING, "shardwise"):
        work_on_ranks(num_ranks, work, plan, seeded, sgd)


def over(num_ranks: int, work: Callable[[sw.Engine, Model], Any], **plan: Any) -> list[Any]:
    """What `work` returns on each rank, given an engine over the model with a split head."""
    full = {"preset": "zero1", "mesh": {"dp": 1, "tp": num_ranks}, "tensor": PLAN, **plan}
    return work_on_ranks(num_ranks, lambda engine: work(engine, engine.module), full, seeded, sgd)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Metrics are those of whole logits, which nothing gathers; where generation happens, they are whole."""
    batch = tokens()
    logits = seeded()(batch[:, :-1]).detach()
    labels = batch[:, 1:]
    expected = {name: LOCAL[name](logits, labels) for name in ("causal loss", "accuracy", "confidence", "z-loss")}

    def work(engine: sw.Engine, model: Model) -> None:
        with torch.no_grad():
            found = model(batch[:, :-1])
        with mode():
            for name, value in expected.items():
                torch.testing.assert_close(LOCAL[name](found, labels), value)
        with engine.inference():
            whole = model(batch[:, :-1])
            assert type(whole) is Tensor
            torch.testing.assert_close(whole, logits)
            loss = sw.tensor.cross_entropy(whole.flatten(0, 1), labels.flatten(), model.head)
            torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    over(2, work)
    assert not [record for record in caplog.records if "so they are gathered" in record.message]


def test_what_leaves_torch_is_whole() -> None:
    batch = tokens()
    twin = seeded()(batch[:, :-1]).detach()

    def work(engine: sw.Engine, model: Model) -> str:
        logits = model(batch[:, :-1])
        found = logits.detach()
        assert torch.allclose(torch.tensor(found.tolist()), twin)
        assert torch.allclose(torch.tensor(found.numpy()), twin)
        assert torch.allclose(torch.tensor(copy.deepcopy(found).numpy()), twin)
        saved = io.BytesIO()
        torch.save(found, saved)
        saved.seek(0)
        assert torch.allclose(torch.load(saved), twin)
        assert found.mean().item() == pytest.approx(twin.mean().item())
        for use in (lambda: found.data_ptr(), lambda: found.__setitem__((..., 3), 0.0), lambda: found.cumsum_(-1)):
            with pytest.raises(ModelError, match=r"split by vocabulary over ranks|have none"):
                use()
        with pytest.raises(RuntimeError, match="outside of the vocabulary of 23 words"):
            F.cross_entropy(found.flatten(0, 1), torch.full((ROWS * LENGTH,), VOCAB))
        with pytest.raises(RuntimeError, match="outside of the vocabulary of 23 words"):
            found.gather(-1, torch.full((ROWS, LENGTH, 1), -100))
        return repr(found)

    for rank, text in enumerate(over(2, work)):
        assert text.startswith(f"CutLogits of [4, 5, 23], of which this rank has {12 * rank} to {(12, 23)[rank]}")


class Squared(torch.autograd.Function):
    """A function of the user's own, whose backward reads along the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        made = logits.softmax(-1)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (made,) = ctx.saved_tensors
        return made * (grad - (grad * made).sum(-1, keepdim=True))


def test_functions_hooks_and_second_derivatives() -> None:
    """Gradients of split logits have the shape of all logits too."""
    batch = tokens()

    def run(model: nn.Module, backward: Callable[[Tensor], object]) -> list[Tensor]:
        logits = model(batch[:, :-1])
        seen: list[Tensor] = []
        logits.register_hook(lambda grad: seen.append(grad.detach()) or grad * 2)
        of_logits, others = Squared.apply(logits), logits.log_softmax(-1).square().mean()
        (first,) = torch.autograd.grad(of_logits.square().sum(), logits, create_graph=True)
        backward((of_logits * numbers(VOCAB)).sum() + others + first.square().sum())
        return [sw.tensor.full_tensor(one) for one in (*seen, first.detach())]

    twin = seeded()
    expected = run(twin, lambda loss: loss.backward())

    def work(engine: sw.Engine, model: Model) -> None:
        for found, wanted in zip(run(model, engine.backward), expected, strict=True):
            torch.testing.assert_close(found, wanted)
        for key, param in twin.named_parameters():
            torch.testing.assert_close(engine.get(key, "grad"), param.grad, rtol=1e-4, atol=1e-5)

    over(2, work)


@sampled
@pytest.mark.parametrize("use", ["z-loss", "causal loss"])
def test_a_rehearsal_counts_the_parts(use: str) -> None:
    """Of the bytes that all logits would take. What is gathered is counted, too."""
    x, y = torch.zeros(32, 64, dtype=torch.int64), torch.zeros(32, 64, dtype=torch.int64)

    def peak(engine: sw.Engine, model: Model, loss: Use = LOCAL[use]) -> int:
        return engine.rehearse(x, loss=lambda logits: loss(logits, y)).by_kind["activations"]

    def gathered(engine: sw.Engine, model: Model) -> int:
        return peak(engine, model, lambda logits, y: LOCAL[use](sw.tensor.full_tensor(logits), y))

    whole = over(2, peak, tensor={"plan": {**PLAN["plan"], "head": "vocabulary"}})
    parts = over(2, peak)
    all_logits = x.numel() * VOCAB * 4
    assert max(parts) < max(whole) - 0.8 * all_logits
    assert min(over(2, gathered)) > max(parts) + 0.8 * all_logits


def test_verify_sees_a_split_head() -> None:
    def train(engine: sw.Engine, model: Model) -> float:
        batch = tokens()
        loss = causal_loss(model(batch[:, :-1]), batch[:, 1:])
        engine.backward(loss)
        engine.step()
        return loss.item()

    batch = tokens()
    expected = causal_loss(seeded()(batch[:, :-1]), batch[:, 1:]).item()
    assert over(2, train, tensor={**PLAN, "verify": True}) == pytest.approx([expected] * 2)


class WithLoss(Model):
    """Computes a loss of its own from logits, in its forward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return z_loss(super().forward(x), y)


class Around(nn.Module):
    """Has the model with its loss as a unit, so that what the loss saves is treated as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = WithLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.inner(x, y)
        return loss


@sampled
@pytest.mark.parametrize("activations", ["recompute", "selective", "offload"])
def test_losses_inside_of_a_unit(activations: str) -> None:
    twin = Around()
    batch = tokens()
    twin(batch[:, :-1], batch[:, 1:]).backward()
    plan = {"preset": "zero3", "mesh": {"dp": 1, "tp": 2}, "tensor": PLAN, "activations": activations}
    plan["units"] = {"class": "WithLoss"}

    def work(engine: sw.Engine) -> None:
        for _ in range(2):
            engine.zero_grad()
            engine.backward(engine(batch[:, :-1], batch[:, 1:]))
            for key, param in twin.named_parameters():
                torch.testing.assert_close(engine.get(key, "grad"), param.grad, rtol=1e-4, atol=1e-5)

    work_on_ranks(2, work, plan, twin, sgd)


@sampled
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_models_of_transformers_compute_their_own_losses(kind: str) -> None:
    """With labels, and as the Trainer does with `label_smoothing_factor` and metrics of the logits."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=16))
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=16))
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=1, n_head=4)
        )
    model.eval()
    batch = tokens()
    twin = copy.deepcopy(model)

    def run(model: Any) -> tuple[Tensor, Tensor]:
        output = model(input_ids=batch, labels=batch)
        smoothed = label_smoother(output.logits, batch)
        return output.loss + smoothed + z_loss(output.logits, batch), output.logits.argmax(-1)

    loss, best = run(twin)
    loss.backward()
    models = [copy.deepcopy(model) for _ in range(3)]
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "tensor": {"cut_logits": True}}

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        with sw.shard(mine, plan, optimizer=torch.optim.SGD(mine.parameters(), lr=0.1), world=world) as engine:
            found, words = run(mine)
            assert found.item() == pytest.approx(loss.item(), rel=1e-5)
            assert torch.equal(words, best)
            engine.backward(found)
            for key, param in twin.named_parameters():
                if param.grad is not None:
                    torch.testing.assert_close(engine.get(key, "grad"), param.grad, rtol=1e-3, atol=1e-6, msg=key)

    run_ranks(2, rank)
