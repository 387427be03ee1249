"""Break each clean-up path on purpose and see that a test notices.

``make mutants`` copies the tree, makes one change at a time in the copy, runs the
tests that guard it there, and prints which one failed. Exit status 1 where a
change survives, does not apply, or the tests fail without any change.
``ARGS`` chooses mutations by words of their names; ``--list`` shows them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("apps", "benchmarks", "inference", "platform", "tests", "manage.py", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """One change: in ``file``, ``old`` becomes ``new``; ``tests`` must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


LIFE, OUTAGES, STORE = "tests/core/test_life.py", "tests/core/test_outages.py", "tests/core/test_store.py"
EXCHANGES = "tests/platform/test_exchanges.py"


def store(*names: str) -> tuple[str, ...]:
    """Store tests on one kind of server."""
    return (STORE, "-k", " or ".join(f"({n} and valkey)" for n in names))


def named(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{file}::{n}" for n in names)


MUTATIONS = [
    Mutation(
        "skip the finally of a request",
        "inference/gateway/gateway.py",
        "            if accepted:\n                await self._leave(stream, failure, submitted)",
        "            if accepted and failure is None:\n                await self._leave(stream, failure, submitted)",
        named(LIFE, "test_a_cancelled_task_settles_and_aborts_once"),
    ),
    Mutation(
        "settle only after the block is left",
        "inference/gateway/gateway.py",
        "            await asyncio.wait([note], timeout=_SETTLE_WAIT)",
        "            pass",
        named(LIFE, "test_a_stream_ends_and_leaves_nothing"),
    ),
    Mutation(
        "settle in the client's own task, no settler",
        "inference/gateway/gateway.py",
        "        note = self.settler.put(stream.id, self._outcome(stream, failure), grace=grace, after=after)\n",
        "        await self.store.settle(stream.id, self._outcome(stream, failure))\n        return\n",
        named(OUTAGES, "test_settling_outlives_a_task_that_is_cancelled_again_and_again"),
    ),
    Mutation(
        "the settler gives up at once",
        "inference/gateway/settler.py",
        "                self.retries += 1\n                await asyncio.sleep(backoff)",
        "                break",
        named(OUTAGES, "test_settling_goes_on_until_redis_answers"),
    ),
    Mutation(
        "settle while the submit is under way",
        "inference/gateway/settler.py",
        "            await asyncio.wait([note.after])",
        "            pass",
        named(LIFE, "test_cancelled_while_the_submit_is_under_way"),
    ),
    Mutation(
        "the abort is sent twice",
        "inference/store/lua/settle.lua",
        "  redis.call('PUBLISH', prefix .. 'to:worker:' .. rec.worker, cmsgpack.pack({'a', id, number('attempt')}))",
        "  for _ = 1, 2 do\n    redis.call('PUBLISH', prefix .. 'to:worker:' .. rec.worker, "
        "cmsgpack.pack({'a', id, number('attempt')}))\n  end",
        store("test_settle_sends_one_abort"),
    ),
    Mutation(
        "no abort is sent",
        "inference/store/lua/settle.lua",
        "if rec.state == 'running' and rec.finish == '' then\n  redis.call('PUBLISH'",
        "if false then\n  redis.call('PUBLISH'",
        store("test_settle_sends_one_abort"),
    ),
    Mutation(
        "settle without the queue entry",
        "inference/store/lua/settle.lua",
        "if redis.call('ZREM', prefix .. 'queue:' .. rec.model, id) == 1\n"
        "    and redis.call('EXISTS', prefix .. 'queue:' .. rec.model) == 0 then",
        "if false then",
        store("test_fifty_settle"),
    ),
    Mutation(
        "settle without the live index",
        "inference/store/lua/settle.lua",
        "redis.call('DEL', KEYS[1])\nredis.call('ZREM', KEYS[4], id)",
        "redis.call('DEL', KEYS[1])",
        store("test_fifty_settle"),
    ),
    Mutation(
        "settle without the worker's index",
        "inference/store/lua/settle.lua",
        "if rec.worker ~= '' then redis.call('SREM', prefix .. 'of:worker:' .. rec.worker, id) end",
        "",
        store("test_fifty_settle"),
    ),
    Mutation(
        "the record stays (settle is no compare-and-set)",
        "inference/store/lua/settle.lua",
        "redis.call('DEL', KEYS[1])\n",
        "",
        store("test_fifty_settle"),
    ),
    Mutation(
        "settle does not look at its guard",
        "inference/store/lua/settle.lua",
        "if ARGV[8] ~= '' and redis.call('HGET', KEYS[1], ARGV[8]) ~= ARGV[9] then return false end",
        "",
        store("test_settle_guard"),
    ),
    Mutation(
        "a kept log without a TTL",
        "inference/store/lua/settle.lua",
        "  redis.call('PEXPIRE', KEYS[2], ARGV[5])\n",
        "",
        store("test_logs_are_kept"),
    ),
    Mutation(
        "claim takes what has ended",
        "inference/store/lua/claim.lua",
        "if rec[1] == 'queued' then",
        "if true then",
        store("test_a_claim_skips", "test_claims_race", "test_settle"),
    ),
    Mutation(
        "append without fencing",
        "inference/store/lua/append.lua",
        "if rec[1] ~= ARGV[1] or rec[2] ~= ARGV[a + 1] then",
        "if false then",
        store("test_append_is_fenced"),
    ),
    Mutation(
        "append takes a frame twice",
        "inference/store/lua/append.lua",
        "if len ~= seq then redis.call('RPOP', log) end",
        "",
        store("test_append_takes"),
    ),
    Mutation(
        "requeue without counting attempts",
        "inference/store/lua/requeue.lua",
        "redis.call('HINCRBY', KEYS[1], 'lost', 1)",
        "redis.call('HINCRBY', KEYS[1], 'lost', 0)",
        store("test_requeue_counts", "test_reaper_requeues"),
    ),
    Mutation(
        "requeue takes from any worker",
        "inference/store/lua/requeue.lua",
        "if rec[1] ~= 'running' or rec[2] ~= ARGV[2] then",
        "if rec[1] ~= 'running' then",
        store("test_requeue_counts"),
    ),
    Mutation(
        "no bound on the queue",
        "inference/store/lua/submit.lua",
        "if queued + running >= tonumber(ARGV[2]) then",
        "if false then",
        store("test_queue_bound"),
    ),
    Mutation(
        "no fairness between owners",
        "inference/store/lua/submit.lua",
        "local tag = math.max(served, last) + 1",
        "local tag = now",
        store("test_one_owners_backlog"),
    ),
    Mutation(
        "attach leaves the request among the detached",
        "inference/store/lua/attach.lua",
        "redis.call('ZREM', KEYS[2], ARGV[1])\n",
        "",
        store("test_detach_attach"),
    ),
    Mutation(
        "the reaper does not look for dead servers",
        "inference/reaper.py",
        "            for server in dead_servers:\n                await self.dead_server(server)\n",
        "",
        store("test_reaper_ends"),
    ),
    Mutation(
        "the reaper does not look for dead workers",
        "inference/reaper.py",
        "            for worker in dead_workers:\n                await self.dead_worker(worker)\n",
        "",
        store("test_reaper_requeues"),
    ),
    Mutation(
        "the reaper is off",
        "inference/reaper.py",
        "                await self.reap()\n            except StoreUnavailable:",
        "                pass\n            except StoreUnavailable:",
        named(LIFE, "test_deadline"),
    ),
    Mutation(
        "the reaper repairs no index",
        "inference/reaper.py",
        "        await self._expired()\n        await self._repair()",
        "        await self._expired()",
        store("test_reaper_repairs"),
    ),
    Mutation(
        "the reaper trusts heartbeats right after an outage",
        "inference/reaper.py",
        "return time.monotonic() >= self._trust_from",
        "return True",
        store("test_reaper_does_not_judge"),
    ),
    Mutation(
        "no poll behind the server's messages",
        "inference/gateway/hub.py",
        "                await self._check()\n",
        "",
        named(OUTAGES, "test_messages_lost_all_along"),
    ),
    Mutation(
        "no search for a server's strays",
        "inference/gateway/hub.py",
        "                await self._find_strays()\n",
        "",
        named(OUTAGES, "test_a_submit_that_arrives_after_its_settle"),
    ),
    Mutation(
        "no search for a worker's strays",
        "inference/worker/worker.py",
        "                await self._find_strays()\n",
        "",
        named(OUTAGES, "test_a_claim_whose_reply_is_lost"),
    ),
    Mutation(
        "no poll behind the worker's messages",
        "inference/worker/worker.py",
        "                if length < 0:\n                    self._abort(request_id)",
        "                pass",
        named(OUTAGES, "test_aborts_lost"),
    ),
    Mutation(
        "an abort does not free the engine's slot",
        "inference/worker/worker.py",
        "            self._models[seq.job.model].engine.abort(request_id)\n            self._outbox.drop(request_id)",
        "            self._outbox.drop(request_id)",
        named(LIFE, "test_a_reader_that_leaves_early_cancels"),
    ),
    Mutation(
        "nobody watches the outbox",
        "inference/worker/outbox.py",
        "            self._task.add_done_callback(self._on_failure)\n",
        "",
        named(OUTAGES, "test_an_outbox_that_fails_ends_the_worker"),
    ),
    Mutation(
        "a log read and the fast path both deliver",
        "inference/gateway/stream.py",
        "            if frame.seq == self._received + 1:\n                self._take(frame)",
        "            self._take(frame)",
        named(OUTAGES, "test_the_fast_path_overtakes_a_read_of_the_log"),
    ),
    Mutation(
        "a failed log read ends the stream",
        "inference/gateway/stream.py",
        "        except StoreUnavailable:\n",
        "        except KeyboardInterrupt:\n",
        named(OUTAGES, "test_a_log_that_cannot_be_read_is_read_again"),
    ),
    Mutation(
        "the older reader is not told",
        "inference/store/lua/attach.lua",
        "  redis.call('PUBLISH', ARGV[4] .. 'to:server:' .. rec[2], cmsgpack.pack({'x', ARGV[1], ARGV[3]}))\n",
        "",
        named(LIFE, "test_the_older_reader_is_told"),
    ),
    Mutation(
        "a full Redis is an answer",
        "inference/redisio/commander.py",
        "(not isinstance(reply, ResponseError) or _is_outage(reply))",
        "not isinstance(reply, ResponseError)",
        named(OUTAGES, "test_a_full_redis_is_an_outage"),
    ),
]


def apply(mutation: Mutation, tree: Path) -> str | None:
    """Make the change; gives the original text, ``None`` where the place is not found once."""
    path = tree / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return None
    path.write_text(text.replace(mutation.old, mutation.new))
    return text


def run_tests(tree: Path, arguments: tuple[str, ...]) -> tuple[bool, str]:
    """Whether the tests pass in the tree, and which one failed first."""
    env = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'platform'}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout", "30", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=300, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) \S*?::(\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 0:
        return True, ""
    return False, failed[1] if failed else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``make mutants``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("words", nargs="*", help="only mutations whose names have one of these words")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    chosen = [m for m in MUTATIONS if not args.words or any(w in m.name for w in args.words)]
    if args.list:
        print("\n".join(m.name for m in chosen))
        return 0
    bad = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sluice-mutants-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
            elif source.exists():
                shutil.copy(source, tree / name)
        everything = tuple(dict.fromkeys(t for m in chosen for t in m.tests if "::" in t))
        sound, failed = run_tests(tree, everything) if everything else (True, "")
        print(f"without any mutation: {'all pass' if sound else f'FAILS: {failed}'}", flush=True)
        bad += not sound
        print("\n| mutation | killed by |\n|---|---|")
        for mutation in chosen:
            original = apply(mutation, tree)
            if original is None:
                bad += 1
                print(f"| {mutation.name} | **NOT APPLIED**: the code in {mutation.file} has changed |", flush=True)
                continue
            survived, killer = run_tests(tree, mutation.tests)
            (tree / mutation.file).write_text(original)
            bad += survived
            print(f"| {mutation.name} | {'**SURVIVED**' if survived else killer} |", flush=True)
    print(f"\n{len(chosen)} mutations, {bad} survived or were not applied, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
