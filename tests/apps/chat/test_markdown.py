"""Answers as HTML: what Markdown becomes, and that no prefix of any text becomes a script (UI-04)."""

from __future__ import annotations

import re
import time
from html import escape as html_escape
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.chat.live import LiveMarkdown, Shown, complete, complete_content
from apps.chat.markdown import HIGHLIGHT_SECONDS, PARSER, code_lines, render_tokens

TAGS = (
    {"p", "br", "hr", "strong", "em", "s", "del", "code", "pre", "span", "a", "blockquote"}
    | {"ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td"}
    | {"h3", "h4"}
)
ATTRIBUTES = {"href", "title", "class", "data-lang", "start", "target", "rel"}

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt&colon;alert(1)) [c](&#106;avascript:alert(1))",
    "[d](data:text/html;base64,PHNjcmlwdD4=) ![e](javascript:alert(1)) ![f](data:image/svg+xml,<svg/onload=1>)",
    "<svg onload=alert(1)><script>alert(1)</script>",
    "```html\n<script>alert(1)</script>\n",
    '```"><script>alert(1)</script>\nx\n```\n',
    "| <b onclick=x> | b |\n|:-:|--|\n| `<i>` | <iframe src=//x> |",
    '[t](https://x.org "\\"onmouseover=alert(1) x=\\"")',
    "<a href='javascript:1'>x</a> <https://ok.org> <javascript:alert(1)>",
    "- a\n  ```\n  </code></pre><script>1</script>\n",
    "1. x\n\n   > <math><mi//xlink:href='data:x,<script>1</script>'>",
    "&lt;script&gt;alert(1)&lt;/script&gt; \x00 \ufffd \u202e",
    "[ref]: javascript:alert(1)\n\n[ref]",
    "# <h1 onclick=a>\n\nx\n===\n<!-- --><![CDATA[<script>]]>",
]


def render(text: str) -> str:
    """A whole message as HTML."""
    env: dict[str, Any] = {}
    return render_tokens(PARSER.parse(text, env), env)


class Checker(HTMLParser):
    """Fails on anything that is not on the short list."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        for name, value in attrs:
            assert name in ATTRIBUTES, (tag, name)
            if name == "href":
                assert re.match(r"(https?://|mailto:|[/#?]|[^:]*$)", value or "", re.I), value

    def handle_comment(self, data: str) -> None:
        raise AssertionError("a comment")


def check(html: str) -> None:
    Checker().feed(html)


def check_content(content: dict[str, Any] | None) -> None:
    for op in (content or {"ops": []})["ops"]:
        if op[0] == "html":
            check(op[2])
        else:
            for line in op[4]:
                assert "\n" not in line
                check(line)


@pytest.mark.parametrize("text", HOSTILE)
def test_ui_04_every_prefix_is_safe(text: str) -> None:
    live, shown = LiveMarkdown(), Shown()
    for end in range(len(text) + 1):
        check(render(text[:end]))
        live.update(text[:end])
        check_content(shown.advance(live.blocks))
    check_content(complete_content(text))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*HOSTILE, "\n", "\n\n", "`", "```\n", "> ", "- ", "|", "*", "<", "[x](", ")", " "])))
def test_ui_04_mixtures_are_safe_at_every_piece(pieces: list[str]) -> None:
    live, shown, text = LiveMarkdown(), Shown(), ""
    for piece in pieces:
        text += piece
        live.update(text)
        check_content(shown.advance(live.blocks))
    check_content(shown.advance(complete(text)))


class Page:
    """Applies operations as the page does."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []

    def apply(self, content: dict[str, Any] | None) -> None:
        if content is None:
            return
        for op in content["ops"]:
            while len(self.blocks) <= op[1]:
                self.blocks.append(None)
            if op[0] == "html":
                self.blocks[op[1]] = op[2]
            else:
                _, index, lang, start, lines = op
                old = self.blocks[index]
                kept = old[1][:start] if isinstance(old, tuple) else []
                assert len(kept) == start
                self.blocks[index] = (lang, kept + lines)
        del self.blocks[content["count"] :]


def whole(text: str) -> list[Any]:
    page = Page()
    page.apply(complete_content(text))
    return page.blocks


DOCUMENT = """# Title

Some *text*, `code`, a [link](https://x.org).

- one
- two

  ```python
  x = 1
  ```

```python
def f(x):
    '''Over
    two lines.'''
    return x < 3
```

| a | b |
|---|--:|
| 1 | 2 |

1. x
2. y

> quoted
lazy

last
"""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_growing_in_any_pieces_ends_in_the_whole(sizes: list[int]) -> None:
    live, shown, page, end = LiveMarkdown(), Shown(), Page(), 0
    for size in sizes:
        end += size
        live.update(DOCUMENT[:end])
        page.apply(shown.advance(live.blocks))
    page.apply(shown.advance(complete(DOCUMENT)))
    assert page.blocks == whole(DOCUMENT)


