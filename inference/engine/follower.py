"""A process that shares a model with an engine elsewhere: ``python -m inference.engine.follower``.

Started by :class:`inference.engine.transformers.parallel.Group`, which says
what it is for. Like a worker, it is tied to its parent and its signals are set
before anything slow is imported.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal

from inference.parent import die_with_parent

logger = logging.getLogger("sluice.engine")

FAILED = 70


def main() -> int:
    """Follow until the first process stops the loop; the exit status."""
    parser = argparse.ArgumentParser(prog="sluice-follower")
    for name in ("--folder", "--alias", "--device", "--config"):
        parser.add_argument(name, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the first process drains, and this one goes on until it has
    import msgspec

    from inference.config import Config
    from inference.engine.transformers.parallel import follow
    from inference.errors import SluiceError
    from inference.logs import configure

    configure(f"{options.alias} on {options.device}")
    error: BaseException | None
    try:
        error = follow(options.folder, options.alias, options.device, msgspec.json.decode(options.config, type=Config))
    except SluiceError as unusable:
        error = unusable
    if error is not None:
        logger.critical("%s on %s ends: %s", options.alias, options.device, error, extra={"event": "rank_failed"})
    return FAILED if error is not None else 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Nothing is left to do in order, and a communication library may wait for partners that are gone.
    os._exit(status)
