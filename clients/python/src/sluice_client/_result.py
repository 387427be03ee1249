"""How a generation ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """The end of a generation.

    Attributes:
        text: the whole answer.
        finish_reason: ``stop``, ``length`` or ``cancelled``.
        stop_reason: the stop text or token that ended it, if one did.
        usage: token counts. timings: milliseconds, as the server saw them.
    """

    text: str
    finish_reason: str
    stop_reason: str | int | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
