"""The expected verdict of every action of the matrix: those of this table are refused, all others are equal."""

from __future__ import annotations

ORDER = "All ranks must call the same modules, backwards, steps and engine methods"
DTYPE = "Say precision and device before: in the plan"
HOOK = "Read gradients between backward and step instead"
MEMORY = "param.detach().clone()"
COPY = "so the model cannot be copied or pickled as it is"

REFUSED: dict[str, str] = {
    "grad_read_on_rank_0": ORDER,
    "add_param_group": "was added to an optimizer whose model is sharded already",
    "accumulate_hook": HOOK,
    "step_in_backward": HOOK,
    "to_double": DTYPE,
    "to_bfloat16": DTYPE,
    "to_half": DTYPE,
    "to_dtype": DTYPE,
    "part_to_double": DTYPE,
    "data_to_double": DTYPE,
    "share_memory": "its memory, to share it",
    "params_pointers": "the address of its memory",
    "model_copied": COPY,
    "model_pickled": COPY,
    "averaged_model": COPY,
    "unfrozen": "was frozen when the model was sharded",
    "backward_create_graph": "backward(create_graph=True) would leave a gradient",
    "func_grad": "torch.func",
    "second_engine": "is sharded already",
    "two_over_the_same": "two optimizers",
    "to_empty": "to_empty",
    "grad_scaler": "GradScaler",
    "grad_scaler_clips": "GradScaler",
    "grad_scaler_skips": "GradScaler",
    "weight_norm_later": "before shard()",
    "wrapped_in_ddp": "Give it a copy: tensor.clone(), on all ranks",
}
"""By action: words of the sentence."""

REFUSED_OVER_MESSAGES: dict[str, str] = {
    "uneven_evaluation": ORDER,
    "evaluation_on_rank_0": ORDER,
    "state_dict_saved_on_rank_0": ORDER,
    "params_logged_on_rank_0": ORDER,
}
"""What is refused only where parameters are sent from rank to rank: under `zero3`, without common memory."""

OPEN: dict[str, str] = {
    "grad_by_param_groups": "the groups of the optimizer hold this rank's pieces, which have no gradient",
    "clip_by_param_groups": "the groups of the optimizer hold this rank's pieces, which have no gradient: unclipped",
    "params_by_groups": "the groups of the optimizer hold this rank's pieces, which are flat",
    "state_read": "states are kept by piece: nothing is found under the model's own parameter",
    "state_written": "states are kept by piece: nothing is found under the model's own parameter",
    "state_dict_read": "under `zero3` it has this rank's pieces alone",
    "both_optimizers": "a list of optimizers is not taken",
    "optimizers_in_turn": "a list of optimizers is not taken",
    "two_over_the_same": "a list of optimizers is not taken",
    "second_engine": "refused, but as ranks that contradict each other, after which they cannot go on",
    "to_empty": "parameters get values that nobody chose",
    "weight_norm_later": "refused in torch's words alone",
    "func_grad": "refused in torch's words alone where parameters are sent",
    "grad_scaler": "refused in torch's words alone",
    "grad_scaler_clips": "refused in torch's words alone",
    "grad_scaler_skips": "refused in torch's words alone",
}
"""What does not yet keep the promise, and how. A test fails as soon as one of them does."""


def sentence_of(name: str, preset: str, *, shares_memory: bool) -> str:
    """The words by which an action is refused there; empty where it is equal."""
    if name in REFUSED_OVER_MESSAGES and preset == "zero3" and not shares_memory:
        return REFUSED_OVER_MESSAGES[name]
    return REFUSED.get(name, "")
