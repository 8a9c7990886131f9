"""Mixture of experts: layers for your own models, and the mesh axis `ep`, along which each rank has some of the experts
(GShard, arXiv:2006.16668)."""

from shardwise.experts.dispatch import EXPERT_LOAD, loaded
from shardwise.experts.layer import Experts, MoE
from shardwise.experts.router import Router, Routing, auxiliary_loss, check_routers, update_biases
from shardwise.experts.split import AXIS, ExpertModule, ExpertSplit, expert_modules, expert_split
from shardwise.experts.totals import RankTotal, share_totals

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
