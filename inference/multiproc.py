"""Counting in several processes: a private folder in which each has files of its own.

``prometheus_client`` decides when it is imported whether it counts in memory or in
the folder that ``PROMETHEUS_MULTIPROC_DIR`` names. Whoever starts a tree of
processes makes such a folder for it, and removes it at the end. What a process
counted must outlive it, but not as a file of its own for ever: the files of the
dead are added up into one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, multiprocess, values
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict

# Parts of the library without types.
_Files: Any = MmapedDict
_Collector: Any = multiprocess.MultiProcessCollector

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_PREFIX = "sluice-metrics-"
_OWNER = "owner"
#: In the place of a process id, in the name of the file that holds what the dead have counted.
GONE = "gone"


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """The folder for a tree of processes: the one already named by the environment, else a new, private one."""
    given = os.environ.get(VARIABLE)
    if given:
        yield given
        return
    _sweep()
    made = tempfile.mkdtemp(prefix=_PREFIX)
    try:
        # Held as long as this process lives, however it ends; named only once it is locked.
        with open(Path(made) / "owner.new", "w") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            os.rename(owner.name, Path(made) / _OWNER)
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _sweep() -> None:
    """Remove the folders of trees that were killed."""
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if old.stat().st_uid == os.getuid():
                with open(old / _OWNER) as owner:
                    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old, ignore_errors=True)


class Merged:
    """Collects what all processes of a folder have counted; register it in a registry of its own.

    ``own``: with what this process counts in memory, where it was started without a folder.
    """

    def __init__(self, path: str, *, own: bool = True) -> None:
        self._path = path
        self._own = own

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        with locked(self._path):
            # One that has just been made, or whose process was killed just then, is empty.
            files = [str(file) for file in Path(self._path).glob("*.db") if file.stat().st_size]
            found = {metric.name: metric for metric in _Collector.merge(files)}
        if self._own and values.ValueClass is values.MutexValue:
            # This process was started without a folder and made one for its children.
            for metric in REGISTRY.collect():
                if metric.type in ("counter", "histogram"):
                    _add_samples(found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type)),
                                 metric)  # fmt: skip
        return found.values()


def _add_samples(target: Metric, source: Metric) -> None:
    sums = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in target.samples}
    for sample in source.samples:
        if not sample.name.endswith("_created"):
            key = (sample.name, tuple(sorted(sample.labels.items())))
            sums[key] = sums.get(key, 0.0) + sample.value
    target.samples = []
    for (name, labels), value in sums.items():
        target.add_sample(name, dict(labels), value)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Read the folder with nobody else adding up the dead meanwhile; adds them up first."""
    with open(Path(path) / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        bury(path)
        yield


def bury(path: str) -> int:
    """Add the files of processes that have ended to one file per type; gives how many. Needs the lock."""
    buried = 0
    for file in sorted(Path(path).glob("*.db")):
        kind, _, pid = file.stem.rpartition("_")
        if not pid.isdigit() or _alive(int(pid)):
            continue
        if kind in ("counter", "histogram", "summary") and file.stat().st_size:
            _add(file, Path(path) / f"{kind}_{GONE}.db")
        file.unlink()  # a gauge of a process that is gone says nothing
        buried += 1
    return buried


def _add(source: Path, target: Path) -> None:
    total = _Files(str(target))
    try:
        for key, value, timestamp, _ in _Files.read_all_values_from_file(str(source)):
            total.write_value(key, total.read_value(key)[0] + value, timestamp)
    finally:
        total.close()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # Killed, and not yet waited for by its parent: it counts nothing any more.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
