"""The engine without a model: its pace, its endings, the faults it makes on demand."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from inference.engine.scripted import ScriptedEngine, ScriptedOptions, ScriptedTokenizer
from inference.engine.scripted_tokenizer import EOS
from inference.errors import ConfigError, EngineDied, TooLarge
from inference.messages import Grammar, Job, SamplingParams
from inference.text import TextStream
from tests.engine.rig import Rig

TOKENIZER = ScriptedTokenizer()
Make = Callable[[str], Awaitable[Rig]]


def job(name: str = "r1", prompt: str = "hello", **params: Any) -> Job:
    params = {"max_tokens": 2000, "temperature": 0.0, **params}
    return Job(name, "alias", TOKENIZER.encode(prompt), SamplingParams(**params))


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    rigs: list[Rig] = []

    async def made(options: str = "") -> Rig:
        rig = Rig(ScriptedEngine(ScriptedOptions.parse(options), alias="alias"))
        rigs.append(rig)
        return await rig.load()

    yield made
    for rig in rigs:
        await rig.engine.close()


class TestOptions:
    def test_all_are_read(self) -> None:
        options = ScriptedOptions.parse("rate=50,context=128,slots=2,prefill=0.5,cache=256,faults=1,say=true,load=0.1")
        assert options == ScriptedOptions(
            rate=50, context=128, slots=2, prefill=0.5, cache=256, faults=True, say=True, load=0.1
        )
        assert ScriptedOptions.parse("default") == ScriptedOptions.parse("") == ScriptedOptions()

    @pytest.mark.parametrize("text", ["speed=1", "rate=fast", "rate=-1", "context=0", "slots=1.5", "rate"])
    def test_malformed_ones_are_refused_at_once(self, text: str) -> None:
        with pytest.raises(ConfigError, match="scripted engine"):
            ScriptedOptions.parse(text)


class TestAnswers:
    async def test_ends_by_itself_with_a_hidden_eos(self, make: Make) -> None:
        rig = await make("")
        answer = await rig.run(job())
        last = answer.outputs[-1]
        assert (last.ids, last.finish, last.hidden, last.stop_match) == ([EOS], "stop", 1, None)
        assert 16 < len(answer.ids) < 260

    async def test_length_depends_on_the_prompt(self, make: Make) -> None:
        rig = await make("")
        answers = await rig.run_all([job(f"r{n}", f"prompt {n}") for n in range(8)])
        assert len({len(answer.ids) for answer in answers}) > 4

    async def test_min_tokens_and_ignore_eos_hold_the_end_off(self, make: Make) -> None:
        rig = await make("")
        assert len((await rig.run(job("r1", min_tokens=500))).ids) == 501
        ignored = await rig.run(job("r2", ignore_eos=True))
        assert len(ignored.ids) == 2000
        assert ignored.finish == "length"

    async def test_seed_counts_only_where_there_is_a_temperature(self, make: Make) -> None:
        rig = await make("")
        params: list[dict[str, Any]] = [
            {"seed": 1},
            {"seed": 2},
            {"seed": 1, "temperature": 1.0},
            {"seed": 2, "temperature": 1.0},
        ]
        answers = await rig.run_all([job(f"r{n}", **each) for n, each in enumerate(params)])
        ids = [tuple(answer.ids) for answer in answers]
        assert ids[0] == ids[1]
        assert len(set(ids)) == 3

    async def test_text_holds_characters_of_several_tokens(self, make: Make) -> None:
        rig = await make("")
        answers = await rig.run_all([job(f"r{n}", f"prompt {n}", ignore_eos=True, max_tokens=400) for n in range(4)])
        for answer in answers:
            stream = TextStream(TOKENIZER)
            text = "".join(stream.push(output.ids, output.hidden).text for output in answer.outputs)
            text += stream.finish(answer.finish or "")
            assert "\ufffd" not in text
            assert any(ord(letter) > 127 for letter in text)

    async def test_say_mark_gives_the_answer(self, make: Make) -> None:
        rig = await make("say=1")
        answer = await rig.run(job(prompt="please [[say:<b>Grüße 🙂</b>]]"))
        assert TOKENIZER.decode(answer.ids) == "<b>Grüße 🙂</b>"
        assert answer.finish == "stop"

    async def test_simple_grammars_are_obeyed_and_others_fail_the_request(self, make: Make) -> None:
        rig = await make("")
        choice = await rig.run(job("r1", grammar=Grammar("choice", '["red", "blue"]')))
        assert (TOKENIZER.decode(choice.ids), choice.finish) == ("red", "stop")
        json_object = await rig.run(job("r2", grammar=Grammar("json_object")))
        assert json.loads(TOKENIZER.decode(json_object.ids))
        assert (await rig.run(job("r3", grammar=Grammar("regex", "a+")))).finish == "error"

    async def test_log_that_holds_the_whole_answer_is_only_finished(self, make: Make) -> None:
        rig = await make("")
        whole = await rig.run(job())
        again = await rig.run(job("r2"), whole.ids)
        assert (again.ids, again.finish) == ([], "stop")
        cut = await rig.run(job("r3", max_tokens=5), whole.ids[:5])
        assert (cut.ids, cut.finish) == ([], "length")

    async def test_cache_is_shared_by_what_runs(self, make: Make) -> None:
        rig = await make("context=100,cache=150,slots=8,rate=5")
        first = job("r1", "x" * 20, max_tokens=70)
        rig.submit(first)
        assert not rig.engine.fits(job("r2", "x" * 20, max_tokens=70))
        assert rig.engine.fits(job("r3", "x" * 20, max_tokens=30))
        with pytest.raises(TooLarge):
            rig.engine.submit(job("r4", "x" * 20, max_tokens=90))
        rig.engine.abort("r1")
        assert rig.engine.stats().blocks_used == 0


class TestPace:
    async def test_rate_is_kept_for_each_of_many(self, make: Make) -> None:
        rig = await make("rate=200,slots=16")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await rig.run_all([job(f"r{n}", ignore_eos=True, max_tokens=60) for n in range(16)])
        taken = loop.time() - begun
        # Never early: 60 steps of 5 ms. Late by what a busy machine takes.
        assert taken >= 0.29
        assert rig.calls <= 62, "one step serves all"

    async def test_prefill_takes_its_time_and_stalls_nobody(self, make: Make) -> None:
        rig = await make("prefill=0.3,rate=500")
        running = rig.submit(job("runs", "x", ignore_eos=True))
        await running.tokens(1)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        waiting = rig.submit(job("waits", "x" * 1000))
        assert rig.engine.stats().waiting == 1
        before = len(running.ids)
        await waiting.tokens(1)
        assert loop.time() - begun >= 0.3
        assert len(running.ids) > before + 5

    async def test_short_prefill_is_not_held_up_by_a_long_one_before_it(self, make: Make) -> None:
        rig = await make("prefill=60")
        rig.submit(job("long", "x" * 2000))
        assert (await rig.run(job("short", "x", max_tokens=3), limit=30)).finish == "length"

    async def test_idle_engine_makes_no_steps(self, make: Make) -> None:
        rig = await make("rate=1000")
        await rig.run(job(max_tokens=3))
        steps = rig.engine.stats().steps
        other = await make("rate=1000")
        await other.run(job(max_tokens=50, ignore_eos=True))
        assert rig.engine.stats().steps == steps

    async def test_flat_out_leaves_the_loop_to_others(self, make: Make) -> None:
        rig = await make("slots=8,context=100000")
        answers = [rig.submit(job(f"r{n}", ignore_eos=True, max_tokens=50_000)) for n in range(8)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert all(answer.finish is None for answer in answers)
        assert rig.engine.stats().steps > 0


class TestFaults:
    async def test_marks_do_nothing_unless_allowed(self, make: Make) -> None:
        rig = await make("")
        assert (await rig.run(job(prompt="[[raise]] [[error]] [[kill]] [[say:x]]"))).finish == "stop"

    async def test_error_fails_one_and_spares_the_rest(self, make: Make) -> None:
        rig = await make("faults=1")
        bad = rig.submit(job("bad", "[[error@5]]"))
        good = rig.submit(job("good", max_tokens=30, ignore_eos=True))
        await bad.finished()
        assert (len(bad.ids), bad.finish) == (5, "error")
        assert bad.error
        assert len((await good.finished()).ids) == 30
        await rig.quiet()

    async def test_raise_ends_the_engine_once(self, make: Make) -> None:
        rig = await make("faults=1")
        other = rig.submit(job("other"))
        rig.submit(job("bad", "[[raise@3]]"))
        assert isinstance(await asyncio.wait_for(rig.death, 10), EngineDied)
        assert rig.deaths == 1
        assert other.finish is None
        assert rig.engine.free_slots() == 0
        with pytest.raises(EngineDied):
            rig.engine.submit(job("late"))

    async def test_second_attempt_succeeds_but_not_with_poison(self, make: Make) -> None:
        rig = await make("faults=1")
        whole = await rig.run(job("whole", "[[raise@400]]"))
        resumed = await rig.run(job("resumed", "[[raise@400]]"), whole.ids[:3])
        assert resumed.ids == whole.ids[3:]

    async def test_hang_stops_the_steps_but_not_the_loop(self, make: Make) -> None:
        rig = await make("faults=1")
        answer = rig.submit(job(prompt="[[hang@4]]"))
        await answer.tokens(4)
        for _ in range(50):
            await asyncio.sleep(0)
        steps = rig.engine.stats().steps
        other = await make("rate=1000")
        await other.run(job(max_tokens=50, ignore_eos=True))
        assert (len(answer.ids), rig.engine.stats().steps) == (4, steps)
        assert rig.engine.stats().running == 1

    @pytest.mark.parametrize(("mark", "resumed"), [("kill@4", 0), ("poison@4", 0), ("poison@4", 9)])
    def test_kill_takes_the_process_at_its_token(self, mark: str, resumed: int) -> None:
        code = f"""
            import asyncio
            from tests.engine.test_scripted import Rig, ScriptedEngine, ScriptedOptions, job

            async def main():
                rig = await Rig(ScriptedEngine(ScriptedOptions.parse("faults=1"), alias="a")).load()
                answer = rig.submit(job(prompt="[[{mark}]]"), [97] * {resumed})
                rig.answers["r1"].changed.set = lambda: print(len(answer.ids), flush=True)
                await asyncio.Event().wait()

            asyncio.run(main())
        """
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert done.stdout.split() == ([] if resumed else ["1", "2", "3", "4"])


class TestTokenizer:
    def test_prompts_are_bytes_and_special_tokens(self) -> None:
        assert TOKENIZER.encode("aé") == [97, 0xC3, 0xA9]
        assert TOKENIZER.encode("<|im_end|>a") == [EOS, 97]
        assert EOS not in TOKENIZER.encode("<|im_end|>", trusted=False)
        assert TOKENIZER.decode(TOKENIZER.encode("x 🙂 y")) == "x 🙂 y"

    def test_chat_content_forges_no_turn(self) -> None:
        ids = TOKENIZER.render_chat([{"role": "user", "content": "a<|im_end|>"}])
        assert ids.count(EOS) == 1
        text = TOKENIZER.decode(ids, skip_special=False)
        assert text == "<|im_start|>user\na<|im_end|><|im_end|>\n<|im_start|>assistant\n"

    def test_null_content_and_parts(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        ids = TOKENIZER.render_chat([{"role": "assistant", "content": None}, {"role": "user", "content": parts}])
        assert "None" not in TOKENIZER.decode(ids)
        assert "ab" in TOKENIZER.decode(ids)

    def test_continued_message_stays_open(self) -> None:
        ids = TOKENIZER.render_chat([{"role": "assistant", "content": "so far"}], continue_final=True)
        assert TOKENIZER.decode(ids[-6:]) == "so far"

    def test_limit_is_kept(self) -> None:
        assert len(TOKENIZER.encode_bounded("x" * 10, 10)) == 10
        for text in ("x" * 11, "x" * 10_000_000):
            with pytest.raises(TooLarge):
                TOKENIZER.encode_bounded(text, 10)
            with pytest.raises(TooLarge):
                TOKENIZER.render_chat([{"role": "user", "content": text}], limit=10)
