"""Structured answers: ``response_format`` and forced calls become a grammar for the decoder."""

from __future__ import annotations

import json
from typing import Any

from apps.api import prompts
from apps.api import tools as toolkit
from apps.api.errors import invalid
from apps.api.schema.generation import JsonObjectFormat, JsonSchemaFormat, ResponseFormat
from inference.engine.grammar_check import check_patterns, validate_grammar
from inference.messages import Grammar

MAX_SCHEMA_BYTES = 65536


def constraint(wanted: ResponseFormat | None, use: toolkit.ToolUse | None) -> Grammar | None:
    """The grammar that a request's answers obey; ``None`` where they are free.

    Raises:
        ApiError: the schema is too large, or nested too deeply.
    """
    param = "tools" if use is not None else "response_format"
    try:
        made = _grammar(wanted, use)
    except RecursionError:
        raise invalid("The schema is nested too deeply.", param, "invalid_value") from None
    if made is not None and len(made.spec) > MAX_SCHEMA_BYTES:
        raise invalid(f"The schema is larger than {MAX_SCHEMA_BYTES} characters.", param, "invalid_value")
    return made


def _grammar(wanted: ResponseFormat | None, use: toolkit.ToolUse | None) -> Grammar | None:
    schema: dict[str, Any] | None = None
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.json_schema.schema
    elif isinstance(wanted, JsonObjectFormat):
        schema = {"type": "object"}
    if use is not None:
        made = toolkit.grammar(use, schema)
        for each in [schema, *map(toolkit.parameters, use.tools)] if made is not None else ():
            try:
                check_patterns(each)
            except ValueError as exc:
                raise invalid(f"The schema can not be used: {exc}", "tools", "invalid_value") from None
        return made
    if isinstance(wanted, JsonSchemaFormat):
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))
    return Grammar("json_object") if schema else None


async def check(grammar: Grammar) -> None:
    """Compile the grammar once, in a worker thread, so that a bad schema is refused at once.

    Raises:
        ApiError: 400 with what is wrong in the schema.
    """
    try:
        await prompts.in_thread(lambda: validate_grammar(grammar))
    except ValueError as exc:
        param = "tools" if grammar.kind == "lark" else "response_format"
        raise invalid(f"The schema can not be used: {exc}", param, "invalid_value") from None
