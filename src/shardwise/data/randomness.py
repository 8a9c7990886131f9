"""Random numbers as functions of a seed and a purpose, the same on every platform."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]


def keys(num_keys: int, *purpose: int | str) -> Words:
    """`num_keys` independent 64-bit keys for one purpose, such as `("permutation", seed, epoch)`.

    BLAKE2b is used as an extendable hash: block `i` hashes the purpose and `i`.
    """
    text = repr(purpose).encode()
    blocks = (hashlib.blake2b(text, salt=block.to_bytes(8, "big")).digest() for block in range(-(-num_keys // 8)))
    return np.frombuffer(b"".join(blocks), dtype="<u8")[:num_keys].astype(np.uint64)


def scramble(words: Words) -> Words:
    """A bijection of 64-bit words in which every input bit flips about half of the output bits.

    The finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", with
    Stafford's thirteenth set of constants). Arithmetic is modulo 2**64.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def sample_generator(seed: int, source: str, epoch: int, index: int) -> np.random.Generator:
    """The generator for the augmentation of one sample in one epoch, the same wherever it is read.

    Philox (Salmon and others 2011, "Parallel random numbers: as easy as 1, 2, 3") is keyed by 128 bits and costs
    nothing to seed. torch's CPU generator keeps 32 bits of its seed, so of 100 000 samples one or two pairs would be
    augmented alike.
    """
    return np.random.Generator(np.random.Philox(key=keys(2, "sample", seed, source, epoch, index)))
