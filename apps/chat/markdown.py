"""Markdown to HTML that a page may insert as it is.

Three walls, each enough by itself: markdown-it with HTML switched off, so that
tags in the text come out as text; nh3 with a short list of tags, attributes and
URL schemes; and the page's Content-Security-Policy. Code is highlighted with
classes, never with inline styles. Images become links, so that reading an
answer fetches nothing from anywhere.

A few texts make the parser look through all the rest again for each thing that
begins. Its work is counted, and what would take more than its length is worth
is shown as it was written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from html import escape
from typing import Any

import nh3
import pygments
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline, linkify
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Text
from pygments.util import ClassNotFound

HIGHLIGHT_LIMIT = 60_000
"""Longest code, in characters, that is highlighted; longer code is shown plain."""
HIGHLIGHT_SECONDS = 0.25
"""Longest time of a thread's own that goes into highlighting a piece of code; the rest of it is shown plain."""

STEPS = 2_000
"""What the parser may do for any text, however short."""
STEPS_PER_CHARACTER = 3
"""Places that it may look at for each character of a paragraph."""
STEPS_PER_LINE = 20
"""Times that it may ask what a line begins, for each line of a text."""
LABELS_WITHIN_LABELS = 6
"""How deep brackets are followed in search of a link; each level is one more look at the same text."""
SCHEME_LENGTH = 40
"""Longest scheme of a plain link, in characters."""

_TAGS = {"p", "br", "hr", "strong", "em", "s", "del", "code", "pre", "span", "a"} | {
    "blockquote",
    "ul",
    "ol",
    "li",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "h3",
    "h4",
}
_CLEANER = nh3.Cleaner(
    tags=_TAGS,
    attributes={
        "a": {"href", "title"},
        "pre": {"class", "data-lang"},
        "span": {"class"},
        "ol": {"start"},
        "th": {"class"},
        "td": {"class"},
    },
    url_schemes={"http", "https", "mailto"},
    link_rel="noopener noreferrer nofollow",
    set_tag_attribute_values={"a": {"target": "_blank"}},
    strip_comments=True,
)
_FORMATTER = HtmlFormatter(nowrap=True)


