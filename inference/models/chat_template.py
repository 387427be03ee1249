"""Chat messages to prompt text, as the model's own Jinja template says.

The environment offers what templates made for transformers expect. Templates
come with the model and are sandboxed; messages come from anybody, so control
tokens written in them are made harmless: each is split by a marker that nobody
can guess before the template sees it, and whoever encodes the rendered text
treats a stretch that holds the marker as plain text (:func:`split_rendered`).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from inference.errors import SluiceError

# What running somebody's template on somebody's messages can raise.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(SluiceError):
    """The model has no chat template, or its template does not take these messages."""


class _Generation(jinja2.ext.Extension):
    """Lets ``{% generation %}`` blocks, which mark what a model is trained on, pass through."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _loops_over_content(template: jinja2.nodes.Template) -> bool:
    """Whether the template goes through the parts of a message's content, rather than take it for a string."""

    def is_content(node: jinja2.nodes.Node) -> bool:
        match node:
            case jinja2.nodes.Getattr(attr="content") | jinja2.nodes.Name(name="content"):
                return True
            case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
                return True
        return False

    return any(is_content(loop.iter) for loop in template.find_all(jinja2.nodes.For))


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja text.
        variables: what it sees besides the messages (``bos_token`` and the like).
        control_tokens: texts that would act as control tokens anywhere.
        soft_tokens: texts of added tokens that are ordinary in an assistant's own
            messages (``<think>``) and control tokens elsewhere.

    Raises:
        ChatTemplateError: the template is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, str],
        control_tokens: Sequence[str],
        soft_tokens: Sequence[str] = (),
    ) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._takes_parts = _loops_over_content(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The model's chat template is not valid: {error}.") from error
        self._variables = dict(variables)
        soft = [token for token in soft_tokens if token in source]
        self._hard = _any_of(control_tokens)
        self._all = _any_of([*control_tokens, *soft])
        self._hard_beginnings = _beginnings(control_tokens)
        self._all_beginnings = _beginnings([*control_tokens, *soft])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final: bool = False,
        **extra: Any,
    ) -> Rendered:
        """The prompt text of ``messages``.

        Null values are dropped, so that no template writes them out as a word; tool
        calls' arguments given as JSON text are parsed, and text parts are joined with
        line feeds for templates that know nothing of parts. ``continue_final`` ends the
        prompt where the last message's text ends, so that the answer continues it.

        Raises:
            ChatTemplateError: the template refuses the messages or fails on them.
        """
        marker = f"{secrets.randbelow(10**24):024d}"
        values = {
            **self._variables,
            **_Marking(marker, self._all, self._all_beginnings).apply(extra),
            "tools": _Marking(marker, self._all, self._all_beginnings).apply(list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final,
        }
        prepared = [self._prepare(message, marker) for message in messages]
        end = f"{secrets.randbelow(10**24):024d}"
        if continue_final:
            _append_to_last(prepared, f"{end} ")
        try:
            text = self._render(values, prepared)
        except _TEMPLATE_FAULTS as error:
            detail = str(error).replace(marker, "")
            by_template = isinstance(error, jinja2.TemplateError) and not isinstance(error, jinja2.UndefinedError)
            reason = detail if by_template and len(detail) < 300 else "a part that it needs is missing or odd"
            message = f"The model's chat template does not take these messages: {reason.rstrip('.')}."
            raise ChatTemplateError(message) from error
        return Rendered(_cut(text, end) if continue_final else text, marker, self._all)

    def _render(self, values: dict[str, Any], messages: list[dict[str, Any]]) -> str:
        try:
            return self._template.render(messages=messages, **values)
        except (jinja2.UndefinedError, TypeError):
            if all("content" in message for message in messages):
                raise
            # Some templates add up strings and stumble over content that is not there.
            return self._template.render(messages=[{"content": "", **each} for each in messages], **values)

    def _prepare(self, message: Mapping[str, Any], marker: str) -> dict[str, Any]:
        plain = {key: value for key, value in message.items() if value is not None}
        reasoning = next((plain[key] for key in _REASONING if key in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        content = plain.get("content")
        if isinstance(content, (list, tuple)) and not self._takes_parts:
            plain["content"] = "\n".join(str(part.get("text", "")) for part in content)
        if plain.get("tool_calls"):
            plain["tool_calls"] = [_parse_arguments(call) for call in plain["tool_calls"]]
        own = plain.get("role") == "assistant"
        marking = _Marking(
            marker, self._hard if own else self._all, self._hard_beginnings if own else self._all_beginnings
        )
        marked: dict[str, Any] = marking.apply(plain)
        return marked


def _append_to_last(messages: list[dict[str, Any]], tail: str) -> None:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + tail
    elif content and isinstance(content[-1].get("text"), str):
        content[-1]["text"] += tail
    else:
        raise ChatTemplateError("The last message has no text that could be continued.")


def _cut(text: str, end: str) -> str:
    """What stands before ``end``, without the space that the template has trimmed from there."""
    before, found, after = text.rpartition(end)
    if not found:
        raise ChatTemplateError("The model's chat template can not continue the last message.")
    return before if after.startswith(" ") else before.rstrip()


class Rendered:
    """A rendered prompt whose marked stretches are plain text.

    Iterating gives ``(text, trusted)`` pieces; a trusted piece may hold control tokens, and
    the pieces meet only at control tokens.
    """

    def __init__(self, text: str, marker: str, control: re.Pattern[str] | None) -> None:
        self._text = text
        self._marker = marker
        self._control = control

    @property
    def text(self) -> str:
        """The whole prompt as a reader would see it."""
        return self._text.replace(self._marker, "")

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        text, marker = self._text, self._marker
        if marker not in text or self._control is None:
            yield self.text, True
            return
        begun = after_token = 0
        # The markers have broken what was written by others: what still matches is the template's own.
        for match in [*self._control.finditer(text), None]:
            here = len(text) if match is None else match.start()
            if marker in text[after_token:here]:
                if begun < after_token:
                    yield text[begun:after_token], True
                yield text[after_token:here].replace(marker, ""), False
                begun = here
            if match is not None:
                after_token = match.end()
        if begun < len(text):
            yield text[begun:], True


class _Marking:
    """Puts the marker into every control token in strings, at any depth of plain data."""

    def __init__(self, marker: str, control: re.Pattern[str] | None, beginnings: frozenset[str]) -> None:
        self._marker = marker
        self._control = control
        self._beginnings = beginnings
        self._longest = max(map(len, beginnings), default=0)

    def apply(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, Mapping):
            return {self.apply(key): self.apply(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.apply(each) for each in value]
        return value

    def _mark(self, text: str) -> str:
        if self._control is None:
            return text
        places = []
        match = self._control.search(text)
        while match is not None:
            places.append(match.start() + 1)
            match = self._control.search(text, match.start() + 1)
        # The template may join two strings: no string may end in the beginning of a token either.
        end = len(text.rstrip())
        lengths = range(1, min(self._longest, end) + 1)
        places += [end - n + 1 for n in lengths if text[end - n : end] in self._beginnings]
        if not places:
            return text
        parts, last = [], 0
        for place in sorted(set(places)):
            parts += [text[last:place], self._marker]
            last = place
        return "".join(parts) + text[last:]


def _any_of(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Matches any of the texts, the longest where several begin at one place."""
    usable = sorted({token for token in tokens if len(token) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, usable))) if usable else None


def _beginnings(tokens: Sequence[str]) -> frozenset[str]:
    return frozenset(token[:length] for token in tokens for length in range(1, len(token)))


def _parse_arguments(call: Any) -> Any:
    """Templates expect the arguments of a tool call as data, the API gives JSON text."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return call
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": parsed}}
