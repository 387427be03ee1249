"""Child processes that do not outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

# Ignores SIGINT until the command has chosen what that does, asks the kernel for a SIGTERM
# when the parent goes (Linux only), then becomes the command.
# A preexec_fn would do the same, but may deadlock in a process that has threads.
_LAUNCHER = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
parent, argv = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 15)
    if os.getppid() != parent:
        sys.exit(1)
os.execvp(argv[0], argv)
"""


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    output: IO[Any] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own; it gets SIGTERM when this process ends, however it ends.

    Call it from a thread that lives as long as the child should (the main
    thread): Linux sends the signal when that thread ends. A session of its own
    keeps a Ctrl-C of the terminal from it, so that the parent decides the order
    in which things stop.

    Args:
        output: where stdout and stderr go; ``None`` leaves them as they are.

    Raises:
        OSError: this Python itself cannot be started.
    """
    # Held up until the launcher is far enough to ignore it: Python answers an early one with a traceback.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            env=env,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
