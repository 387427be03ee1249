"""Decoding a body into its type, and saying exactly what is wrong with it.

msgspec does the checking in strict mode: ``true`` is not a number, ``"10"`` is
not 10, 1.5 is not whole, NaN and Infinity are not JSON, and a number beyond the
range is out of range, however long. This module turns what it finds into
OpenAI's error object.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from apps.api.errors import ApiError, invalid
from apps.api.schema.refused import REFUSED

T = TypeVar("T")

MAX_CHOICES = 32
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_LOGPROBS = 20
MAX_BIAS = 1024
MAX_INT = 2**31 - 1


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A request body. A field it does not know is refused by name."""


class NoFields(Body):
    """What is asked for takes no parameters: no body, or an empty object."""


class Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """An object inside a body."""


def about(text: str, **limits: Any) -> Meta:
    """A field's description and limits, for validation, OpenAPI and the parameter table alike."""
    return Meta(description=text, **limits)


Tokens = Annotated[int, Meta(ge=1, le=MAX_INT)]
Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Bias = dict[int, Annotated[float, Meta(ge=-100.0, le=100.0)]]

_AT = " - at `"
_PATH = re.compile(r"(?:(key|\.\.\.)` in `)?\$([A-Za-z0-9_.\[\]]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.S)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_TYPES = re.compile(r"`([a-z |]+)`")
_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "a boolean",
    "array": "an array", "object": "an object",
}  # fmt: skip


class Decoder(Generic[T]):
    """Turns bytes into one type of body, or raises :class:`ApiError` 400."""

    def __init__(self, kind: type[T]) -> None:
        self.kind = kind
        self._decode = msgspec.json.Decoder(kind).decode

    def __call__(self, raw: bytes) -> T:
        """Decode and check.

        Raises:
            ApiError: 400; ``param`` names the field, ``code`` is
                ``invalid_json``, ``unknown_parameter``, ``unsupported_parameter``,
                ``missing_required_parameter`` or ``invalid_value``.
        """
        try:
            return self._decode(raw)
        except msgspec.ValidationError as exc:
            raise explain(str(exc)) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            what = "The body is empty; send a JSON object." if not raw.strip() else "The body is not valid JSON."
            raise invalid(what, code="invalid_json") from None
        except RecursionError:
            raise invalid("The body is nested too deeply.", code="invalid_json") from None


_decode_nothing = Decoder(NoFields)


def expect_nothing(raw: bytes) -> None:
    """Accept no body, or an empty object.

    Raises:
        ApiError: 400; what else it holds is refused by name.
    """
    if raw.strip():
        _decode_nothing(raw)


def in_words(text: str) -> str:
    """One of msgspec's messages with "an integer or null" for its ``int | null``."""
    if not text.startswith("Expected "):
        return text  # the others quote what the client has sent
    return _TYPES.sub(lambda found: _either([_WORDS.get(kind, kind) for kind in found[1].split(" | ")]), text)


def _either(kinds: list[str]) -> str:
    *rest, last = kinds
    return f"{', '.join(rest)} or {last}" if rest else last


def explain(text: str, inside: str = "") -> ApiError:
    """Turn one of msgspec's messages into an error that names the field.

    Args:
        inside: the path of what was looked at, where that is not the whole body.
    """
    path = inside
    # The last one: a field's name may hold the same words, any number of times.
    before, _, after = text.rpartition(_AT)
    if before and (found := _PATH.fullmatch(after)):
        path = (inside + found[2]).lstrip(".")
        text = before + (" as a key" if found[1] == "key" else "")
    if found := _UNKNOWN.match(text):
        param = f"{path}.{found[1]}" if path else found[1]
        return invalid(f"Unknown parameter: {param!r}.", param, "unknown_parameter")
    if found := _MISSING.match(text):
        param = f"{path}.{found[1]}" if path else found[1]
        return invalid(f"Missing required parameter: {param!r}.", param, "missing_required_parameter")
    name = path.rpartition(".")[2].partition("[")[0]
    if name in REFUSED and text.startswith("Expected `null`"):
        return invalid(f"{path!r} is not supported: {REFUSED[name]}", path, "unsupported_parameter")
    sentence = text[0].lower() + in_words(text)[1:]
    if not path:
        return invalid(f"The body is wrong: {sentence}.", None, "invalid_value")
    return invalid(f"Invalid value for {path!r}: {sentence}.", path, "invalid_value")