def test_finished_blocks_are_not_sent_again() -> None:
    live, shown = LiveMarkdown(), Shown()
    live.update("One.\n\nTwo")
    shown.advance(live.blocks)
    live.update("One.\n\nTwo and more")
    content = shown.advance(live.blocks)
    assert content is not None
    assert [op[1] for op in content["ops"]] == [1]


def test_code_sends_only_new_lines() -> None:
    live, shown = LiveMarkdown(), Shown()
    live.update("```python\na = 1\nb = 2\n")
    shown.advance(live.blocks)
    live.update("```python\na = 1\nb = 2\nc")
    content = shown.advance(live.blocks)
    assert content is not None
    (op,) = content["ops"]
    assert op[0] == "code" and op[3] == 2 and len(op[4]) == 1


def test_an_undecided_last_line_is_held_back() -> None:
    live = LiveMarkdown()
    live.update("text\n-")
    assert [block.html for block in live.blocks] == ["<p>text</p>\n"]
    live.update("text\n- item")
    assert len(live.blocks) == 2


def test_long_code_is_not_highlighted_anew_each_time() -> None:
    """The work of one update is bounded: later ones cost no more than early ones, by far."""
    code = "```python\n" + "def f(x):\n    return [y for y in range(10) if y < x]  # comment\n" * 600
    live = LiveMarkdown()

    def cost(begin: int) -> float:
        best = 1e9
        for end in range(begin, begin + 200, 40):
            start = time.perf_counter()
            live.update(code[:end])
            best = min(best, time.perf_counter() - start)
        return best

    early = cost(9_000)
    late = cost(len(code) - 400)
    assert late < 6 * early + 0.02


def test_code_that_a_lexer_takes_minutes_for_is_shown_all_the_same() -> None:
    """Perl's looks for the end of each ``s{`` in all that follows: 25,000 of them took a minute."""
    code = "my $x = 1;\n" + "s{\n" * 15_000
    start = time.thread_time()
    lines = code_lines(code, "perl")
    assert time.thread_time() - start < 4 * HIGHLIGHT_SECONDS
    assert len(lines) == 15_001 and "<span" in lines[0] and lines[-1] == "s{"


@pytest.mark.parametrize("unit", ["|-|\n> a@b\n> > \t", "http://  ", "![", "[", "> * ", "http://![a", "[a](b '"])
def test_a_render_costs_in_proportion_to_the_text(unit: str) -> None:
    """The first two made the parser look through all the rest for each thing that begins: 40,000 characters, 13 s."""

    def cost(length: int) -> float:
        text = (unit * length)[:length]
        best = 1e9
        for _ in range(3):
            live, start = LiveMarkdown(), time.thread_time()
            live.update(text)
            best = min(best, time.thread_time() - start)
        return best

    cost(100)  # what is compiled at first use
    assert cost(20_000) < 8 * cost(5_000) + 0.005


def test_what_is_too_costly_is_shown_as_it_was_written() -> None:
    text = "|-|\n> a@b\n> > \t" * 500
    live, shown = LiveMarkdown(), Shown()
    live.update(text)
    (block,) = live.blocks
    assert block.lines is not None and "\n".join(block.lines) == html_escape(text, quote=False)
    check_content(shown.advance(live.blocks))
    assert "<pre" in render(text)
    # One paragraph alone: the others keep what they have.
    html = render("*one*\n\n" + "[" * 20_000 + "*two*\n\n*three*")
    assert "<em>one</em>" in html and "<em>three</em>" in html


def test_brackets_and_plain_links_are_found_however_much_is_around_them() -> None:
    far = "word " * 2_000
    html = render(
        f"{far}[[[[see](https://a.org)]]] {far}https://b.org/x {far}[![i](https://c.org/i.png)](https://d.org)"
    )
    for link in ("https://a.org", "https://b.org/x", "https://c.org/i.png"):
        assert f'href="{link}"' in html
    deep = "\n".join("  " * depth + "- item" for depth in range(9))
    assert render(deep * 3).count("<ul>") >= 9
    matrix = ", ".join("[[1, 2], [3, [4, [5]]]]" for _ in range(500)) + " and *so on*"
    assert "<em>so on</em>" in render(matrix)


def test_markdown_that_people_use() -> None:
    html = render(DOCUMENT)
    for part in ("<h3>", "<em>", '<pre class="code" data-lang="python">', 'class="align-right"', "<blockquote>"):
        assert part in html
    assert 'rel="noopener noreferrer nofollow"' in html
    assert 'class="k">def' in html


def test_images_are_links_so_that_reading_fetches_nothing() -> None:
    html = render("![a cat](https://x.org/cat.png)")
    assert "<img" not in html
    assert 'href="https://x.org/cat.png"' in html and ">a cat<" in html
