"""Grammars in the form llguidance understands, and their validation.

Needs no torch and no tokenizer, so that an API server can refuse a bad grammar
before anything is queued.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from inference.messages import Grammar

MAX_SPEC_CHARS = 256 * 1024
"""Longest grammar that is looked at, characters."""

_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON without free white space: small models otherwise drift into endless blanks."""


MAX_JOINED_PATTERNS = 8
"""Most patterns in a schema that joins parts: whether n of them exclude each other takes time exponential in n."""


def check_patterns(schema: Any) -> None:
    """Refuse a schema whose check would keep a thread for hours.

    Raises:
        ValueError: it joins parts (``allOf``, or ``$ref`` beside a pattern) and has too many patterns.
    """
    patterns, joins, parts = 0, False, [schema]
    while parts:  # not by recursion: it may be nested as deeply as JSON can be
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
            own = isinstance(part.get("pattern"), str)
            patterns += own
            joins |= "allOf" in part or (own and "$ref" in part)
    if joins and patterns > MAX_JOINED_PATTERNS:
        raise ValueError(f"A schema with allOf may have {MAX_JOINED_PATTERNS} patterns; this one has {patterns}.")


def compile_source(grammar: Grammar) -> str:
    """The llguidance source of a grammar; its syntax is not checked here.

    Raises:
        ValueError: the spec cannot be what its kind asks for.
    """
    if len(grammar.spec) > MAX_SPEC_CHARS:
        raise ValueError(f"The grammar is longer than {MAX_SPEC_CHARS} characters.")
    if grammar.kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_STYLE)
    if grammar.kind == "json_schema":
        return _schema_source(grammar.spec)
    if grammar.kind == "choice":
        return _choice_source(grammar.spec)
    if not grammar.spec.strip():
        raise ValueError(f"The {grammar.kind} grammar is empty.")
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.spec)
    return LLMatcher.grammar_from_lark(grammar.spec)


def validate_grammar(grammar: Grammar) -> None:
    """Check a grammar completely, short of running it. Takes about a millisecond.

    Raises:
        ValueError: with one sentence that says what is wrong.
    """
    problem = _problem(grammar)
    if problem:
        raise ValueError(problem)


@lru_cache(maxsize=256)
def _problem(grammar: Grammar) -> str:
    try:
        source = compile_source(grammar)
    except ValueError as error:
        return str(error)
    except RecursionError:
        return "The schema is nested too deeply."
    message = LLMatcher.validate_grammar(source)
    if not message or message.startswith("WARNING"):
        return ""
    return f"The {grammar.kind} grammar is invalid: {' '.join(message.split())[:300]}"


def _schema_source(spec: str) -> str:
    try:
        schema = json.loads(spec)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The JSON schema is not valid JSON: {error}.") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("The JSON schema must be a JSON object.")
    check_patterns(schema)
    return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_STYLE)


def _choice_source(spec: str) -> str:
    try:
        choices = json.loads(spec)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The choices are not valid JSON: {error}.") from None
    if not isinstance(choices, list) or not choices:
        raise ValueError("The choices must be a list of at least one string.")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("Each choice must be a string that is not empty.")
    literals = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark(f"start: {literals}")
