"""Grammars: refused early where they are wrong, followed exactly where they are right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from inference.engine.grammar_check import MAX_SPEC_CHARS, validate_grammar
from inference.engine.transformers import TransformersEngine
from inference.engine.transformers.grammar import GrammarCompiler
from inference.messages import Grammar
from tests.engine.rig import EOS, VOCABULARY, Rig, job, text_of, tiny_config, write_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "grün", "青"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["colour", "size", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def rig(folder: str) -> AsyncIterator[Rig]:
    rig = await Rig(TransformersEngine(folder, alias="tiny", device="cpu", config=tiny_config())).load()
    yield rig
    await rig.engine.close()


def test_checking_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, inference.engine.grammar_check; print({'torch', 'transformers'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_object"),
        Grammar("json_schema", json.dumps(SCHEMA)),
        Grammar("json_schema", "true"),
        Grammar("regex", r"[a-f]{3}-[0-9]+"),
        Grammar("choice", json.dumps(["yes", 'a "quoted" one', "back\\slash", "two\nlines", "日本"])),
        Grammar("lark", 'start: "a" tail\ntail: /[0-9]+/'),
    ],
)
def test_good_grammars_pass(grammar: Grammar) -> None:
    validate_grammar(grammar)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("json_schema", "{"), "not valid JSON"),
        (Grammar("json_schema", "[1]"), "must be a JSON object"),
        (Grammar("json_schema", '{"type": "objec"}'), "objec"),
        (Grammar("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
        (Grammar("json_schema", "[" * 100_000), "not valid JSON"),
        (Grammar("regex", "[a-z"), "unclosed"),
        (Grammar("regex", ""), "empty"),
        (Grammar("regex", "a" * (MAX_SPEC_CHARS + 1)), "longer than"),
        (Grammar("choice", "[]"), "at least one"),
        (Grammar("choice", '["a", ""]'), "not empty"),
        (Grammar("choice", '["a", 3]'), "must be a string"),
        (Grammar("choice", "yes"), "not valid JSON"),
        (Grammar("lark", 'start: "a" | missing'), "missing"),
    ],
)
def test_bad_grammars_are_named(grammar: Grammar, message: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(message)):
            validate_grammar(grammar)


def test_a_matcher_follows_and_refuses(folder: str) -> None:
    compiler = GrammarCompiler(AutoTokenizer.from_pretrained(folder), VOCABULARY, [EOS])
    grammar = Grammar("regex", "ab+c")
    matcher = compiler.matcher(grammar, list(b"abb"))
    assert matcher.consume_tokens(list(b"c")) and matcher.is_accepting()
    with pytest.raises(ValueError, match="does not follow"):
        compiler.matcher(grammar, list(b"ax"))
    with pytest.raises(ValueError, match="invalid"):
        compiler.matcher(Grammar("regex", "("))
    with pytest.raises(ValueError, match="does not support"):
        GrammarCompiler(None, VOCABULARY, [EOS]).matcher(grammar)


def is_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["colour", "size", "tags"]
        and value["colour"] in SCHEMA["properties"]["colour"]["enum"]  # type: ignore[index]
        and 1 <= value["size"] <= 99
        and all(isinstance(tag, bool) for tag in value["tags"])
    )


CASES: list[tuple[Grammar, Any]] = [
    (Grammar("json_schema", json.dumps(SCHEMA)), is_schema),
    (Grammar("regex", r"[a-f]{3}-[0-9]{2}"), lambda text: re.fullmatch(r"[a-f]{3}-[0-9]{2}", text)),
    (Grammar("choice", '["yes", "no", "vielleicht schön"]'), {"yes", "no", "vielleicht schön"}.__contains__),
    (Grammar("lark", 'start: "<" /[xyz]{4}/ ">"'), lambda text: re.fullmatch("<[xyz]{4}>", text)),
]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_answers_follow_their_grammar(rig: Rig, temperature: float) -> None:
    jobs = [
        job(f"{i}-{seed}", f"seed {seed}", max_tokens=200, temperature=temperature, seed=seed, grammar=grammar)
        for i, (grammar, _) in enumerate(CASES)
        for seed in range(5)
    ]
    answers = await rig.run_all([*jobs, job("free", max_tokens=50, temperature=temperature)])
    for each, answer in zip(jobs, answers, strict=False):
        text = text_of(answer.ids)
        assert CASES[int(each.id[0])][1](text), text
        assert answer.finish == "stop"
        assert answer.ids[-1] == EOS and answer.outputs[-1].hidden == 1
    await rig.quiet()


async def test_json_object_is_json_as_far_as_it_goes(rig: Rig) -> None:
    answer = await rig.run(job("o", max_tokens=60, temperature=1.0, seed=3, grammar=Grammar("json_object")))
    assert text_of(answer.ids).startswith("{")


async def test_a_bad_grammar_fails_its_request_alone(rig: Rig) -> None:
    good = rig.submit(job("good", max_tokens=30, ignore_eos=True))
    bad = await rig.run(job("bad", grammar=Grammar("regex", "(")))
    assert bad.finish == "error" and bad.error is not None and bad.ids == []
    assert len((await good.finished()).ids) == 30
    await rig.quiet()


async def test_resumed_answers_go_on_inside_the_grammar(rig: Rig) -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    whole = await rig.run(job("whole", max_tokens=200, temperature=1.0, seed=5, grammar=grammar))
    for cut in (1, 7, len(whole.ids) - 1):
        rest = await rig.run(
            job(f"cut-{cut}", max_tokens=200, temperature=1.0, seed=5, grammar=grammar), whole.ids[:cut]
        )
        assert whole.ids[:cut] + rest.ids == whole.ids
        assert rest.finish == "stop"


async def test_resumed_tokens_outside_the_grammar_fail_alone(rig: Rig) -> None:
    answer = await rig.run(job("x", grammar=Grammar("choice", '["yes"]')), list(b"no"))
    assert answer.finish == "error" and "does not follow" in (answer.error or "")
    await rig.quiet()


async def test_a_complete_grammar_ends_whatever_else_is_asked(rig: Rig) -> None:
    params = {"grammar": Grammar("choice", '["yes"]'), "max_tokens": 50}
    for extra in ({"min_tokens": 40}, {"ignore_eos": True}, {"logit_bias": {EOS: -100.0}}):
        answer = await rig.run(job(f"x{len(extra)}{next(iter(extra))}", **params, **extra))
        assert text_of(answer.ids) == "yes" and answer.finish == "stop"


async def test_abort_while_the_grammar_compiles_frees_the_slot(rig: Rig) -> None:
    rig.submit(job("a", max_tokens=50, grammar=Grammar("json_object")))
    rig.engine.abort("a")
    await rig.quiet()
    assert rig.answers["a"].outputs == []


async def test_bias_against_the_only_allowed_token_fails_alone(rig: Rig) -> None:
    answer = await rig.run(job("x", grammar=Grammar("choice", '["yes"]'), logit_bias={ord("y"): -100.0}))
    assert answer.finish == "error" and answer.ids == []
    await rig.quiet()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("joined", [True, False])
def test_patterns_that_would_take_hours_to_join_are_refused(joined: bool) -> None:
    patterns = [{"type": "string", "pattern": f"^.*a.{{{i}}}.*$"} for i in range(40)]
    if joined:
        schema: dict[str, Any] = {"properties": {"a": {"allOf": patterns}}}
    else:  # each refers to the next one
        parts = {f"p{i}": {**part, "$ref": f"#/$defs/p{i + 1}"} for i, part in enumerate(patterns)}
        schema = {"properties": {"a": {"$ref": "#/$defs/p0"}}, "$defs": {**parts, "p40": {"type": "string"}}}
    with pytest.raises(ValueError, match="40"):
        validate_grammar(Grammar("json_schema", json.dumps({"type": "object", **schema})))
    several = {f"p{i}": part for i, part in enumerate(patterns)}
    validate_grammar(Grammar("json_schema", json.dumps({"type": "object", "properties": several})))
