"""The transformers engine on a tiny random model: endings, limits, faults, batches."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.config import Config
from inference.engine.base import Engine
from inference.engine.transformers import TransformersEngine
from inference.engine.transformers.batching import SplitRunner
from inference.engine.transformers.scheduler import FairScheduler, Pace, StepLog
from inference.errors import EngineDied, ModelUnavailable, Overloaded, TooLarge
from inference.messages import Job
from tests.engine.rig import CONTEXT, DEVICE, EOS, VOCABULARY, Answer, Rig, job, tiny_config, write_tiny_model
from tests.support import eventually


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def make_rig(folder: str) -> AsyncIterator[Callable[..., Any]]:
    rigs: list[Rig] = []

    async def make(**changes: Any) -> Rig:
        engine = TransformersEngine(folder, alias="tiny", device=DEVICE, config=tiny_config(**changes))
        rigs.append(Rig(engine))
        return await rigs[-1].load()

    yield make
    for rig in rigs:
        await rig.engine.close()


@pytest.fixture
async def rig(make_rig: Callable[..., Any]) -> Rig:
    return await make_rig()


def stopping_id(ids: list[int], start: int) -> tuple[int, int]:
    """An id and where it first occurs, at or after ``start``."""
    for place in range(start, len(ids)):
        if ids[place] not in ids[:place] and ids[place] != EOS:
            return ids[place], place
    raise AssertionError("the tiny model repeats itself; choose another prompt")


async def test_what_the_makers_suggest_is_told(tmp_path: Path, rig: Rig) -> None:
    """Of ``generation_config.json``, what a request could ask for."""
    assert rig.info.suggested == {}
    folder = write_tiny_model(tmp_path)
    file = tmp_path / "generation_config.json"
    makers = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    file.write_text(json.dumps(json.loads(file.read_text()) | makers))
    tuned = Rig(TransformersEngine(folder, alias="tuned", device=DEVICE, config=tiny_config()))
    assert (await tuned.load()).info.suggested == {"temperature": 0.6, "top_p": 0.95}
    await tuned.engine.close()


# Endings


async def test_it_is_an_engine_and_says_what_it_serves(rig: Rig) -> None:
    assert isinstance(rig.engine, Engine)
    assert rig.info.alias == "tiny" and rig.info.engine == "transformers"
    assert rig.info.context_length == CONTEXT
    assert rig.info.capacity_tokens == 4096
    assert rig.info.slots == rig.engine.free_slots() == 8
    stats = rig.engine.stats()
    assert stats.steps == 0 and stats.generated_tokens == 0 and stats.blocks_used == 0


def test_a_step_under_way_as_the_counters_begin_anew_does_not_count() -> None:
    """The warm-up's last token may be delivered, and the counters set back, before its step has ended."""
    scheduler = FairScheduler.__new__(FairScheduler)
    scheduler.pace, scheduler.log, scheduler._requests_to_cancel = Pace(64), StepLog(), set()
    for steps in (0, 1):
        scheduler._open_step = (time.perf_counter(), 1, 0)
        if not steps:
            scheduler.log.reset()
        scheduler.clear_cancelled_requests()
        assert scheduler.log.steps == steps


async def test_length_ends_exactly(rig: Rig) -> None:
    for count in (1, 2, 17):
        answer = await rig.run(job(f"n{count}", max_tokens=count, ignore_eos=True))
        assert len(answer.ids) == count and answer.finish == "length"
        assert answer.outputs[-1].hidden == 0 and answer.outputs[-1].stop_match is None
    await rig.quiet()
    assert rig.engine.stats().generated_tokens == 20


async def test_eos_ends_and_is_hidden(rig: Rig) -> None:
    answer = await rig.run(job("a", max_tokens=20, logit_bias={EOS: 100.0}, min_tokens=4))
    assert len(answer.ids) == 5 and answer.ids[-1] == EOS
    assert answer.finish == "stop" and answer.outputs[-1].hidden == 1
    assert answer.outputs[-1].stop_match is None


