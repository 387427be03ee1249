"""What every engine promises its worker; one suite for all."""

from __future__ import annotations

import asyncio

import pytest

from inference.engine.base import Engine
from inference.errors import EngineDied, Overloaded, TooLarge
from tests.conftest import ROOT
from tests.engine.conftest import CONTEXT, SLOTS, Kit
from tests.engine.contract_table import MARKS, promise
from tests.support import eventually

# Answers that last long enough to be interfered with; an upstream ends by itself at 40 words.
LONG = 400


def test_the_documents_name_every_promise() -> None:
    """The table is made by ``pytest tests/engine/test_contract.py --contract-table docs/development.md``."""
    text = (ROOT / "docs/development.md").read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]
    told = [line.split("|")[1].strip() for line in text.splitlines()[3:] if line]
    assert told == [
        promise(name) for name, value in globals().items() if "kit" in getattr(value, "__annotations__", {})
    ]
    assert "failed" not in text and "not run" not in text


async def test_loading_tells_what_the_engine_can_do(kit: Kit) -> None:
    rig = await kit.rig()
    assert isinstance(rig.engine, Engine)
    assert (rig.info.alias, rig.info.engine) == ("alias", kit.name)
    assert (rig.info.context_length, rig.info.slots) == (CONTEXT, SLOTS)
    assert rig.info.capacity_tokens <= SLOTS * CONTEXT
    assert rig.engine.free_slots() == SLOTS


async def test_answer_has_exactly_max_tokens_and_ends_with_length(kit: Kit) -> None:
    rig = await kit.rig()
    for most in (1, 2, 17):
        answer = await rig.run(kit.job(f"r{most}", max_tokens=most))
        assert len(answer.ids) == most
        assert answer.finish == "length"
        assert [output.finish for output in answer.outputs[:-1]] == [None] * (len(answer.outputs) - 1)
    await rig.quiet()


async def test_answer_arrives_in_several_outputs(kit: Kit) -> None:
    rig = await kit.rig()
    answer = await rig.run(kit.job(max_tokens=32))
    assert len(answer.outputs) > 4


async def test_text_comes_from_the_engine_or_from_its_ids_never_both(kit: Kit) -> None:
    rig = await kit.rig()
    answer = await rig.run(kit.job())
    if kit.exact:
        assert all(output.text is None for output in answer.outputs)
    else:
        assert "".join(output.text or "" for output in answer.outputs)


async def test_same_greedy_job_gives_the_same_ids_alone_and_among_others(kit: Kit) -> None:
    rig = await kit.rig()
    alone = await rig.run(kit.job("alone", max_tokens=24))
    together = await rig.run_all(
        [kit.job(f"r{n}", "hello" if n == 1 else f"other {n}", max_tokens=24) for n in range(SLOTS)]
    )
    assert together[1].ids == alone.ids
    if kit.exact:
        assert together[0].ids != alone.ids


async def test_many_jobs_all_end_and_leave_nothing(kit: Kit) -> None:
    rig = await kit.rig()
    answers = await rig.run_all([kit.job(f"r{n}", f"prompt {n}", max_tokens=1 + n % 9) for n in range(24)])
    assert [len(answer.ids) for answer in answers] == [1 + n % 9 for n in range(24)]
    await rig.quiet()


async def test_one_sink_call_carries_a_whole_step(kit: Kit) -> None:
    if not kit.exact:
        pytest.skip("an upstream's chunks arrive when they arrive")
    rig = await kit.rig()
    answers = [rig.submit(kit.job(f"r{n}", f"prompt {n}", max_tokens=32)) for n in range(SLOTS)]
    for answer in answers:
        await answer.finished()
    alike = set.intersection(*(set(answer.steps) for answer in answers))
    assert len(alike) >= 16, "most steps serve all sequences at once"


