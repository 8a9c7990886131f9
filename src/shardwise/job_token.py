"""A secret that the ranks of one job and their launcher share.

The launcher makes it anew for each job, and hands it on through the environment of ranks, or through the connection to
a host; never on a command line, which everybody on a machine can read.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping

VARIABLE = "SHARDWISE_TOKEN"
"""Where a rank finds the token; whoever starts ranks by other means may set it, alike on all of them."""
_CODE_BYTES = 32
_NUM_RANDOM_BYTES = 32


class ForgedError(Exception):
    """What was read was not written by whoever knows the token."""


def new_token() -> str:
    """One that nobody guesses."""
    return os.urandom(_NUM_RANDOM_BYTES).hex()


class Seal:
    """Marks what a job's own members write, so that nobody else's is taken for theirs. Without a token it does nothing.

    A code (HMAC-SHA-256) goes before the content, made of the token, the attempt, the name under which the content is
    left, and the content: what was written elsewhere, or in an earlier attempt, does not pass here.
    """

    def __init__(self, token: str = "", attempt: str = "0") -> None:
        self._key = hmac.digest(token.encode(), attempt.encode(), "sha256") if token else b""

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Seal:
        """The seal of the job, and the attempt, that the environment of a rank speaks of."""
        return cls(env.get(VARIABLE, ""), env.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def close(self, name: str, content: bytes) -> bytes:
        """`content` as it is to be left under `name`."""
        return self._code(name, content) + content if self._key else content

    def open(self, name: str, sealed: bytes) -> bytes:
        """The content that was left under `name`. Raises `ForgedError` for what no member of the job has left there."""
        if not self._key:
            return sealed
        code, content = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(name, content)):
            raise ForgedError(f"what is at {name!r} was not written by a member of this job")
        return content

    def word(self, name: str) -> bytes:
        """What members say to show that they are: for `name`, which should be one that was never used before.

        Without a token everybody can say it who knows the name.
        """
        return self._code(name, b"")

    def _code(self, name: str, content: bytes) -> bytes:
        subject = name.encode(errors="surrogatepass")
        return hmac.digest(self._key, len(subject).to_bytes(8, "little") + subject + content, "sha256")
