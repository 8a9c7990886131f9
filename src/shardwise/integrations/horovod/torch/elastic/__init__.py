"""`horovod.torch.elastic`: state with commits, a decorator that runs a loop again, and a sampler that knows which
samples have been processed."""

from shardwise.integrations.horovod.basics import init, shutdown
from shardwise.integrations.horovod.elastic import ObjectState, State, run
from shardwise.integrations.horovod.torch.elastic.sampler import ElasticSampler
from shardwise.integrations.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "shutdown"]
