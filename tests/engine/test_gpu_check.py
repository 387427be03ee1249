"""What of the GPU check can run on a CPU does so here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_is_skipped(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 0
    assert "skipped" in capsys.readouterr().out


@pytest.mark.timeout(180)
def test_its_checks_run_on_a_cpu(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["attention", "graphs", "memory", "parallel", "failover"]
    assert gpu_check.main(["--device", "cpu", "--kills", "2", "--only", *names]) == 0
    out = capsys.readouterr().out
    assert "2 kills, 80 tokens" in out and "equal to the undisturbed answer" in out
    assert "8 of 8 answers on cpu+cpu equal those on cpu" in out
    assert "CUDA graphs False" in out and out.count("skipped") == 2


def test_a_failed_check_is_shown_and_counted(
    gpu_check: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(check: object) -> str:
        raise AssertionError("as expected")

    monkeypatch.setitem(gpu_check.CHECKS, "memory", broken)
    assert gpu_check.main(["--device", "cpu", "--only", "memory", "graphs"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and "as expected" in out
    assert "graphs     skipped" in out
