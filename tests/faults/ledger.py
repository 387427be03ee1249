"""Books that must balance: the metrics of all processes against what their logs say of each request.

The log has one line for each request that ended, written by the process that ended
it. Metrics are sums, kept elsewhere; the history in Redis may be lost with Redis. So
a request that is counted twice, or not at all, or with other figures, shows here.

``docs/metrics.md`` lists what may legitimately be uncounted; the same cases are
named below, and nothing else is let pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_LINE = re.compile(r"request (\S+) ended: (\w+)\((\w+)\), (\d+) \+ (\d+) tokens")


class Ended(NamedTuple):
    """One line of the log."""

    state: str
    reason: str
    prompt_tokens: int
    generated_tokens: int


def read(logs: Iterable[str]) -> dict[str, Ended]:
    """Every request that ended, by id. Fails where one ended twice."""
    found: dict[str, Ended] = {}
    for log in logs:
        for request_id, state, reason, prompt, generated in _LINE.findall(log):
            assert request_id not in found, f"{request_id} ended twice"
            found[request_id] = Ended(state, reason, int(prompt), int(generated))
    return found


@dataclass
class Allowance:
    """What a test knows to be uncounted, for a reason.

    Attributes:
        killed: SIGKILLs of processes that settle requests. Each may have hit between the moment Redis did
            what it was told and the moment the process counted it: one request started and one ended.
        reread: ids whose stream had more than one reader, or whose server was killed with the gaps it had
            measured: their time between tokens may be measured in part.
        all_reread: the same for every request.
    """

    killed: int = 0
    reread: set[str] = field(default_factory=set)
    all_reread: bool = False


def balance(ended: Mapping[str, Ended], counted: Mapping[str, float], allowed: Allowance) -> None:
    """Compare; ``counted`` has the sums of the metrics by name.

    Raises:
        AssertionError: started is not ended, or a sum is not what the log says.
    """
    started = counted["sluice_requests_started_total"]
    sums = counted["sluice_requests_total"]
    off = abs(started - sums)
    assert off <= allowed.killed, f"{started:g} were started and {sums:g} have ended"
    assert abs(sums - len(ended)) <= allowed.killed, f"{sums:g} are counted and {len(ended)} logged as ended"
    assert counted["sluice_request_duration_seconds_count"] == sums
    if off or sums != len(ended):
        return  # which one is missing is not known, so its tokens are not, either
    tokens = [e.generated_tokens for e in ended.values()]
    _same(counted, "sluice_generated_tokens_total", sum(tokens))
    _same(counted, "sluice_prompt_tokens_total", sum(e.prompt_tokens for e in ended.values()))
    _same(counted, "sluice_time_to_first_token_seconds_count", sum(n > 0 for n in tokens))
    # A token fewer than there are. Of a request that did not finish, the last ones may have been logged when
    # its reader had left.
    most = sum(max(0, n - 1) for n in tokens)
    whole = [] if allowed.all_reread else [e for i, e in ended.items() if i not in allowed.reread]
    least = sum(max(0, e.generated_tokens - 1) for e in whole if e.state == "finished")
    gaps = counted["sluice_inter_token_latency_seconds_count"]
    assert least <= gaps <= most, f"{gaps:g} gaps between tokens, of {least} to {most}"


def _same(counted: Mapping[str, float], name: str, want: float) -> None:
    assert counted[name] == want, f"{name} is {counted[name]:g} and the log says {want:g}"


NAMES = (
    "sluice_requests_started_total",
    "sluice_requests_total",
    "sluice_request_duration_seconds_count",
    "sluice_generated_tokens_total",
    "sluice_prompt_tokens_total",
    "sluice_time_to_first_token_seconds_count",
    "sluice_inter_token_latency_seconds_count",
)
"""The sums that :func:`balance` wants."""

AT_REST = (
    "sluice_requests_inflight",
    "sluice_queue_depth",
    "sluice_requests_detached",
    "sluice_oldest_inflight_age_seconds",
    "sluice_engine_running",
    "sluice_engine_waiting",
)
"""Gauges that are 0 where nothing is in flight."""
