"""Markdown that grows: what a page must change after each piece of an answer.

Only the last top-level block of a growing text can still change, so each update
parses from that block on. A page is sent operations:

- ``["html", index, html]``: block ``index`` is now ``html``.
- ``["code", index, lang, start, lines]``: block ``index`` is code whose lines
  from ``start`` on are ``lines``.

and how many blocks there are now; what a page has beyond that goes.

A page that lags behind, or that has just arrived, is sent more at once and
never a gap: each keeps a :class:`Shown` and gets the difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from markdown_it.token import Token

from apps.chat.markdown import PARSER, clean, code_lines, language, render_tokens, top_level

Op = list[Any]

# A last line that might yet become something else: "-" turns the line above into a
# heading until "- item" makes it a list. Held back until it shows what it is.
_UNDECIDED = re.compile(r"(?:^|\n)[ >]*(?:[-=*+_#|`~:]+|\d{1,9}[.)]?)[ \t]*$")


class Block:
    """One rendered top-level block: HTML, or code as lines of HTML."""

    __slots__ = ("html", "lang", "lines")

    def __init__(self, html: str = "", lines: list[str] | None = None, lang: str = "") -> None:
        self.html = html
        self.lines = lines
        self.lang = lang


class Shown:
    """What one page has been sent so far."""

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def advance(self, blocks: Sequence[Block]) -> dict[str, Any] | None:
        """``{"count", "ops"}`` that bring this page to ``blocks``; ``None`` where it is there."""
        first = 0
        while first < len(blocks) and first < len(self.blocks) and blocks[first] is self.blocks[first]:
            first += 1
        ops: list[Op] = []
        for index in range(first, len(blocks)):
            old = self.blocks[index] if index < len(self.blocks) else None
            op = _difference(index, old, blocks[index])
            if op is not None:
                ops.append(op)
        changed = bool(ops) or len(blocks) != len(self.blocks)
        self.blocks = list(blocks)
        return {"count": len(blocks), "ops": ops} if changed else None


def _whole(index: int, block: Block) -> Op:
    if block.lines is None:
        return ["html", index, block.html]
    return ["code", index, block.lang, 0, _clean_lines(block.lines)]


def _difference(index: int, old: Block | None, new: Block) -> Op | None:
    if old is None or (old.lines is None) != (new.lines is None) or old.lang != new.lang:
        return _whole(index, new)
    if new.lines is None:
        return None if old.html == new.html else ["html", index, new.html]
    before = old.lines or []
    start = 0
    while start < len(before) and start < len(new.lines) and before[start] == new.lines[start]:
        start += 1
    if start == len(before) == len(new.lines):
        return None
    return ["code", index, new.lang, start, _clean_lines(new.lines[start:])]


def _clean_lines(lines: list[str]) -> list[str]:
    """The sanitizer over lines of code, in one call."""
    return clean("\n".join(lines)).split("\n") if lines else []


class LiveMarkdown:
    """Renders a growing text block by block.

    Attributes:
        blocks: the rendered blocks; those before the last keep their identity
            from one update to the next.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._finished = 0
        self._base = 0
        self._length = -1
        self._code = _LiveCode()

    def update(self, text: str) -> list[Block]:
        """Render ``text``, which begins with the text of the update before."""
        visible = text[: _decided(text, self._base)]
        if len(visible) == self._length:
            return self.blocks
        self._length = len(visible)
        tail = visible[self._base :]
        env: dict[str, Any] = {}
        groups = top_level(PARSER.parse(tail, env))
        del self.blocks[self._finished :]
        self.blocks.extend(_block(group, env, self._code.lines) for group in groups)
        if len(groups) > 1 and groups[-1][0].map is not None:
            self._code = _LiveCode()
            self._base += _line_offset(tail, groups[-1][0].map[0])
            self._finished = len(self.blocks) - 1
        return self.blocks


@lru_cache(maxsize=256)
def complete(text: str) -> tuple[Block, ...]:
    """The blocks of a text that no longer grows."""
    env: dict[str, Any] = {}
    return tuple(_block(group, env, code_lines) for group in top_level(PARSER.parse(text, env)))


def complete_content(text: str) -> dict[str, Any]:
    """The operations that show a finished text from nothing."""
    return Shown().advance(complete(text)) or {"count": 0, "ops": []}


def _block(tokens: list[Token], env: dict[str, Any], lines: Callable[[str, str], list[str]]) -> Block:
    if tokens[0].type == "fence":
        lang = language(tokens[0])
        return Block(lines=lines(tokens[0].content, lang), lang=lang)
    return Block(html=render_tokens(tokens, env))


def _decided(text: str, base: int) -> int:
    """How much of ``text`` to show while more is to come."""
    found = _UNDECIDED.search(text, max(base, text.rfind("\n", 0, len(text))))
    return found.start() if found else len(text)


class _LiveCode:
    """Highlights growing code without starting over: what lies far back is done once.

    The cut is made at a line's end, so a string that spans it may lose its colour
    until the answer is complete and rendered as a whole.
    """

    CHUNK = 3000

    def __init__(self) -> None:
        self._lang = ""
        self._done = ""
        self._lines: list[str] = []

    def lines(self, code: str, lang: str) -> list[str]:
        if lang != self._lang or not code.startswith(self._done):
            self._lang, self._done, self._lines = lang, "", []
        while len(code) - len(self._done) > 2 * self.CHUNK:
            start = len(self._done)
            cut = code.rfind("\n", start, start + self.CHUNK) + 1
            if cut <= start:
                break
            self._lines += code_lines(code[start:cut], lang)
            self._done = code[:cut]
        return self._lines + code_lines(code[len(self._done) :], lang)


def _line_offset(text: str, line: int) -> int:
    """Where the line of that number (from 0) begins."""
    offset = 0
    for _ in range(line):
        offset = text.index("\n", offset) + 1
    return offset
