"""What the web chat and ``manage.py chat`` sample with where nobody has chosen.

The API keeps OpenAI's default, a temperature of 1, at which small models babble.
"""

from __future__ import annotations

from collections.abc import Mapping

from django.conf import settings

TEMPERATURE = 0.7
"""For models whose makers suggest none; ``CHAT_TEMPERATURE`` in the settings replaces it."""


def chat_defaults(suggested: Mapping[str, float]) -> dict[str, float]:
    """What the model's makers suggest (see :class:`inference.messages.ModelInfo`), else our own."""
    return {"temperature": getattr(settings, "CHAT_TEMPERATURE", TEMPERATURE), "top_p": 1.0, **suggested}
