"""The environment variables that are ours, by name: a misspelt one is said instead of being ignored in silence."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from difflib import get_close_matches

from apps.accounts.quota import NAMES
from inference.config import Config
from inference.environ import env_name
from sluice.conf import ServerConfig

PREFIX = "SLUICE_"
#: Read by one part alone, and so no field of the settings classes.
SINGLE = frozenset({
    "SLUICE_ADMIN_PASSWORD", "SLUICE_ADMIN_USER", "SLUICE_API_KEY", "SLUICE_ASGI_APPLICATION", "SLUICE_UPSTREAM_KEY",
    "SLUICE_URL", "SLUICE_WORKER_DEVICE",
})  # fmt: skip
#: Set once it has been said, for the processes that are started from here.
SAID = "SLUICE_NAMES_CHECKED"
#: Kubernetes tells each pod of every service; one named sluice-... looks like a setting.
_SERVICE = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)")


def known() -> frozenset[str]:
    """Every name that begins with ``SLUICE_`` and that something reads."""
    fields = {env_name(field) for cls in (Config, ServerConfig) for field in cls.__struct_fields__}
    limits = {f"SLUICE_LIMIT_{name.upper()}" for name in NAMES}
    return frozenset(name for name in fields | limits | SINGLE | {SAID} if name.startswith(PREFIX))


def unknown(environ: MutableMapping[str, str]) -> list[str]:
    """A sentence for each name that nothing reads; none where a process that started this one has said them."""
    if environ.get(SAID):
        return []
    environ[SAID] = "1"
    names = known()
    lines = []
    for name in sorted(environ):
        # Those of the tests are read by tests.
        if not name.startswith(PREFIX) or name in names or name.startswith("SLUICE_TEST_"):
            continue
        if _SERVICE.fullmatch(name) or environ[name].startswith(("tcp://", "udp://", "sctp://")):
            continue
        near = get_close_matches(name, names, n=1, cutoff=0.8)
        meant = f"did you mean {near[0]}?" if near else "docs/operations.md has all."
        lines.append(f"{name} is no setting and has no effect; {meant}")
    return lines