class _Renderer(RendererHTML):
    """markdown-it's HTML with highlighted fences, images as links, and alignment as classes."""

    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        token = tokens[idx]
        return code_html(token.content, language(token))

    def code_block(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return code_html(tokens[idx].content, "")

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        token = tokens[idx]
        source = str(token.attrs.get("src", ""))
        label = self.renderInlineAsText(token.children or [], options, env) or source
        return f'<a href="{escape(source)}">{escape(label)}</a>'

    def _heading(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        # Below the page's own h1 and each message's h2; the answer's marks say only big or small.
        inline = tokens[idx + tokens[idx].nesting]
        level = "h3" if tokens[idx].tag in ("h1", "h2") else "h4"
        tokens[idx].tag = level if inline.content else "p"
        return self.renderToken(tokens, idx, options, env)

    heading_open = _heading
    heading_close = _heading

    def _cell(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        token = tokens[idx]
        style = str(token.attrs.pop("style", ""))
        if style.startswith("text-align:"):
            token.attrs["class"] = f"align-{style.removeprefix('text-align:')}"
        return self.renderToken(tokens, idx, options, env)

    th_open = _cell
    td_open = _cell


class TooCostly(Exception):
    """A text takes the parser more steps than its length is worth."""


def _count(state: StateBlock | StateInline) -> None:
    state.env["steps"] -= 1
    if state.env["steps"] < 0:
        raise TooCostly


def _count_line(state: StateBlock, line: int, end: int, silent: bool) -> bool:
    _count(state)
    return False


def _count_place(state: StateInline, silent: bool) -> bool:
    _count(state)
    return False


def _parse_blocks(state: StateCore) -> None:
    lines = state.src.count("\n") + 1
    state.env["steps"] = STEPS + STEPS_PER_LINE * lines
    try:
        state.md.block.parse(state.src, state.md, state.env, state.tokens)
    except TooCostly:
        state.tokens[:] = [Token("fence", "code", 0, content=state.src, map=[0, lines], block=True)]


def _parse_inlines(state: StateCore) -> None:
    for token in state.tokens:
        if token.type != "inline":
            continue
        token.children = []
        state.env["steps"] = STEPS + STEPS_PER_CHARACTER * len(token.content)
        try:
            INLINES.inline.parse(token.content, INLINES, state.env, token.children)
        except TooCostly:
            token.children = [Token("text", "", 0, content=token.content)]


def _plain_link(state: StateInline, silent: bool) -> bool:
    """The library's rule, which would look for the scheme in all the text before it, for each "://" again."""
    if len(state.pending) <= SCHEME_LENGTH or not state.src.startswith("://", state.pos):
        return linkify(state, silent)
    before = state.pending[:-SCHEME_LENGTH]
    state.pending = state.pending[-SCHEME_LENGTH:]
    if not silent:
        rest, state.pending = state.pending, before
        state.pushPending()
        state.pending = rest
        return linkify(state, silent)
    found = linkify(state, silent)
    state.pending = before + state.pending
    return found


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "linkify": True}, renderer_cls=_Renderer)
    parser.enable(["table", "strikethrough", "linkify"])
    parser.core.ruler.at("block", _parse_blocks)
    parser.core.ruler.at("inline", _parse_inlines)
    everywhere = {"alt": ["paragraph", "reference", "blockquote", "list"]}
    parser.block.ruler.before("table", "count", _count_line, everywhere)
    parser.inline.ruler.before("text", "count", _count_place)
    parser.inline.ruler.at("linkify", _plain_link)
    if parser.linkify is not None:
        parser.linkify.set({"fuzzy_link": False, "fuzzy_email": False, "fuzzy_ip": False})
    return parser


PARSER = _parser()
INLINES = _parser()
INLINES.options["maxNesting"] = LABELS_WITHIN_LABELS


def language(fence: Token) -> str:
    """The language a fence names, cut to what a label can show."""
    words = fence.info.split()
    return words[0][:40] if words else ""


@lru_cache(maxsize=64)
def _lexer(name: str) -> Lexer | None:
    try:
        return get_lexer_by_name(name.lower(), stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def code_lines(code: str, lang: str) -> list[str]:
    """Each line of ``code`` as HTML of its own, with every span closed on its line."""
    code = code.removesuffix("\n")
    lexer = _lexer(lang) if lang and len(code) <= HIGHLIGHT_LIMIT else None
    if lexer is None:
        return escape(code, quote=False).split("\n")
    lines = pygments.format(_tokens(code, lexer), _FORMATTER).split("\n")
    want = code.count("\n") + 1
    # The formatter ends every line with a newline, so one empty line hangs over.
    while len(lines) > want and not lines[-1]:
        lines.pop()
    return lines


def _tokens(code: str, lexer: Lexer) -> Iterator[tuple[Any, str]]:
    # Some lexers look through all the rest for the end of each thing that begins: thousands of beginnings
    # would keep a process busy for minutes.
    end = time.thread_time() + HIGHLIGHT_SECONDS
    for index, kind, text in lexer.get_tokens_unprocessed(code):
        yield kind, text
        if time.thread_time() > end:
            yield Text, code[index + len(text) :]
            return


def code_html(code: str, lang: str) -> str:
    # Lines are blocks of the page's style: a browser lays out again only those that change.
    body = "".join(f'<span class="line">{line or chr(10)}</span>' for line in code_lines(code, lang))
    return f'<pre class="code" data-lang="{escape(lang)}"><code>{body}</code></pre>'


def clean(html: str) -> str:
    """Let through only the tags, attributes and URL schemes that Markdown needs."""
    return _CLEANER.clean(html)


def top_level(tokens: Sequence[Token]) -> list[list[Token]]:
    """Group a parsed document's tokens by top-level block."""
    groups: list[list[Token]] = []
    depth = 0
    for token in tokens:
        if depth == 0:
            groups.append([])
        groups[-1].append(token)
        depth += token.nesting
    return groups


def render_tokens(tokens: Sequence[Token], env: dict[str, Any]) -> str:
    return clean(PARSER.renderer.render(tokens, PARSER.options, env))
