"""The soak's short form; ``make soak`` runs the long one."""

from __future__ import annotations

import os

import pytest

from benchmarks import soak


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_soak_leaves_nothing() -> None:
    """Every ending and every fault at once; see ``benchmarks/soak.py`` for what must hold afterwards."""
    parser = soak.arguments()
    args = parser.parse_args(["--quick", "--seed", os.environ.get("SLUICE_SEED", "1")])
    assert await soak.run(args)