async def test_aborted_sequence_is_silent_at_once_and_frees_its_slot(kit: Kit) -> None:
    rig = await kit.rig()
    prompt = "hello" if kit.exact else "[slow]"
    answer = rig.submit(kit.job("gone", prompt, max_tokens=LONG))
    other = rig.submit(kit.job("stays", max_tokens=32))
    await answer.tokens(2)
    rig.engine.abort("gone")
    seen = len(answer.outputs)
    await other.finished()
    await rig.quiet()
    assert len(answer.outputs) == seen
    assert answer.finish is None
    assert len(other.ids) == 32
    if kit.upstream is not None:
        await kit.upstream.wait(lambda: kit.upstream and kit.upstream.broken_off == 1)


async def test_sequence_aborted_before_its_first_token_says_nothing(kit: Kit) -> None:
    rig = await kit.rig()
    answer = rig.submit(kit.job("gone", max_tokens=LONG))
    rig.engine.abort("gone")
    await rig.run(kit.job("next"))
    assert answer.outputs == []
    await rig.quiet()


async def test_aborts_of_unknown_and_ended_sequences_are_ignored(kit: Kit) -> None:
    rig = await kit.rig()
    rig.engine.abort("never seen")
    answer = await rig.run(kit.job("r1"))
    rig.engine.abort("r1")
    rig.engine.abort("r1")
    assert (await rig.run(kit.job("r2"))).ids == answer.ids
    assert rig.engine.free_slots() == SLOTS


async def test_id_may_be_used_again_after_an_abort(kit: Kit) -> None:
    rig = await kit.rig()
    rig.submit(kit.job("same", "first", max_tokens=LONG if kit.exact else 40))
    rig.engine.abort("same")
    answer = rig.submit(kit.job("same", "second", max_tokens=6))
    await answer.finished()
    assert len(answer.ids) == 6
    await rig.quiet()


async def test_abort_from_within_the_sink_is_heeded(kit: Kit) -> None:
    """A stop string is found while the step's outputs are being taken."""
    rig = await kit.rig()
    answers = {}

    def stop_first() -> None:
        rig.engine.abort("r0")

    answers = {n: rig.submit(kit.job(f"r{n}", f"prompt {n}", max_tokens=24)) for n in range(2)}
    first, changed = answers[0], answers[0].changed

    class Stopping(asyncio.Event):
        def set(self) -> None:
            stop_first()
            changed.set()

    first.changed = Stopping()
    await answers[1].finished()
    await rig.quiet()
    assert len(first.outputs) == 1


async def test_full_engine_says_so_and_takes_more_when_one_has_ended(kit: Kit) -> None:
    rig = await kit.rig()
    prompt = "hello" if kit.exact else "[slow]"
    for n in range(SLOTS):
        assert rig.engine.fits(kit.job(f"r{n}"))
        rig.submit(kit.job(f"r{n}", prompt, max_tokens=LONG))
    assert rig.engine.free_slots() == 0
    assert not rig.engine.fits(kit.job("more"))
    with pytest.raises(Overloaded):
        rig.engine.submit(kit.job("more"))
    assert rig.engine.stats().running + rig.engine.stats().waiting == SLOTS
    rig.engine.abort("r0")
    await eventually(lambda: rig.engine.fits(kit.job("more")), every=0.005)
    assert len((await rig.run(kit.job("more"))).ids) == 8


async def test_what_can_never_fit_is_refused_and_disturbs_nobody(kit: Kit) -> None:
    rig = await kit.rig()
    running = rig.submit(kit.job("runs", max_tokens=32))
    for job in (kit.job("big", max_tokens=CONTEXT + 1), kit.job("huge", max_tokens=100 * CONTEXT)):
        assert not rig.engine.fits(job)
        with pytest.raises(TooLarge):
            rig.engine.submit(job)
    if kit.exact:
        with pytest.raises(TooLarge):
            rig.engine.submit(kit.job("long", "x" * CONTEXT, max_tokens=1))
    assert len((await running.finished()).ids) == 32
    await rig.quiet()


