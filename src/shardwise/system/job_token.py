"""A secret that the ranks of one job share with their launcher.

The launcher creates a new one for each job, and passes it on through the environment of ranks, or through the
connection to a host; never on a command line, which everybody on a machine can read.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Mapping

from shardwise.system.process_rank import attempt_of

VARIABLE = "SHARDWISE_TOKEN"
"""Where a rank finds the token. Other launchers may set it too, to the same value on all ranks."""
_CODE_BYTES = 32
_NUM_RANDOM_BYTES = 32


class ForgedError(Exception):
    """The content was not written by a process that knows the token."""


def new_run_id() -> str:
    """Tells the jobs of a machine apart."""
    return f"{os.getpid()}-{int(time.time())}"


def new_token() -> str:
    """A new random token."""
    return os.urandom(_NUM_RANDOM_BYTES).hex()


class Seal:
    """Authenticates what a job's own members write, so that nothing else is taken for it. Without a token it does
    nothing.

    A code (HMAC-SHA-256) precedes the content. It is computed from the token, the attempt, the name under which the
    content is stored, and the content: content from another place or an earlier attempt is not accepted.
    """

    def __init__(self, token: str = "", attempt: str = "0") -> None:
        self._key = hmac.digest(token.encode(), attempt.encode(), "sha256") if token else b""

    @classmethod
    def of(cls, env: Mapping[str, str], token: str = "") -> Seal:
        """The seal for the job and attempt in the environment of a rank. `token` is used if that has none."""
        return cls(env.get(VARIABLE, "") or token, attempt_of(env))

    def within(self, scope: str) -> Seal:
        """The seal for one part of an attempt, such as a generation: content from another part is not accepted."""
        inner = Seal()
        inner._key = hmac.digest(self._key, f"within {scope}".encode(), "sha256") if self._key else b""
        return inner

    def close(self, name: str, content: bytes) -> bytes:
        """`content` in the form in which it is stored under `name`."""
        return self._code(name, content) + content if self._key else content

    def open(self, name: str, sealed: bytes) -> bytes:
        """The content stored under `name`. Raises `ForgedError` if no member of the job has stored it there."""
        if not self._key:
            return sealed
        code, content = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(name, content)):
            raise ForgedError(f"what is at {name!r} was not written by a member of this job")
        return content

    def word(self, name: str) -> bytes:
        """What members send to prove that they are members: for `name`, which should never have been used before.

        Without a token anybody who knows the name can produce it.
        """
        return self._code(name, b"")

    def _code(self, name: str, content: bytes) -> bytes:
        subject = name.encode(errors="surrogatepass")
        return hmac.digest(self._key, len(subject).to_bytes(8, "little") + subject + content, "sha256")