async def test_eos_can_be_ignored(rig: Rig) -> None:
    answer = await rig.run(job("a", max_tokens=6, logit_bias={EOS: 100.0}, ignore_eos=True))
    assert answer.ids == [EOS] * 6 and answer.finish == "length" and answer.outputs[-1].hidden == 0


async def test_stop_token_ids_end_and_are_named(rig: Rig) -> None:
    whole = await rig.run(job("whole", max_tokens=40, ignore_eos=True))
    token, place = stopping_id(whole.ids, 5)
    answer = await rig.run(job("a", max_tokens=40, ignore_eos=True, stop_token_ids=[token]))
    assert answer.ids == whole.ids[: place + 1]
    assert answer.finish == "stop" and answer.outputs[-1].hidden == 1
    assert answer.outputs[-1].stop_match == token


async def test_eos_on_the_last_allowed_token_counts_as_stop(rig: Rig) -> None:
    answer = await rig.run(job("a", max_tokens=1, logit_bias={EOS: 100.0}))
    assert answer.ids == [EOS] and answer.finish == "stop"


async def test_logprobs_are_one_to_one(rig: Rig) -> None:
    jobs = [job(f"a{k}", max_tokens=9, ignore_eos=True, logprobs=k, temperature=k / 2) for k in range(4)]
    for k, answer in enumerate(await rig.run_all([*jobs, job("none")])):
        if k == 4:
            assert all(output.logprobs is None for output in answer.outputs)
            continue
        assert [entry.token_id for entry in answer.logprobs] == answer.ids
        assert all(len(entry.top) == k for entry in answer.logprobs)
        assert all(len(output.logprobs or []) == len(output.ids) for output in answer.outputs)


async def test_greedy_equals_the_plain_model(rig: Rig, folder: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([list(b"hello")])
    with torch.no_grad():
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False, eos_token_id=-1
        )[0, prompt.shape[1] :].tolist()
    answer = await rig.run(job("a", max_tokens=30, ignore_eos=True))
    assert answer.ids == expected


# Refusals


async def test_too_large_is_refused_exactly_at_the_edge(make_rig: Callable[..., Any]) -> None:
    by_context = await make_rig(context_length=200)
    by_cache = await make_rig(cache_tokens=320)
    for rig, limit in ((by_context, 200), (by_cache, 320)):
        prompt = [65] * (limit - 4)
        with pytest.raises(TooLarge, match=str(limit)):
            rig.submit(job("over", prompt, max_tokens=5))
        assert not rig.engine.fits(job("over", prompt, max_tokens=5))
        assert rig.engine.fits(job("edge", prompt, max_tokens=4))
        answer = await rig.run(job("edge", prompt, max_tokens=4, ignore_eos=True))
        assert len(answer.ids) == 4 and answer.finish == "length"
        answer = await rig.run(job("one", [65] * (limit - 1), max_tokens=1))
        assert len(answer.ids) == 1
        answer = await rig.run(job("long", [65], max_tokens=limit - 1, ignore_eos=True))
        assert len(answer.ids) == limit - 1
        await rig.quiet()


async def test_slots_are_counted_and_overloaded_is_raised(make_rig: Callable[..., Any]) -> None:
    rig = await make_rig(max_running=2)
    assert rig.engine.free_slots() == 2
    rig.submit(job("a", max_tokens=400, ignore_eos=True))
    rig.submit(job("b", max_tokens=400, ignore_eos=True))
    assert rig.engine.free_slots() == 0 and not rig.engine.fits(job("c"))
    with pytest.raises(Overloaded):
        rig.submit(job("c"))
    rig.engine.abort("a")
    await rig.answers["b"].tokens(len(rig.answers["b"].ids) + 3)
    assert rig.engine.free_slots() == 1
    await rig.run(job("c"))