async def test_prompt_and_answer_may_fill_the_context_to_the_last_token(kit: Kit) -> None:
    if not kit.exact:
        pytest.skip("the upstream judges")
    rig = await kit.rig()
    answer = await rig.run(kit.job(prompt="x" * (CONTEXT - 8), max_tokens=8))
    assert len(answer.ids) == 8


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1234}])
async def test_continuation_from_logged_ids_is_the_undisturbed_answer(kit: Kit, params: dict[str, float]) -> None:
    if not kit.exact:
        pytest.skip("an upstream can not continue; see test_openai")
    rig = await kit.rig()
    whole = (await rig.run(kit.job("whole", max_tokens=30, **params))).ids
    for cut in (1, 7, 29):
        rest = await rig.run(kit.job(f"cut{cut}", max_tokens=30, **params), whole[:cut])
        assert rest.ids == whole[cut:]
        assert rest.finish == "length"
    other = await kit.rig()
    assert (await other.run(kit.job("elsewhere", max_tokens=30, **params), whole[:11])).ids == whole[11:]


async def test_stop_token_ends_the_answer_hidden_and_named(kit: Kit) -> None:
    if not kit.exact:
        pytest.skip("an upstream's ids are not its own")
    rig = await kit.rig()
    free = (await rig.run(kit.job("free", max_tokens=24))).ids
    token = free[9]
    first = free.index(token)
    answer = await rig.run(kit.job("stopped", max_tokens=24, stop_token_ids=[token]))
    assert answer.ids == free[: first + 1]
    last = answer.outputs[-1]
    assert (last.finish, last.hidden, last.stop_match) == ("stop", 1, token)
    late = await rig.run(kit.job("late", max_tokens=24, stop_token_ids=[token], min_tokens=first + 3))
    assert len(late.ids) >= first + 3
    assert token not in late.ids[: first + 2]


async def test_logprobs_come_one_to_one_with_ids_and_are_finite(kit: Kit) -> None:
    if not kit.exact:
        pytest.skip("an upstream's log probabilities are not passed on")
    rig = await kit.rig()
    answer = await rig.run(kit.job(max_tokens=12, logprobs=3))
    assert [entry.token_id for entry in answer.logprobs] == answer.ids
    for entry in answer.logprobs:
        assert -1e4 < entry.logprob <= 0
        assert len(entry.top) == 3
        assert sorted((value for _, value in entry.top), reverse=True) == [value for _, value in entry.top]
    without = await rig.run(kit.job("without"))
    assert all(output.logprobs is None for output in without.outputs)


async def test_counters_grow_with_the_work(kit: Kit) -> None:
    rig = await kit.rig()
    before = rig.engine.stats()
    await rig.run(kit.job(max_tokens=9))
    await rig.quiet()
    after = rig.engine.stats()
    assert after.generated_tokens - before.generated_tokens == 9
    assert after.steps > before.steps
    assert after.prompt_tokens > before.prompt_tokens
    assert after.slots == SLOTS


async def test_close_ends_everything_silently_and_may_be_repeated(kit: Kit) -> None:
    rig = await kit.rig()
    prompt = "hello" if kit.exact else "[slow]"
    answer = rig.submit(kit.job(prompt=prompt, max_tokens=LONG))
    await answer.tokens(1)
    await rig.engine.close()
    seen = len(answer.outputs)
    await rig.engine.close()
    other = await kit.rig()
    await other.run(kit.job("meanwhile"))
    assert len(answer.outputs) == seen
    assert rig.deaths == 0
    assert rig.engine.free_slots() == 0
    with pytest.raises(EngineDied):
        rig.engine.submit(kit.job("late"))


async def test_engine_that_was_never_loaded_can_be_closed(kit: Kit) -> None:
    rig = await kit.rig(load=False)
    await rig.engine.close()
