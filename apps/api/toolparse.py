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
    """What became certain: content first, then pieces of calls."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


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
            out.content = self._visible(self._buffer)
        elif self._state == "head" and not self._whole(self._buffer, out):
            out.content = self._gap + OPEN + self._buffer
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
            out.content += self._visible(before.rstrip())
            self._gap = before[len(before.rstrip()) :]
            self._buffer = self._buffer[at + len(OPEN) :]
            self._state = "head"
            return True
        keep = _overlap(self._buffer, OPEN)
        ready = self._buffer[: len(self._buffer) - keep]
        # Blanks may turn out to stand between content and a call; they wait.
        stripped = ready.rstrip()
        out.content += self._visible(stripped) if stripped else ""
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
            out.content += self._gap + OPEN + block + CLOSE
        self._state = "text"
        return True

    def _begin(self, out: Parsed, name: str) -> None:
        self._muted = self.limit is not None and self.count >= self.limit
        if not self._muted:
            out.calls.append(CallDelta(self.count, "", new_call_id(), name))
            self.count += 1

    def _whole(self, block: str, out: Parsed) -> bool:
        """A call whose keys stand in another order, or whose arguments are a string."""
        try:
            call = json.loads(block)
        except ValueError:
            return False
        if not isinstance(call, dict) or call.get("name") not in self.names:
            return False
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return False
        if not isinstance(arguments, dict):
            return False
        self._begin(out, call["name"])
        if not self._muted:
            out.calls.append(CallDelta(self.count - 1, json.dumps(arguments, ensure_ascii=False)))
        return True

    def _arguments(self, out: Parsed) -> bool:
        end = self._scan()
        piece = self._buffer if end is None else self._buffer[:end]
        self._buffer = self._buffer[len(piece) :]
        if piece and not self._muted:
            out.calls.append(CallDelta(self.count - 1, piece))
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
        at = self._buffer.find(CLOSE)
        if at >= 0:
            self._buffer = self._buffer[at + len(CLOSE) :]
            self._state = "text"
            return True
        # Only the object's own brace is due; another block may follow without a close.
        if OPEN in self._buffer:
            self._state = "text"
            return True
        return False


def _overlap(text: str, marker: str) -> int:
    """How many of the text's last characters could be the beginning of the marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0


def _string(literal: str) -> str:
    try:
        value = json.loads(literal)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
