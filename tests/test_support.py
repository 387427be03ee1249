"""The helpers that tests wait with."""

from __future__ import annotations

import functools

import pytest

from tests.support import eventually_sync


@pytest.mark.parametrize("check", [functools.partial(bool, 0), [].__len__], ids=["partial", "built in"])
def test_a_check_without_source_is_named_at_the_deadline(check: object) -> None:
    with pytest.raises(AssertionError, match=r"not within 0 s: (functools|<method-wrapper)"):
        eventually_sync(check, 0)
