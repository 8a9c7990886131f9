"""Names that a watched forward gives to what tensors depend on, besides modules and parameters of other stages."""

from __future__ import annotations

Names = frozenset[str]
OWN = "own:"
"""What this stage has received or computed."""
FINITE = "finite:"
"""Prefix of names on which something depends only through a check such as `isnan`, which stand-ins pass."""


def foreign(names: Names) -> Names:
    """Those of other stages."""
    return names - {OWN}
