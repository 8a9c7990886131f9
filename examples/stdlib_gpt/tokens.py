"""Byte-pair encoding (Sennrich et al. 2016), learned from the text itself: words of Python become one token each.

A token of 512 is worth more than two bytes, so in the same time a model sees more than twice as much text.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NUM_BYTES = 256
WORD = re.compile(rb"\n[ \n]*| ?[A-Za-z_]+| ?[^\sA-Za-z0-9_]+|[0-9]|\s")
"""What pairs are merged within: the end of a line with the next one's indentation, a name, a run of signs."""
RARE = 25
"""Words that occur less often teach no pairs, as most words do."""

Pair = tuple[int, int]


class Tokens:
    """Numbers for pieces of text: the 256 bytes, and one for each of `merges`, in the order of learning."""

    def __init__(self, merges: Sequence[Pair]) -> None:
        self._merges = {pair: NUM_BYTES + place for place, pair in enumerate(merges)}
        self._bytes = [bytes([byte]) for byte in range(NUM_BYTES)]
        for left, right in merges:
            self._bytes.append(self._bytes[left] + self._bytes[right])
        self._known: dict[bytes, tuple[int, ...]] = {}

    @classmethod
    def learn(cls, text: bytes, number: int) -> Tokens:
        """At most `number` tokens: bytes, and the pair that is most frequent in `text`, again and again."""
        words = [(list(word), count) for word, count in Counter(WORD.findall(text)).items() if count >= RARE]
        counts: Counter[Pair] = Counter()
        places: defaultdict[Pair, set[int]] = defaultdict(set)
        for place, (word, count) in enumerate(words):
            for pair in itertools.pairwise(word):
                counts[pair] += count
                places[pair].add(place)
        merges: list[Pair] = []
        while len(merges) < number - NUM_BYTES and counts:
            best = max(counts, key=lambda pair: (counts[pair], pair))
            if counts[best] < RARE:
                break
            merges.append(best)
            for place in places.pop(best):
                word, count = words[place]
                for pair in itertools.pairwise(word):
                    counts[pair] -= count
                word = _merged(word, best, NUM_BYTES + len(merges) - 1)
                words[place] = (word, count)
                for pair in itertools.pairwise(word):
                    counts[pair] += count
                    places[pair].add(place)
            del counts[best]
        return cls(merges)

    def __len__(self) -> int:
        return len(self._bytes)

    def encode(self, text: bytes) -> npt.NDArray[np.uint16]:
        """The tokens of `text`, uint16 `[num_tokens]`."""
        found = array("H")
        for word in WORD.findall(text):
            if word not in self._known:
                self._known[word] = self._encode_word(word)
            found.extend(self._known[word])
        return np.frombuffer(found, dtype=np.uint16)

    def decode(self, token: int) -> bytes:
        return self._bytes[token]

    def _encode_word(self, word: bytes) -> tuple[int, ...]:
        tokens = list(word)
        while len(tokens) > 1:
            last = len(self)
            first = min(itertools.pairwise(tokens), key=lambda pair: self._merges.get(pair, last))
            if first not in self._merges:
                break
            tokens = _merged(tokens, first, self._merges[first])
        return tuple(tokens)


def bigram_loss(train: npt.NDArray[np.uint16], validation: npt.NDArray[np.uint16], number: int) -> float:
    """The loss on `validation`, in nats per token, of a model that sees one token back: it knows how often each of
    `number` tokens follows each other one in `train`, and mixes in how often it comes at all, as if it had seen 50
    tokens more of it after each (MacKay and Peto 1995)."""
    first, second = train[:-1].astype(np.int64), train[1:].astype(np.int64)
    pairs = np.bincount(first * number + second, minlength=number**2).reshape(number, number)
    alone = (np.bincount(train, minlength=number) + 1) / (len(train) + number)
    before, after = validation[:-1], validation[1:]
    chances = (pairs[before, after] + 50 * alone[after]) / (pairs.sum(axis=1)[before] + 50)
    return float(-np.log(chances).mean())


def _merged(word: list[int], pair: Pair, token: int) -> list[int]:
    """`word` with `token` wherever it has `pair`, from the left."""
    merged: list[int] = []
    place = 0
    while place < len(word):
        if (*word[place : place + 2],) == pair:
            merged.append(token)
            place += 2
        else:
            merged.append(word[place])
            place += 1
    return merged
