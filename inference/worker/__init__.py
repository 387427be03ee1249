"""A worker: one process, one device (or one group of them), one engine per model it serves."""

MISCONFIGURED = 78
"""Exit status of a worker that cannot start as it is configured: another one could not, either."""

RETIRED = 79
"""Exit status of a worker that an operator has drained: its pool starts no other in its place."""
