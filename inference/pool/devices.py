"""Which devices a pool uses. Never imports torch: the choice must stand before torch looks."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from inference.config import ModelSpec
from inference.errors import ConfigError

_DEVICE = re.compile(r"cpu(\+cpu)*|cuda:\d+(\+cuda:\d+)*")
_NUMBER = re.compile(r"cuda:(\d+)")


def parse_devices(text: str) -> list[str]:
    """``auto``, ``cpu`` or ``cuda:0,cuda:1``; ``cuda:0+cuda:1`` is one worker over two devices.

    (``cpu+cpu`` is that without a GPU: two processes that share a model.)

    Raises:
        ConfigError: a name that is none of these, or a device twice in one worker.
    """
    if text.strip() == "auto":
        return [f"cuda:{i}" for i in range(cuda_count())] or ["cpu"]
    devices = [d.strip() for d in text.split(",") if d.strip()]
    for device in devices:
        if not _DEVICE.fullmatch(device):
            raise ConfigError(
                f"SLUICE_DEVICES (--devices): {device!r} is none of auto, cpu, cuda:<n>, cuda:<n>+cuda:<m>"
            )
        parts = device.split("+")
        if "cpu" not in parts and len(set(parts)) < len(parts):
            raise ConfigError(f"SLUICE_DEVICES (--devices): {device!r} names a device twice")
    if not devices:
        raise ConfigError("SLUICE_DEVICES (--devices) is empty; use auto")
    return devices


def check_sharing(devices: Sequence[str], specs: Sequence[ModelSpec]) -> None:
    """See that a worker over several devices has what it can spread over them: one transformers model.

    Raises:
        ConfigError: other models, or several.
    """
    for device in devices:
        if "+" in device and [s.engine for s in specs] != ["transformers"]:
            named = ", ".join(f"{s.alias} ({s.engine})" for s in specs)
            raise ConfigError(
                f"SLUICE_DEVICES (--devices): a worker on {device} spreads one transformers model over its devices; "
                f"this pool serves {named}. Start a pool for each model (runworker --models ALIAS --devices ...)"
            )


def check_present(devices: Sequence[str], specs: Sequence[ModelSpec]) -> None:
    """See that the CUDA devices are there, as far as that shows without torch; the workers have the last word.

    Raises:
        ConfigError: one is not, and a model computes on it.
    """
    wanted = [int(n) for device in devices for n in _NUMBER.findall(device)]
    if not wanted or all(spec.engine in ("scripted", "openai") for spec in specs):
        return
    there, source = _cuda_devices()
    if there is not None and max(wanted) >= there:
        have = f"{there} CUDA device{'' if there == 1 else 's'} (from cuda:0)" if there else "no CUDA device"
        raise ConfigError(
            f"SLUICE_DEVICES (--devices): there is no cuda:{max(wanted)} here; {source} shows {have}. Use auto, or cpu"
        )


def cuda_count() -> int:
    """CUDA devices this process may use, by ``CUDA_VISIBLE_DEVICES`` or the driver's own tool."""
    return _cuda_devices()[0] or 0


def _cuda_devices() -> tuple[int | None, str]:
    """How many, and who says so; ``None`` where nobody does, which does not mean that there are none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([v for v in visible.split(",") if v.strip() and v.strip() != "-1"]), "CUDA_VISIBLE_DEVICES"
    try:
        listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None, ""
    if listing.returncode:
        return None, ""
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()), "nvidia-smi"


def environment(device: str) -> dict[str, str]:
    """Variables that show a worker its device and no other, and the name it has there."""
    if device.startswith("cpu"):
        return {"CUDA_VISIBLE_DEVICES": "", "SLUICE_WORKER_DEVICE": device}
    numbers = [part.removeprefix("cuda:") for part in device.split("+")]
    outer = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
    shown = [outer[int(n)] if int(n) < len(outer) else n for n in numbers]
    inner = "+".join(f"cuda:{i}" for i in range(len(shown)))
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown), "SLUICE_WORKER_DEVICE": inner}
