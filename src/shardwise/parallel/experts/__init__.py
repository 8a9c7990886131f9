"""Mixture of experts: layers for your own models, and the mesh axis `ep`, along which each rank has some of the experts
(GShard, arXiv:2006.16668).

Experts are rows of the same table without one axis (`Table.without`): for everything else `ep` is a data axis, so
presets, averages and batches do not know of it. Gradients are divided by all ranks of the replica axes, because tokens
of all of them reached an expert.

Ranks along `tp` send the same tokens to experts. If each sent its share, copies of experts along `tp` would see
different tokens, and either their gradients, as large as the experts, would be summed over `tp`, or `tp` would be a
replica axis for them alone. A larger `ep` in place of `tp` does the same work once.
"""

from shardwise.parallel.experts.dispatch import EXPERT_LOAD, loaded
from shardwise.parallel.experts.layer import Experts, MoE
from shardwise.parallel.experts.router import Router, Routing, auxiliary_loss, check_routers, update_biases
from shardwise.parallel.experts.split import AXIS, ExpertModule, ExpertSplit, expert_modules, expert_split
from shardwise.parallel.experts.totals import RankTotal, share_totals

__all__ = [
    "AXIS",
    "EXPERT_LOAD",
    "ExpertModule",
    "ExpertSplit",
    "Experts",
    "MoE",
    "RankTotal",
    "Router",
    "Routing",
    "auxiliary_loss",
    "check_routers",
    "expert_modules",
    "expert_split",
    "loaded",
    "share_totals",
    "update_biases",
]
