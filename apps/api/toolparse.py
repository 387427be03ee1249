"""Finding tool calls in a text while it is still being written.

The wire format between template and model is the one most open models are
trained on: one block per call, ::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Text outside of blocks is content. A call is announced as soon as its name is
known, and its arguments follow as they come. What turns out not to be a call
(broken JSON, a function nobody offered) is given out as the text it is: an
answer is never swallowed.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_decode = json.JSONDecoder(strict=False).raw_decode
_SURROGATE = re.compile("[\ud800-\udfff]")
_MARKER = re.compile(f"{OPEN}|{CLOSE}")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(slots=True)
class CallDelta:
    """A piece of a call. ``id`` and ``name`` are set on its first piece only."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Parsed:
    """What became certain, in the order of the answer: texts, and pieces of calls."""

    pieces: list[str | CallDelta] = field(default_factory=list)

    def say(self, text: str) -> None:
        if text:
            self.pieces.append(text)

    @property
    def content(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def calls(self) -> list[CallDelta]:
        return [piece for piece in self.pieces if isinstance(piece, CallDelta)]


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolParser:
    """Splits one answer into content and calls; feed it text, then ``finish`` it once.

    Args:
        names: the functions that were offered.
        limit: calls to accept; later ones are dropped (``parallel_tool_calls: false``).
    """

    def __init__(self, names: Collection[str], limit: int | None = None) -> None:
        self.names = frozenset(names)
        self.limit = limit
        self.count = 0
        self._buffer = ""
        self._gap = ""  # blanks before a block; given out only if it turns out to be text
        self._state = "text"  # text | head | arguments | tail
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._muted = False

    def feed(self, text: str) -> Parsed:
        """Take the next piece of the answer and return what it makes certain."""
        self._buffer += text
        out = Parsed()
        while getattr(self, f"_{self._state}")(out):
            pass
        return out

    def finish(self) -> Parsed:
        """The answer has ended: give out whatever was held back."""
        out = Parsed()
        if self._state == "text":
            out.say(self._visible(self._buffer))
        elif self._state == "head" and not self._whole(self._buffer, out):
            out.say(self._gap + OPEN + self._buffer)
        elif self._state == "tail" and not CLOSE.startswith((rest := _beyond(self._buffer)).strip()):
            out.say(rest)
        self._buffer = ""
        return out

    @property
    def cut(self) -> bool:
        """The last call's arguments have not come to their end."""
        return self._state == "arguments" and not self._muted

    # Each step returns whether another one may follow.

    def _text(self, out: Parsed) -> bool:
        at = self._buffer.find(OPEN)
        if at >= 0:
            before = self._buffer[:at]
            out.say(self._visible(before.rstrip()))
            self._gap = before[len(before.rstrip()) :]
            self._buffer = self._buffer[at + len(OPEN) :]
            self._state = "head"
            return True
        keep = _overlap(self._buffer, OPEN)
        ready = self._buffer[: len(self._buffer) - keep]
        # Blanks may turn out to stand between content and a call; they wait.
        stripped = ready.rstrip()
        out.say(self._visible(stripped))
        self._buffer = self._buffer[len(stripped) :]
        return False

    def _visible(self, text: str) -> str:
        """Blanks around calls belong to the format, not to the content."""
        return "" if self.count and not text.strip() else text

    def _head(self, out: Parsed) -> bool:
        found = _HEAD.match(self._buffer)
        if found and (name := _string(found[1])) in self.names:
            self._begin(out, name)
            self._buffer = self._buffer[found.end() :]
            self._depth, self._quoted, self._escaped = 0, False, False
            self._state = "arguments"
            return True
        at = self._buffer.find(CLOSE)
        if at < 0:
            return False
        block, self._buffer = self._buffer[:at], self._buffer[at + len(CLOSE) :]
        if not self._whole(block, out):
            out.say(self._gap + OPEN + block + CLOSE)
        self._state = "text"
        return True

    def _begin(self, out: Parsed, name: str) -> None:
        self._muted = self.limit is not None and self.count >= self.limit
        if not self._muted:
            out.pieces.append(CallDelta(self.count, "", new_call_id(), name))
            self.count += 1

    def _whole(self, block: str, out: Parsed) -> bool:
        """A call whose keys stand in another order, or whose arguments are a string."""
        try:
            call = json.loads(block)
            if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or name not in self.names:
                return False
            arguments = call.get("arguments", call.get("parameters", {}))
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            if not isinstance(arguments, dict):
                return False
            text = _json(arguments)
        except (ValueError, RecursionError):
            return False
        self._begin(out, name)
        if not self._muted:
            out.pieces.append(CallDelta(self.count - 1, text))
        return True

    def _arguments(self, out: Parsed) -> bool:
        end = self._scan()
        piece = self._buffer if end is None else self._buffer[:end]
        self._buffer = self._buffer[len(piece) :]
        if piece and not self._muted:
            out.pieces.append(CallDelta(self.count - 1, piece))
        if end is None:
            return False
        self._state = "tail"
        return True

    def _scan(self) -> int | None:
        """Where the arguments' object ends in the buffer, if it does."""
        for i, char in enumerate(self._buffer):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                if char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None

    def _tail(self, out: Parsed) -> bool:
        found = _MARKER.search(self._buffer)
        if found is None:
            return False
        if found[0] == CLOSE:
            self._buffer = self._buffer[found.end() :]
        else:  # another block begins, and this one was never closed
            self._buffer = _beyond(self._buffer[: found.start()]) + self._buffer[found.start() :]
        self._state = "text"
        return True


def _overlap(text: str, marker: str) -> int:
    """How many of the text's last characters could be the beginning of the marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0


def _beyond(text: str) -> str:
    """What follows the object of a call, of which ``text`` is all behind the arguments."""
    rest = text.lstrip()
    if rest.startswith("}"):
        return rest[1:]
    if not rest.startswith(","):
        return text  # the object was left open
    before = '{"arguments": {}'
    try:
        return rest[_decode(before + rest)[1] - len(before) :]
    except (ValueError, RecursionError):
        return ""  # cut off, or nothing that could be read: of no use without the rest


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # Half a surrogate pair can stand in JSON as an escape only.
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


def _string(literal: str) -> str:
    try:
        value = json.loads(literal)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
