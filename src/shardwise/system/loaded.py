"""Classes of other libraries, which are not imported for them."""

from __future__ import annotations

import sys
from typing import Any


def loaded(module: str, name: str) -> Any:
    """What another library's `module` has under `name`; `None` if it was not imported, so that no object is of it."""
    return getattr(sys.modules.get(module), name, None)