async def test_fits_goes_by_the_next_stretch_of_what_is_running(make_rig: Callable[..., Any]) -> None:
    rig = await make_rig(cache_tokens=1024)
    rig.submit(job("a", [65] * 300, max_tokens=600, ignore_eos=True))
    assert rig.engine.free_slots() == 7
    assert not rig.engine.fits(job("b", max_tokens=600))
    assert rig.engine.fits(job("c", max_tokens=100))
    with pytest.raises(Overloaded):
        rig.submit(job("b", max_tokens=600))
    rig.engine.abort("a")
    await rig.quiet()
    assert rig.engine.fits(job("b", max_tokens=600))


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "logprobs": 1, "frequency_penalty": 0.3}])
async def test_answers_that_outgrow_the_cache_together_pause_but_do_not_change(
    make_rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    monkeypatch.setattr("inference.engine.transformers.admission.STRETCH", 16)
    monkeypatch.setattr("inference.engine.transformers.admission.RENEW_BELOW", 4)
    rig = await make_rig(cache_tokens=640, max_running=8)
    jobs = [job(f"a{i}", [97 + i] * 30, max_tokens=250, ignore_eos=True, seed=i, **params) for i in range(6)]
    solo = [await rig.run(Job(f"solo{each.id}", "tiny", each.prompt_ids, each.params)) for each in jobs]
    answers = [rig.submit(each) for each in jobs]
    for expected, answer in zip(solo, answers, strict=True):
        await answer.finished()
        assert answer.ids == expected.ids and answer.finish == "length"
        if "logprobs" in params:
            assert [entry.token_id for entry in answer.logprobs] == answer.ids
    await rig.quiet()
    assert not rig.death.done()


@pytest.mark.parametrize("prompt", [[], [65, VOCABULARY], [-1], [65, 10**9]])
async def test_impossible_prompts_fail_alone(rig: Rig, prompt: list[int]) -> None:
    mate = rig.submit(job("mate", max_tokens=20, ignore_eos=True))
    bad = await rig.run(job("bad", prompt))
    assert bad.finish == "error" and bad.ids == [] and bad.error
    assert len((await mate.finished()).ids) == 20
    assert (await rig.run(job("worse"), [VOCABULARY])).finish == "error"
    await rig.quiet()


# Abort


def watch_cancels(engine: Any) -> tuple[dict[str, int], dict[str, int]]:
    """After how many steps each cancel was asked for, and after how many its cache was free."""
    asked: dict[str, int] = {}
    freed: dict[str, int] = {}
    manager = engine._batching.manager
    scheduler = manager.batch_processor.scheduler
    cancel, report = manager.cancel_request, scheduler.on_cancelled

    def cancel_request(key: str) -> None:
        asked[key] = engine._log.steps
        cancel(key)

    def on_cancelled(keys: list[str]) -> None:
        freed.update(dict.fromkeys(keys, engine._log.steps))
        report(keys)

    manager.cancel_request, scheduler.on_cancelled = cancel_request, on_cancelled
    return asked, freed


async def test_abort_at_any_moment_frees_the_slot_and_silences(rig: Rig) -> None:
    asked, freed = watch_cancels(rig.engine)
    companion = rig.submit(job("companion", max_tokens=1500, ignore_eos=True))
    choose = random.Random(1)
    for round_ in range(40):
        name = f"a{round_}"
        answer = rig.submit(job(name, [65] * choose.choice([1, 40, 700]), max_tokens=300, ignore_eos=True))
        moment = choose.choice(["at once", "next turn", "first token", "later"])
        if moment == "next turn":
            await asyncio.sleep(0)
        elif moment == "first token":
            await answer.tokens(1)
        elif moment == "later":
            await answer.tokens(choose.randrange(2, 30))
        rig.engine.abort(name)
        rig.engine.abort(name)
        silent = len(answer.outputs)
        while rig.engine.free_slots() < 7:
            await companion.tokens(len(companion.ids) + 1)
        await companion.tokens(len(companion.ids) + 1)
        assert len(answer.outputs) == silent
    assert companion.finish is None
    rig.engine.abort("companion")
    rig.engine.abort("never heard of")
    await rig.quiet()
    assert len(freed) >= 35
    assert all(freed[key] - asked[key] <= 2 for key in freed)


async def test_abort_while_the_last_token_is_on_its_way(rig: Rig) -> None:
    for round_ in range(30):
        answer = rig.submit(job(f"a{round_}", max_tokens=3, ignore_eos=True))
        await answer.tokens(2)
        rig.engine.abort(f"a{round_}")
    await rig.quiet()


async def test_a_second_attempt_replaces_the_first(rig: Rig) -> None:
    solo = await rig.run(job("solo", max_tokens=30, ignore_eos=True))
    first = rig.submit(job("a", max_tokens=30, ignore_eos=True))
    await first.tokens(5)
    prior = first.ids[:5]
    second = await rig.run(job("a", max_tokens=30, ignore_eos=True), prior)
    assert prior + second.ids == solo.ids
    await rig.quiet()


# Resuming


RESUMED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "seed": 12, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 1.2, "seed": 13, "frequency_penalty": 1.0, "logit_bias": {70: 3.0}},
    {"temperature": 1.0, "seed": None},
    {"temperature": 1.0, "seed": 14, "min_tokens": 20, "ignore_eos": False, "logit_bias": {EOS: 50.0}},
]


