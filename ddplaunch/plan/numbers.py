"""Numbers as people type them: ASCII digits, and not what Python's ``int`` takes besides ("1_0", "٣", " 1", "+1")."""

from __future__ import annotations

import re

_WHOLE = r"-?[0-9]{1,18}"
_DECIMAL = r"-?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})(e-?[0-9]{1,2})?"


def whole(text: str) -> int | None:
    """Read a whole number of at most 18 digits; None if it is not one."""
    return int(text) if re.fullmatch(_WHOLE, text) else None


def decimal(text: str) -> float | None:
    """Read a number like 2, 2.5 or 1e3; None if it is not one."""
    return float(text) if re.fullmatch(_DECIMAL, text, re.IGNORECASE) else None
