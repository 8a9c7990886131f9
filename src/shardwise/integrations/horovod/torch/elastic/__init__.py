"""`horovod.torch.elastic`: state that goes back to its last commit, a loop that is run again, samples that are not
seen twice."""

from shardwise.integrations.horovod.elastic import ObjectState, State, run
from shardwise.integrations.horovod.torch.elastic.sampler import ElasticSampler
from shardwise.integrations.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