@pytest.mark.parametrize("params", RESUMED)
async def test_a_resumed_answer_is_the_undisturbed_one(rig: Rig, params: dict[str, Any]) -> None:
    params = {"max_tokens": 40, "ignore_eos": True, **params}
    whole = await rig.run(job("a", "a prompt of some length", **params))
    noise = [job(f"noise{i}", [66 + i] * (30 * i + 1), max_tokens=60, ignore_eos=True) for i in range(5)]
    for each in noise:
        rig.submit(each)
    for cut in (1, 13, len(whole.ids) - 1):
        rest = await rig.run(job("a", "a prompt of some length", **params), whole.ids[:cut])
        assert whole.ids[:cut] + rest.ids == whole.ids
        assert rest.finish == whole.finish


async def test_an_answer_that_was_complete_ends_at_once(rig: Rig) -> None:
    whole = await rig.run(job("a", max_tokens=6, ignore_eos=True))
    again = await rig.run(job("a", max_tokens=6, ignore_eos=True), whole.ids)
    assert again.ids == [] and again.finish == "length"
    stopped = await rig.run(job("b", max_tokens=6), [65, EOS])
    assert stopped.ids == [] and stopped.finish == "stop"
    await rig.quiet()


# Batches


def random_params(choose: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": choose.randrange(1, 24),
        "temperature": choose.choice([0.0, 0.0, 1e-6, 0.7, 1.0, 1.8]),
        "seed": choose.choice([None, 1, 2**40]),
        "logprobs": choose.choice([None, None, 0, 3]),
        "ignore_eos": choose.random() < 0.5,
    }
    options: dict[str, list[Any]] = {
        "top_p": [0.0, 0.3, 0.95],
        "top_k": [1, 5, 50],
        "min_p": [0.05, 0.5],
        "repetition_penalty": [0.8, 1.2],
        "presence_penalty": [-1.0, 1.5],
        "frequency_penalty": [-0.2, 0.9],
        "logit_bias": [{65: 100.0}, {66: -100.0, 67: 2.5}, {EOS: 4.0}],
        "min_tokens": [1, 10],
        "stop_token_ids": [[70, 71], [VOCABULARY + 5]],
    }
    for name, values in options.items():
        if choose.random() < 0.25:
            params[name] = choose.choice(values)
    return params


