"""How much tests draw: a part in `make test`, all of it in `make thorough`, which continuous integration runs too."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("THOROUGH"))


def drawn(usually: int, thoroughly: int) -> int:
    """How many examples a test draws."""
    return thoroughly if THOROUGH else usually
