"""Ties the life of a process to that of the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, *, status: int = 70) -> None:
    """Ask the kernel to kill this process when its parent ends, however that happens (Linux).

    Ends it at once, with ``status``, where ``parent`` is its parent no longer.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(status)
