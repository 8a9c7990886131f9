"""Data loading: the batch of step N is a function of the seed and N, for any mesh."""

from shardwise.data.loader import Loader
from shardwise.data.packing import Documents, PackedRows
from shardwise.data.permutation import Permutation
from shardwise.data.sampling import Blend, Draw, Epochs, Sampler
from shardwise.data.settings import Samples, Workers
from shardwise.data.sources import Mixture, Stream, from_iterable

__all__ = [
    "Blend",
    "Documents",
    "Draw",
    "Epochs",
    "Loader",
    "Mixture",
    "PackedRows",
    "Permutation",
    "Sampler",
    "Samples",
    "Stream",
    "Workers",
    "from_iterable",
]
