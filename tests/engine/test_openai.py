"""The engine in front of an OpenAI-compatible upstream, good ones and bad ones."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from inference.config import Config
from inference.engine.openai_stream import set_parameters
from inference.engine.openai_tokenizer import UNKNOWN_CONTEXT, EstimatingTokenizer
from inference.engine.openai_upstream import OpenAIEngine
from inference.errors import ConfigError, ModelUnavailable, UpstreamError
from inference.messages import Grammar, Job, SamplingParams
from tests.engine.rig import Answer, Rig
from tests.engine.upstream import Upstream
from tests.support import find_free_port

SECRET = "the prompt itself"


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as server:
        yield server


@pytest.fixture
async def rig(upstream: Upstream) -> AsyncIterator[Rig]:
    rig = await Rig(engine_for(upstream.url + "#words")).load()
    yield rig
    await rig.engine.close()


def engine_for(target: str, **settings: Any) -> OpenAIEngine:
    return OpenAIEngine(target, alias="alias", config=Config(**settings))


def job(name: str, prompt: str, **body: Any) -> Job:
    content = {
        "model": "alias",
        "messages": [{"role": "user", "content": f"{SECRET} {prompt}"}],
        "max_tokens": 50,
        **body,
    }
    return Job(name, "alias", [0], SamplingParams(max_tokens=content["max_tokens"]), prompt_text=json.dumps(content))


def text_of(answer: Answer) -> str:
    return "".join(output.text or "" for output in answer.outputs)


async def test_prompt_goes_on_with_the_upstreams_name_and_a_stream(rig: Rig, upstream: Upstream) -> None:
    answer = await rig.run(job("r1", "hi", stream=False, user="u", max_tokens=2))
    body = upstream.bodies[0]
    assert body["path"] == "/v1/chat/completions"
    assert (body["model"], body["stream"], body["user"]) == ("words", True, "u")
    assert body["messages"][0]["content"] == f"{SECRET} hi"
    assert text_of(answer) == " the -0 the -1"
    assert (answer.finish, len(answer.ids), answer.outputs[-1].cached) == ("length", 2, 3)


class TestParameters:
    def sent(self, params: SamplingParams, *, limited: bool = True, **body: Any) -> dict[str, Any]:
        set_parameters(body, params, limited=limited)
        return body

    def test_understood_parameters_stand_in_place_of_what_the_body_says(self) -> None:
        params = SamplingParams(7, temperature=0.5, top_p=0.9, stop=["x"], logit_bias={5: -1.0}, top_k=3, seed=11)
        sent = self.sent(params, n=3, max_tokens=9, temperature=2, seed=10, frequency_penalty=1)
        assert sent == {
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["x"],
            "logit_bias": {"5": -1.0},
            "top_k": 3,
            "seed": 11,
        }

    def test_limit_keeps_the_name_that_the_client_used(self) -> None:
        assert self.sent(SamplingParams(7), max_completion_tokens=9, max_tokens=9) == {
            "max_completion_tokens": 7,
            "temperature": 1.0,
            "top_p": 1.0,
        }

    def test_limit_that_nobody_asked_for_is_left_to_the_upstream(self) -> None:
        assert "max_tokens" not in self.sent(SamplingParams(500_000), limited=False)

    def test_seed_is_sent_only_where_the_client_gave_one(self) -> None:
        assert "seed" not in self.sent(SamplingParams(7, seed=1))

    def test_grammars(self) -> None:
        sent = self.sent(SamplingParams(7, grammar=Grammar("json_schema", '{"type": "object"}')))
        assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}
        sent = self.sent(SamplingParams(7, grammar=Grammar("json_object")))
        assert sent["response_format"] == {"type": "json_object"}
        with pytest.raises(UpstreamError, match="regex"):
            self.sent(SamplingParams(7, grammar=Grammar("regex", "a+")))


async def test_completion_goes_to_the_completions_endpoint(rig: Rig, upstream: Upstream) -> None:
    answer = await rig.run(
        Job("r1", "alias", [0], SamplingParams(50), prompt_text='{"prompt": "once", "max_tokens": 50}')
    )
    assert upstream.bodies[0]["path"] == "/v1/completions"
    assert text_of(answer) == "".join(upstream.words("once", 50))
    assert answer.finish == "stop"


async def test_key_is_sent(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_UPSTREAM_KEY", "sk-test")
    rig = await Rig(engine_for(upstream.url + "#words")).load()
    await rig.run(job("r1", "hi"))
    await rig.engine.close()
    assert upstream.bodies[0]["key"] == "Bearer sk-test"


async def test_tool_call_comes_out_as_text(rig: Rig) -> None:
    answer = await rig.run(job("r1", "[tools]"))
    assert text_of(answer) == '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>\n'
    assert (answer.finish, len(answer.ids)) == ("stop", 9)


async def test_unusual_line_separators_stay_within_their_event(rig: Rig) -> None:
    answer = await rig.run(job("r1", "[separator]", max_tokens=2))
    assert text_of(answer) == " the -0\u2028\x85x the -1\u2028\x85x"


@pytest.mark.parametrize(
    ("mark", "words", "tokens"),
    [
        ("[status 400]", "answered 400 (context_length_exceeded)", 0),
        ("[status 401]", "refuses our key", 0),
        ("[status 429]", "overloaded", 0),
        ("[status 500]", "answered 500", 0),
        ("[break 0]", "broke", 0),
        ("[break 3]", "broke", 3),
        ("[cut 3]", "broke off the answer", 3),
        ("[garbage 3]", "no answer", 3),
        ("[error 3]", "failed while answering", 3),
    ],
)
async def test_failure_ends_that_request_alone(
    rig: Rig, mark: str, words: str, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "inference")
    bad, good = await rig.run_all([job("bad", mark), job("good", "fine")])
    assert bad.finish == "error"
    assert bad.error is not None
    assert words in bad.error
    assert SECRET not in bad.error + caplog.text
    assert len(bad.ids) == tokens
    assert good.finish == "stop"
    assert not rig.death.done()
    await rig.quiet()


async def test_body_that_is_none_is_an_error_for_the_request(rig: Rig) -> None:
    for text in (None, "", "[]", "{"):
        answer = await rig.run(Job("r1", "alias", [0], SamplingParams(5), prompt_text=text))
        assert answer.finish == "error"


async def test_upstream_that_goes_away_fails_requests_with_a_sentence(upstream: Upstream) -> None:
    rig = await Rig(engine_for(upstream.url)).load()
    await upstream.__aexit__()
    answer = await rig.run(job("r1", "hi"))
    assert (answer.finish, answer.error) == ("error", "The upstream server can not be reached.")
    await rig.engine.close()


async def test_upstream_that_stops_talking_is_given_up(upstream: Upstream) -> None:
    rig = await Rig(engine_for(upstream.url, stall_timeout=0.2)).load()
    answer = await rig.run(job("r1", "[slow]"))
    assert (answer.finish, answer.error) == ("error", "The upstream server did not answer in time.")
    assert len(answer.ids) == 2
    await upstream.wait(lambda: upstream.streaming == 0)
    await rig.engine.close()


async def test_abort_closes_the_upstreams_connection(rig: Rig, upstream: Upstream) -> None:
    answer = rig.submit(job("r1", "[slow]"))
    await answer.tokens(2)
    rig.engine.abort("r1")
    await upstream.wait(lambda: upstream.broken_off == 1 and upstream.streaming == 0)
    assert answer.finish is None


async def test_abort_at_any_turn_of_the_loop_is_silent_from_then_on(rig: Rig) -> None:
    """Also between a chunk's arrival and the step that would carry it."""
    seen: list[tuple[Answer, int]] = []
    for turns in range(0, 200, 3):
        answer = rig.submit(job(f"r{turns}", "hi"))
        for _ in range(turns):
            await asyncio.sleep(0)
        rig.engine.abort(f"r{turns}")
        seen.append((answer, len(answer.outputs)))
    await rig.run(job("last", "hi"))
    assert [len(answer.outputs) for answer, _ in seen] == [count for _, count in seen]
    assert any(count for _, count in seen), "some had begun"


