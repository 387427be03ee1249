"""Every Redis key, its type, its owner and its lifetime, in one place.

All names start with ``prefix`` (``sluice:`` unless set otherwise). The keys of
one request share the hash tag ``{id}``. A deployment on Redis Cluster sets a
prefix that is itself a hash tag (``{sluice}:``), which puts every key into one
slot, since the scripts that end a request also touch the indexes.

========================  ======  ==========================  ====================================
key                       type    written by                  lives until
========================  ======  ==========================  ====================================
``req:{id}``              hash    submit, claim, append,      settled; the record of a request
                                  attach, requeue
``log:{id}``              list    append, settle              settled; with a TTL of
                                                              ``log_retention`` where resumable
``end:{id}``              string  settle                      TTL ``log_retention``; the summary of an
                                                              ended resumable request
``live``                  zset    submit / settle             entry: settled (score: created ms)
``queue:<model>``         zset    submit, requeue / claim,    entry: claimed or settled (score:
                                  settle                      class and virtual time)
``running:<model>``       set     claim / settle, requeue     entry: settled or requeued
``fair:<model>``          hash    submit                      the queue is empty (last virtual time
                                                              per owner, and the global one)
``deadlines``             zset    submit, claim / settle      entry: settled (score: deadline ms, or the
                                                              end of its patience while it is queued)
``detached``              zset    detach / attach, settle     entry: re-attached or settled (score:
                                                              end of grace, ms)
``of:server:<id>``        set     submit, attach / settle     entry: settled, detached
``of:worker:<id>``        set     claim / settle, requeue     entry: settled or requeued
``servers`` ``workers``   set     heartbeats / reaper         entry: its owner is dead and reaped
``pools``
``beat:server:<id>``      string  server                      TTL ``heartbeat_ttl``
``beat:worker:<id>``      string  worker                      TTL ``heartbeat_ttl``
``beat:pool:<id>``        string  pool supervisor             TTL ``heartbeat_ttl``
``history``               list    settle                      bounded by ``history_size``
``outcomes``              hash    settle                      for ever; a dozen counters
``usage``                 hash    settle / servers            a server has taken it as a batch
``usage:batch``           hash    servers                     it is in the database
``limit:...``             string  apps (rate limits)          TTL
``restarts``              hash    pools                       for ever; workers that pools have
                                                              replaced, and what each living pool
                                                              has told
``series:load``           list    servers (charts)            bounded, TTL
``series:audits``         list    servers (health page)       bounded, TTL
========================  ======  ==========================  ====================================

Channels (publish/subscribe, never stored): ``to:server:<id>``,
``to:worker:<id>``, ``wake:<model>``.
"""

from __future__ import annotations

PRIORITIES = {"high": 0, "normal": 1, "low": 2}
"""Classes of the queue; a class is served only when those before it are empty."""

CLASS_SPAN = 2**40
"""Distance between the scores of two classes; the scripts know the same number."""


class Keys:
    """Builds key names for one prefix."""

    __slots__ = (
        "deadlines",
        "detached",
        "history",
        "live",
        "outcomes",
        "pools",
        "prefix",
        "restarts",
        "servers",
        "usage",
        "usage_batch",
        "workers",
    )

    def __init__(self, prefix: str = "sluice:") -> None:
        self.prefix = prefix
        self.live = f"{prefix}live"
        self.deadlines = f"{prefix}deadlines"
        self.detached = f"{prefix}detached"
        self.servers = f"{prefix}servers"
        self.workers = f"{prefix}workers"
        self.pools = f"{prefix}pools"
        self.restarts = f"{prefix}restarts"
        self.history = f"{prefix}history"
        self.outcomes = f"{prefix}outcomes"
        self.usage = f"{prefix}usage"
        self.usage_batch = f"{prefix}usage:batch"

    def request(self, request_id: str) -> str:
        return f"{self.prefix}req:{{{request_id}}}"

    def log(self, request_id: str) -> str:
        return f"{self.prefix}log:{{{request_id}}}"

    def end(self, request_id: str) -> str:
        return f"{self.prefix}end:{{{request_id}}}"

    def queue(self, model: str) -> str:
        return f"{self.prefix}queue:{model}"

    def running(self, model: str) -> str:
        return f"{self.prefix}running:{model}"

    def fair(self, model: str) -> str:
        return f"{self.prefix}fair:{model}"

    def of_server(self, server: str) -> str:
        return f"{self.prefix}of:server:{server}"

    def of_worker(self, worker: str) -> str:
        return f"{self.prefix}of:worker:{worker}"

    def server_beat(self, server: str) -> str:
        return f"{self.prefix}beat:server:{server}"

    def worker_beat(self, worker: str) -> str:
        return f"{self.prefix}beat:worker:{worker}"

    def pool_beat(self, pool: str) -> str:
        return f"{self.prefix}beat:pool:{pool}"

    def server_channel(self, server: str) -> str:
        return f"{self.prefix}to:server:{server}"

    def worker_channel(self, worker: str) -> str:
        return f"{self.prefix}to:worker:{worker}"

    def wake_channel(self, model: str) -> str:
        return f"{self.prefix}wake:{model}"
