"""The tables of settings in ``docs/operations.md``: every variable that the code reads, with its default."""

from __future__ import annotations

import re
from typing import Any

from apps.accounts.quota import NAMES
from inference.config import Config
from sluice.conf import ServerConfig
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "operations.md"
_ROW = re.compile(r"^\| `([A-Z_]+)` \| ([^|]+) \| ([^|]+) \|$", re.M)
_READ = re.compile(r"""environ(?:\.get\(|\[)\s*["']([A-Z][A-Z_]+)["']""")
_UNIT = {"KiB": 2**10, "MiB": 2**20}
#: Not for operators: set by one of our processes for its children, or owned by somebody else.
INTERNAL = {
    "SLUICE_WORKER_DEVICE": "a pool tells its workers",
    "WORLD_SIZE": "torch.distributed, within one worker",
    "CUDA_VISIBLE_DEVICES": "CUDA's own",
    "XDG_CACHE_HOME": "the desktop's own; named with SLUICE_CACHE_DIR",
    "OTEL_SDK_DISABLED": "OpenTelemetry's own",
    "OTEL_SERVICE_NAME": "OpenTelemetry's own",
    "DJANGO_SETTINGS_MODULE": "Django's own",
}


def table() -> dict[str, str]:
    """Variable -> default, as the page says."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = _ROW.findall(section)
    assert len({name for name, _, _ in rows}) == len(rows), "a variable stands in two rows"
    return {name: default for name, default, _ in rows}


def fields() -> dict[str, Any]:
    """Variable -> default of every field of the settings classes. What two of them have is the same setting."""
    found: dict[str, Any] = {}
    for cls in (Config, ServerConfig):
        for name, value in zip(cls.__struct_fields__, cls.__struct_defaults__, strict=True):
            variable = "REDIS_URL" if name == "redis_url" else f"SLUICE_{name.upper()}"
            assert found.setdefault(variable, value) == value, f"{variable} has two defaults"
    return found


def read_by_hand() -> set[str]:
    """Variables that code reads elsewhere."""
    files = [ROOT / "manage.py"]
    for folder in ("inference", "apps", "platform"):
        files += (ROOT / folder).rglob("*.py")
    return {name for file in files for name in _READ.findall(file.read_text(encoding="utf-8"))}


def test_every_setting_is_in_the_table_and_no_other() -> None:
    known = set(fields()) | {f"SLUICE_LIMIT_{name.upper()}" for name in NAMES} | read_by_hand()
    known |= {"PROMETHEUS_MULTIPROC_DIR"}  # read by prometheus_client, too
    assert set(table()) == known - set(INTERNAL)


def test_defaults_are_those_of_the_code() -> None:
    said = table()
    wrong = {name: (said[name], value) for name, value in fields().items() if not _agrees(said[name], value)}
    assert wrong == {}


def _agrees(cell: str, value: Any) -> bool:
    cell = cell.strip()
    if value is None or value == "":
        return not cell[0].isdigit()  # said in words, or as what is worked out instead
    if isinstance(value, bool):
        return cell == str(value).lower()
    if isinstance(value, (int, float)):
        number = re.match(r"(\d+(?:\.\d+)?)(?: (KiB|MiB))?", cell)
        return number is not None and float(number[1]) * _UNIT.get(number[2] or "", 1) == value
    return cell == f"`{value}`"