async def test_wf_04_mixed_parameters_do_not_leak(rig: Rig) -> None:
    choose = random.Random(4)
    prompts = ["x", "hello there", "0123456789" * 7, [97] * 300]
    solo: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        solo[i] = (await rig.run(job(f"solo{i}", prompt, max_tokens=24, ignore_eos=True))).ids
    jobs: list[Job] = []
    greedy: dict[str, tuple[int, int]] = {}
    for n in range(500):
        which = choose.randrange(len(prompts))
        if n % 3 == 0:
            count = choose.randrange(1, 25)
            jobs.append(job(f"g{n}", prompts[which], max_tokens=count, ignore_eos=True))
            greedy[f"g{n}"] = (which, count)
        else:
            jobs.append(job(f"r{n}", prompts[which], **random_params(choose)))
    answers = await rig.run_all(jobs)
    for each, answer in zip(jobs, answers, strict=True):
        assert answer.finish in ("stop", "length"), (each.params, answer.error)
        assert 1 <= len(answer.ids) <= each.params.max_tokens
        if each.params.logprobs is not None:
            assert [entry.token_id for entry in answer.logprobs] == answer.ids
        if each.id in greedy:
            which, count = greedy[each.id]
            assert answer.ids == solo[which][:count]
    sampled = [each for each in jobs if each.id.startswith("r") and each.params.seed is not None][:40]
    for each, answer in zip(jobs, answers, strict=True):
        if each in sampled:
            alone = await rig.run(Job(f"alone-{each.id}", "tiny", each.prompt_ids, each.params))
            assert alone.ids == answer.ids, each.params
    await rig.quiet()
    assert not rig.death.done()


async def test_sampling_outside_of_the_captured_forward_pass_is_the_same(make_rig: Callable[..., Any]) -> None:
    """What CUDA graphs need, without CUDA: the forward pass leaves logits behind, sampling comes after."""
    choose = random.Random(8)
    jobs = [job(f"j{n}", [97 + n % 5] * choose.choice([1, 50, 400]), **random_params(choose)) for n in range(40)]
    plain, split = await make_rig(prefill_budget=64), await make_rig(prefill_budget=64)
    processor = split.engine._batching.manager.batch_processor
    processor.model_runner = SplitRunner(processor.model_runner, 8, VOCABULARY, torch.device(DEVICE))
    expected = await plain.run_all(jobs)
    for one, other in zip(expected, await split.run_all(jobs), strict=True):
        assert one.ids == other.ids and one.finish == other.finish
        assert [e.token_id for e in one.logprobs] == [e.token_id for e in other.logprobs]


async def test_one_sink_call_per_step(rig: Rig) -> None:
    answers = [rig.submit(job(f"a{i}", max_tokens=30, ignore_eos=True)) for i in range(8)]
    for answer in answers:
        await answer.finished()
    assert rig.calls <= 34
    assert len({tuple(answer.ids) for answer in answers}) == 1


async def test_shared_prefixes_are_found(rig: Rig) -> None:
    prefix = [97 + i % 20 for i in range(600)]
    first = await rig.run(job("a", [*prefix, 65], max_tokens=2))
    assert first.outputs[0].cached == 0
    second = await rig.run(job("b", [*prefix, 66], max_tokens=2))
    assert second.outputs[0].cached == 576
    assert rig.engine.stats().cached_prompt_tokens == 576
    assert rig.engine.stats().blocks_cached >= 18


async def test_the_prefix_cache_gives_way_to_requests(make_rig: Callable[..., Any]) -> None:
    rig = await make_rig(cache_tokens=1024, prefill_budget=128)
    expected: dict[int, list[int]] = {}
    for turn in range(3):
        for letter in range(6):
            prompt = [97 + letter] * 400
            answer = await rig.run(job(f"{turn}-{letter}", prompt, max_tokens=20, ignore_eos=True))
            assert answer.ids == expected.setdefault(letter, answer.ids)
    both = [rig.submit(job(f"p{i}", [100 + i] * 300, max_tokens=150, ignore_eos=True)) for i in range(2)]
    for answer in both:
        assert len((await answer.finished()).ids) == 150
    await rig.quiet()
    stats = rig.engine.stats()
    assert stats.blocks_cached <= stats.blocks_total == 32


