"""Connections to Redis, each owned by one long-lived task.

A task that serves a client may be cancelled at any moment; a Redis call that is
cancelled half-way leaves its reply in the connection for the next caller.
Therefore nobody outside this package awaits a connection: callers hand a
command to a :class:`Commander` and await a future.
"""

from inference.redisio.commander import Commander, Script
from inference.redisio.connect import connect
from inference.redisio.subscriber import Subscriber

__all__ = ["Commander", "Script", "Subscriber", "connect"]
