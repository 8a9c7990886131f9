"""The expected verdict of every action of the matrix: those listed here are refused, all others are equal."""

from __future__ import annotations

ORDER = "All ranks must call the same modules, backwards, steps and engine methods"
DTYPE = "Say precision and device before: in the plan"
HOOK = "Read gradients between backward and step instead"
MEMORY = "param.detach().clone()"
LEAF = "its memory, for another parameter or leaf"
COPY = "so the model cannot be copied or pickled as it is"

REFUSED: dict[str, str] = {
    "grad_read_on_rank_0": ORDER,
    "add_param_group": "is not one of the model's",
    "accumulate_hook": HOOK,
    "node_hook": HOOK,
    "accumulate_hook_before": "has a post-accumulate hook",
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
    "backward_create_graph": "backward(create_graph=True) would leave a gradient",
    "func_grad": "inside a torch.func transform",
    "traced_by_jit": "was called by torch.jit.trace",
    "scripted_by_jit": "was given to torch.jit.script",
    "exported": "export a plain model with these values",
    "second_engine": "is sharded by an engine already",
    "two_over_the_same": "is in two of the optimizers",
    "state_read": "kept by this rank's piece of it",
    "state_written": "kept by this rank's piece of it",
    "states_walked": "kept by this rank's piece of each parameter",
    "optimizer_copied": "kept by this rank's piece of each parameter",
    "weight_norm_later": LEAF,
    "tied_later": "was assigned to a model that is sharded",
    "old_weight_norm_later": "was assigned to a model that is sharded",
    "old_weight_norm_removed": "was assigned to a model that is sharded",
    "parametrized_later": "add and remove those before shard()",
    "buffer_parametrized_later": "was put into a model that is sharded",
    "module_added_to_empty_list": "was put into a model that is sharded",
    "tensors_swapped": "an exchange of its memory by torch.utils.swap_tensors",
    "array_written": "assignment destination is read-only",
    "given_as_dlpack": "its memory, for another library",
    "shape_changed": "another shape, given to it in place",
    "memory_set": "other memory by set_()",
    "group_shortened": "was changed after shard()",
    "group_element_replaced": "was changed after shard()",
    "second_parameter": LEAF,
    "second_parameter_detached": LEAF,
    "own_leaf": LEAF,
    "jacobian_of_param": LEAF,
    "param_replaced": "was assigned to a model that is sharded",
    "load_assigned": "was assigned to a model that is sharded",
    "param_registered": "was assigned to a model that is sharded",
    "pruned_later": "was assigned to a model that is sharded",
    "module_added": "was put into a model that is sharded",
    "module_replaced": "was put into a model that is sharded",
    "data_tied": "was assigned the memory of",
    "data_assigned_and_written": "Code wrote to a tensor after assigning it",
    "data_of_data_assigned": "other memory for what its .data was",
    "data_given_away": "have incompatible tensor type",
    "data_assigned_before_backward": "has been modified by an inplace operation",
    "grad_assigned_and_written": "Code wrote to a tensor after assigning it",
    "wrapped_in_ddp": "If it is a wrapper that spreads a model over ranks by itself",
}
"""For each action, a part of its error message."""

REFUSED_WHERE_SHARDED: dict[str, str] = {
    "called_on_fakes": "was called on fake tensors",
    "uneven_evaluation": ORDER,
    "evaluation_on_rank_0": ORDER,
    "state_dict_saved_on_rank_0": ORDER,
    "params_logged_on_rank_0": ORDER,
}
"""Refused only where parameters are sharded between computations, so that all ranks are needed: `zero3`."""

OPEN: dict[str, str] = {}
"""Actions that are not yet equal or refused, and how they differ. A test fails as soon as one of them is."""


def sentence_of(name: str, preset: str) -> str:
    """A part of the error message with which an action is refused; empty if it is equal."""
    if name in REFUSED_WHERE_SHARDED and preset.startswith("zero3"):
        return REFUSED_WHERE_SHARDED[name]
    return REFUSED.get(name, "")