async def test_blocks_are_conserved_over_random_churn(make_rig: Callable[..., Any]) -> None:
    rig = await make_rig(cache_tokens=2048, prefill_budget=64)
    choose = random.Random(9)
    names: list[str] = []
    for n in range(150):
        each = job(
            f"a{n}",
            [97 + choose.randrange(3)] * choose.randrange(1, 500),
            max_tokens=choose.randrange(1, 60),
            temperature=choose.choice([0.0, 1.0]),
            ignore_eos=True,
        )

        def fits(each: Job = each) -> bool:
            if not (fitting := rig.engine.fits(each)) and choose.random() < 0.5:
                rig.engine.abort(choose.choice(names))
            return fitting

        await eventually(fits, 60, every=0.001)
        rig.submit(each)
        names.append(each.id)
    for name in names:
        if choose.random() < 0.5:
            rig.engine.abort(name)
    await rig.quiet()
    stats = rig.engine.stats()
    assert stats.blocks_used == 0
    engine = rig.engine
    assert isinstance(engine, TransformersEngine)
    book = engine._admission
    assert book is not None and book.reserved == 0 and len(engine._registry) == 0 and not book.live and not book.leaving


async def test_streams_live_while_a_long_prompt_is_prefilled(make_rig: Callable[..., Any]) -> None:
    rig = await make_rig(prefill_budget=64, cache_tokens=8192)
    streams = [rig.submit(job(f"s{i}", max_tokens=1500, ignore_eos=True)) for i in range(3)]
    for stream in streams:
        await stream.tokens(10)
    before = [len(stream.ids) for stream in streams]
    steps = rig.engine.stats().steps
    long = rig.submit(job("long", [97 + i % 7 for i in range(1900)], max_tokens=2))
    short = rig.submit(job("short", "hi", max_tokens=2, ignore_eos=True))
    await short.tokens(1)
    assert long.ids == [], "the short request waited for the long prompt"
    await long.tokens(1)
    taken = rig.engine.stats().steps - steps
    assert taken >= 1900 // 64
    for stream, count in zip(streams, before, strict=True):
        # Every step that took in a piece of the prompt also gave each stream its token.
        assert len(stream.ids) - count >= taken - 3


def test_the_pace_keeps_a_mixed_step_within_four_usual_ones() -> None:
    pace = Pace(512)
    assert pace.chunk(0) == 512, "nobody is streaming, nobody is kept waiting"
    assert pace.chunk(1) == 64, "nothing is known yet"
    pace.learn(0, 512, 1.024)  # 2 ms for each prompt token
    pace.learn(4, 0, 0.050)
    assert pace.chunk(4) == 75  # 3 x 50 ms / 2 ms
    pace.learn(4, 75, 0.050 + 0.150)
    assert pace.chunk(4) == 75
    for _ in range(100):
        pace.learn(4, 0, 0.0001)
    assert pace.chunk(4) == 16, "a prompt always gets on"
    for _ in range(100):
        pace.learn(4, 0, 10.0)
    assert pace.chunk(4) == 512
    assert Pace(8).chunk(1) == 8


async def test_long_prompts_are_not_starved_by_short_ones(make_rig: Callable[..., Any]) -> None:
    rig = await make_rig(prefill_budget=64)
    long = rig.submit(job("long", [97 + i % 7 for i in range(1500)], max_tokens=1))
    for n in range(2000):
        if long.finish:
            break
        while rig.engine.free_slots():
            rig.submit(job(f"s{n}-{rig.engine.free_slots()}", [98 + n % 20] * 60, max_tokens=1))
        await eventually(lambda: long.finish or rig.engine.free_slots(), every=0.001)
    await long.finished(1.0)


# Faults


async def test_wf_03_an_exception_in_a_step_ends_the_engine(rig: Rig) -> None:
    engine = rig.engine
    assert isinstance(engine, TransformersEngine)
    answers = [rig.submit(job(f"a{i}", max_tokens=1000, ignore_eos=True)) for i in range(4)]
    await answers[3].tokens(5)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory, say")

    engine._loaded.model.register_forward_pre_hook(fail)
    error = await asyncio.wait_for(rig.death, 2.0)
    assert isinstance(error, EngineDied) and "out of memory" in str(error)
    assert engine.free_slots() == 0 and not engine.fits(job("x"))
    with pytest.raises(EngineDied):
        rig.submit(job("x"))
    await asyncio.sleep(0)
    assert rig.deaths == 1
    assert [answer.finish for answer in answers] == [None] * 4, "another worker takes them up"


