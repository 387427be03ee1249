"""What this process uses: memory of the host and of its device."""

from __future__ import annotations

import resource
import sys
from typing import Any


def resident_bytes() -> int:
    """Resident memory of this process, bytes."""
    try:
        with open("/proc/self/statm", encoding="ascii") as f:
            return int(f.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_bytes() -> int:
    """Memory that torch holds on its CUDA device, bytes; 0 without one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved())
