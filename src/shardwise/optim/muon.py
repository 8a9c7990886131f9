"""Muon: momentum, orthogonalized as a whole matrix (kellerjordan.github.io/posts/muon, arXiv:2502.16982).

The arithmetic and the arguments are those of `torch.optim.Muon`; groups that are not matrices are updated by AdamW, as
in the author's `MuonWithAuxAdam`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.optim.adam import BatchedUpdate
from shardwise.optim.cooperative import Cooperative, Params, evaluated
from shardwise.program import States, Update

Tensor = torch.Tensor
Coefficients = tuple[float, float, float]
Adjust = Literal["original", "match_rms_adamw"]


class Muon(Cooperative):
    """Muon for the hidden matrices of a model, AdamW for everything else, in one optimizer.

    ```python
    hidden = sw.optim.hidden_matrices(model)
    others = [param for param in model.parameters() if all(param is not one for one in hidden)]
    optimizer = sw.optim.Muon(
        [{"params": hidden, "lr": 0.02}, {"params": others, "use_muon": False, "lr": 3e-4, "weight_decay": 0.0}]
    )
    ```

    A group with `use_muon=False` takes `lr`, `betas`, `adamw_eps` and `weight_decay`. `adjust_lr_fn` is `original` (the
    default: sqrt(max(1, rows / cols))) or `match_rms_adamw` (0.2 sqrt(max(rows, cols)), arXiv:2502.16982), which allows
    AdamW's learning rate. `iterate_in` is the dtype of the iteration and of its messages: bf16, as in torch, or fp32.
    Raises `ConfigError` for other values, and `ModelError` for a Muon parameter that is not a matrix.

    On a sharded model momentum stays sharded, and each matrix is orthogonalized on one rank.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Adjust | None = None,
        *,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        iterate_in: Literal["bf16", "fp32"] = "bf16",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "iterate_in": iterate_in,
        }
        super().__init__(params, defaults)

    def check_group(self, group: Mapping[str, Any]) -> None:
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise ConfigError(f"adjust_lr_fn is {group['adjust_lr_fn']!r}; it is original or match_rms_adamw.")
        first = self.param_groups[0]["iterate_in"]
        if group["iterate_in"] not in ("bf16", "fp32") or group["iterate_in"] != first:
            raise ConfigError(f"iterate_in is {group['iterate_in']!r}; it is bf16 or fp32, the same for all groups.")
        for param in group["params"] if group["use_muon"] else ():
            if param.dim() != 2:
                raise ModelError(
                    f"Muon updates matrices, but a parameter has shape {list(param.shape)}. Put it into a group with "
                    f"use_muon=False, which AdamW updates."
                )

    def update_of(self, param: nn.Parameter, group: Mapping[str, Any]) -> Update:
        if not group["use_muon"]:
            return Update(States(copies=2))
        rows, cols = param.shape
        return Update(States(copies=1), matrix=(rows, cols), dtype=group["iterate_in"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        groups = {param: group for _, param, group in self.members()}

        def make(param: nn.Parameter) -> Tensor:
            return self._momentum(param, groups[param])

        def work(param: nn.Parameter, matrix: Tensor) -> Tensor:
            group = groups[param]
            return orthogonalized(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

        def apply(param: nn.Parameter, direction: Tensor) -> None:
            group = groups[param]
            lr = float(group["lr"])
            param.mul_(1 - lr * group["weight_decay"])
            param.add_(direction, alpha=-adjusted(lr, group["adjust_lr_fn"], self.peers.shape_of(param)))

        matrices = [param for param, group in groups.items() if group["use_muon"]]
        self.peers.each_matrix(matrices, make, work, apply)
        self._update_others({param: group for param, group in groups.items() if not group["use_muon"]})
        return loss

    def _momentum(self, param: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        """Update the momentum. Returns this rank's contribution to the matrix, flat."""
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer, momentum = state["momentum_buffer"], group["momentum"]
        assert param.grad is not None
        buffer.lerp_(param.grad, 1 - momentum)
        given = param.grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        dtype = torch.bfloat16 if group["iterate_in"] == "bf16" else torch.float32
        return given.to(dtype, copy=given is buffer).reshape(-1)

    def _update_others(self, groups: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """AdamW for what is not a matrix, in one call per group."""
        settings = {id(group): {**group, "eps": group["adamw_eps"]} for group in groups.values()}
        batched = BatchedUpdate()
        for param, group in groups.items():
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0, device="cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            state["step"] += 1
            batched.add(param, param.grad, state, settings[id(group)])
        batched.update()


def orthogonalized(matrix: Tensor, coefficients: Coefficients, num_steps: int, eps: float) -> Tensor:
    """Approximately U V^T of the 2-d `matrix` U S V^T, by a quintic Newton-Schulz iteration; overwrites `matrix`.

    Works on the short side, in the matrix's dtype, and takes memory for one more matrix and two squares of the short
    side.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    other, gram = torch.empty_like(x), x.new_empty(x.shape[0], x.shape[0])
    polynomial = torch.empty_like(gram)
    for _ in range(num_steps):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.addmm(x, polynomial, x, beta=a, out=other)
        x, other = other, x
    return x.T if is_tall else x


def adjusted(lr: float, adjust: Adjust | None, shape: tuple[int, ...]) -> float:
    """The learning rate for a matrix of `shape`."""
    rows, cols = shape
    return lr * (0.2 * math.sqrt(max(rows, cols)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / cols)))


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that Muon is meant for: trainable matrices that are neither embeddings nor the head.

    A head is a matrix with as many rows as an embedding has entries, or the embedding itself, tied. A model as wide as
    it has positions, as GPT-2 medium is with 1024, has many such matrices that are none.
    """
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    entries = {embedding.shape[0] for embedding in embeddings} - {embedding.shape[1] for embedding in embeddings}
    return [
        param
        for param in model.parameters()
        if param.dim() == 2
        and param.requires_grad
        and param.shape[0] not in entries
        and all(param is not one for one in embeddings)
    ]