async def test_an_exception_in_the_sampler_ends_the_engine(rig: Rig) -> None:
    rig.submit(job("a", max_tokens=1000, ignore_eos=True))
    await rig.answers["a"].tokens(3)
    engine: Any = rig.engine
    engine._batching.manager.logit_processor._sampler = None  # "NoneType is not callable", in the middle of a step
    assert isinstance(await asyncio.wait_for(rig.death, 2.0), EngineDied)


async def test_an_error_of_one_request_leaves_the_others(rig: Rig) -> None:
    mates = [rig.submit(job(f"m{i}", max_tokens=40, ignore_eos=True)) for i in range(3)]
    banned = dict.fromkeys(range(VOCABULARY), -100.0)
    for count in (10, 1):
        bad = await rig.run(job("bad", max_tokens=count, logit_bias=banned))
        assert bad.finish == "error" and bad.error and bad.ids == []
    for mate in mates:
        assert len((await mate.finished()).ids) == 40
    await rig.quiet()


async def test_the_thread_that_loads_ends(rig: Rig) -> None:
    """One that stayed would keep an OpenMP team beside that of the generation thread, and slow down every step."""
    await rig.run(job("a", max_tokens=2))
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith(("load", "asyncio"))}, names


async def test_close_is_idempotent_and_leaves_no_thread(folder: str) -> None:
    before = set(threading.enumerate())
    engine = TransformersEngine(folder, alias="tiny", device=DEVICE, config=tiny_config())
    rig = await Rig(engine).load()
    answer = rig.submit(job("a", max_tokens=1000, ignore_eos=True))
    await answer.tokens(2)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineDied):
        rig.submit(job("b"))
    assert engine.free_slots() == 0 and rig.deaths == 0
    await eventually(lambda: not {t for t in threading.enumerate() if t not in before and "asyncio" not in t.name}, 5)


@pytest.mark.parametrize("damage", ["missing", "no weights", "cut weights", "nonsense"])
async def test_damaged_models_are_named(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if damage != "missing":
        write_tiny_model(folder)
        weights = folder / "model.safetensors"
        if damage == "no weights":
            weights.unlink()
        elif damage == "cut weights":
            weights.write_bytes(weights.read_bytes()[:1000])
        else:
            (folder / "config.json").write_text("{")
    engine = TransformersEngine(str(folder), alias="tiny", device=DEVICE, config=tiny_config())
    with pytest.raises(ModelUnavailable, match="model"):
        await Rig(engine).load()


async def test_a_cache_without_room_is_named(folder: str) -> None:
    config = tiny_config(cache_tokens=2**34)
    with pytest.raises(ModelUnavailable, match="no room"):
        await Rig(TransformersEngine(folder, alias="tiny", device=DEVICE, config=config)).load()


async def test_context_length_can_be_lowered(make_rig: Callable[..., Any]) -> None:
    rig = await make_rig(context_length=128)
    assert rig.info.context_length == 128
    with pytest.raises(TooLarge):
        rig.submit(job("a", max_tokens=124))


async def test_one_slot_is_enough(make_rig: Callable[..., Any]) -> None:
    rig = await make_rig(max_running=1)
    for n in range(3):
        answer: Answer = await rig.run(job(f"a{n}", max_tokens=5, ignore_eos=True))
        assert len(answer.ids) == 5


async def test_the_cache_is_sized_unasked(folder: str) -> None:
    rig = await Rig(TransformersEngine(folder, alias="tiny", device=DEVICE, config=Config(max_running=4))).load()
    assert rig.info.capacity_tokens == 4 * CONTEXT
    await rig.engine.close()
