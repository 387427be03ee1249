"""The documents keep up with the code."""

from __future__ import annotations

import re

import pytest

from inference.config import Config
from inference.environ import env_name
from tests.conftest import ROOT


def test_every_setting_of_the_core_is_documented() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    missing = [name for name in map(env_name, Config.__struct_fields__) if f"`{name}`" not in text]
    assert missing == []


@pytest.mark.parametrize("page", [*sorted(p.name for p in (ROOT / "docs").glob("*.md")), "../README.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / "docs" / page
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    broken = [t for t in targets if "://" not in t and not (path.parent / t).resolve().exists()]
    assert broken == []


def test_every_key_is_listed_once() -> None:
    """``inference/keys.py`` is the list of what Sluice keeps in Redis."""
    source = (ROOT / "inference/keys.py").read_text()
    table = source.split('"""')[1]
    for kind in re.findall(r"\{prefix\}([a-z]+)|prefix\}([a-z]+):", source):
        name = next(filter(None, kind))
        assert name in table, name
