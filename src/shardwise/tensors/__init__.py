"""What PyTorch code gets where it touches a sharded parameter, or its gradient, between two computations."""

from shardwise.tensors.owner import Owner

__all__ = ["Owner"]