async def test_close_closes_all_connections(rig: Rig, upstream: Upstream) -> None:
    answers = [rig.submit(job(f"r{n}", "[slow]")) for n in range(5)]
    for answer in answers:
        await answer.tokens(1)
    await rig.engine.close()
    await upstream.wait(lambda: upstream.broken_off == 5 and upstream.streaming == 0)


async def test_answer_that_has_begun_is_not_continued_but_a_fresh_one_starts(rig: Rig, upstream: Upstream) -> None:
    begun = await rig.run(job("begun", "hi"), [0, 0])
    assert begun.finish == "error"
    assert upstream.bodies == []
    assert (await rig.run(job("fresh", "hi"), [])).finish == "stop"


class TestLoading:
    async def test_context_is_what_the_upstream_says_unless_configured(self, upstream: Upstream) -> None:
        upstream.context = 777
        for settings, expected in (({}, 777), ({"context_length": 99}, 99)):
            rig = await Rig(engine_for(upstream.url + "#words", **settings)).load()
            assert rig.info.context_length == expected
            await rig.engine.close()

    async def test_unknown_context_leaves_the_judgement_to_the_upstream(self, upstream: Upstream) -> None:
        upstream.models_status = 404
        upstream.name = "another"
        rig = await Rig(engine_for(upstream.url + "#words")).load()
        assert rig.info.context_length == UNKNOWN_CONTEXT
        assert rig.engine.fits(job("r1", "hi"))
        await rig.engine.close()

    @pytest.mark.parametrize("status", [401, 500])
    async def test_upstream_that_refuses_is_unavailable(self, upstream: Upstream, status: int) -> None:
        upstream.models_status = status
        with pytest.raises(ModelUnavailable):
            await Rig(engine_for(upstream.url)).load()

    async def test_upstream_that_is_not_there_is_unavailable(self) -> None:
        with pytest.raises(ModelUnavailable, match="can not be reached"):
            await Rig(engine_for(f"http://127.0.0.1:{find_free_port()}/v1")).load()

    @pytest.mark.parametrize("target", ["", "host:8000", "ftp://host/v1", "http://"])
    def test_target_must_be_a_url(self, target: str) -> None:
        with pytest.raises(ConfigError, match="SLUICE_MODELS"):
            engine_for(target)


def test_estimates_never_refuse() -> None:
    tokenizer = EstimatingTokenizer()
    assert len(tokenizer.encode("twelve chars")) == 3
    assert len(tokenizer.encode_bounded("x" * 1000, 10)) == 10
    assert len(tokenizer.render_chat([{"role": "user", "content": "x" * 1000}], limit=10)) == 10
    assert tokenizer.decode([0, 0]) == ""


async def test_answers_run_side_by_side(rig: Rig) -> None:
    answers = [rig.submit(job(f"r{n}", f"{n}", max_tokens=30)) for n in range(20)]
    await asyncio.gather(*(answer.finished() for answer in answers))
    assert all(len(answer.ids) == 30 for answer in answers)
    await rig.quiet()
