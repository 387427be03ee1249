"""Stop strings across any split of the text, and the text of a whole request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.engine.scripted import ScriptedTokenizer
from inference.text import StopMatcher, TextStream

LETTERS = st.sampled_from("ab€")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=4)


def read_slowly(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The definition: the reader stops with the first character that completes a stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def feed(stops: Sequence[str], parts: Sequence[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    emitted = []
    for part in parts:
        emit, stop = matcher.push(part)
        emitted.append(emit)
        if stop is not None:
            return emitted, stop
    return [*emitted, matcher.flush()], None


@given(parts=st.lists(st.text(LETTERS, max_size=6), max_size=12), stops=STOPS)
def test_any_split_gives_what_a_slow_reader_sees(parts: list[str], stops: list[str]) -> None:
    emitted, stop = feed(stops, parts)
    assert ("".join(emitted), stop) == read_slowly("".join(parts), stops)


@given(parts=st.lists(st.text(LETTERS, max_size=6), max_size=12), stops=STOPS)
def test_only_what_may_still_become_a_stop_string_is_held_back(parts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = ""
    for part in parts:
        _, stop = matcher.push(part)
        if stop is not None:
            return
        seen += part
        beginnings = [n for n in range(len(seen) + 1) for s in stops if n < len(s) and seen.endswith(s[:n])]
        assert matcher.held == max(beginnings)


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "found"),
    [
        (["aab"], ["a", "a", "a", "b", "c"], "a", "aab"),
        (["aab"], ["aaab"], "a", "aab"),
        (["</end>"], ["one </en", "d> two"], "one ", "</end>"),
        (["</end>"], ["one </en", "try> two"], "one </entry> two", None),
        (["bc", "abcd"], ["ab", "cd"], "a", "bc"),
        (["b", "ab"], ["a", "b"], "", "ab"),
        (["ab", "ab"], ["ab"], "", "ab"),
        (["🙂🙂"], ["x🙂", "🙂y"], "x", "🙂🙂"),
        ([""], ["anything"], "anything", None),
        ([], ["anything"], "anything", None),
        (["x"], [], "", None),
    ],
)
def test_examples(stops: list[str], parts: list[str], shown: str, found: str | None) -> None:
    emitted, stop = feed(stops, parts)
    assert ("".join(emitted), stop) == (shown, found)


def test_long_stop_string_against_a_text_that_nearly_repeats_it_stays_cheap() -> None:
    stop = "a" * 4000 + "b"
    matcher = StopMatcher([stop])
    emitted = sum(len(matcher.push("aa")[0]) for _ in range(6000))
    assert emitted == 12_000 - 4000
    assert len(matcher.flush()) == 4000


TOKENIZER = ScriptedTokenizer()


def run(stream: TextStream, ids: Sequence[int], finish: str = "stop") -> tuple[str, str | None, int]:
    """Token by token, as most engines deliver; the text, what stopped it, the tokens used."""
    text = ""
    for place, token in enumerate(ids):
        delta = stream.push([token])
        text += delta.text
        if delta.finished_by is not None:
            return text, delta.finished_by, place + 1
    return text + stream.finish(finish), None, len(ids)


ANSWERS = st.text(st.sampled_from("ab€🙂"), max_size=20).map(lambda text: list(text.encode()))


class TestTextStream:
    @given(ids=ANSWERS, stops=STOPS, cut=st.integers(0, 60), min_tokens=st.integers(0, 10))
    def test_continuation_emits_what_an_undisturbed_run_would_have(
        self, ids: list[int], stops: list[str], cut: int, min_tokens: int
    ) -> None:
        whole = run(TextStream(TOKENIZER, stops, min_tokens=min_tokens), ids)
        cut = min(cut, len(ids))
        first = TextStream(TOKENIZER, stops, min_tokens=min_tokens)
        logged = ""
        for token in ids[:cut]:
            delta = first.push([token])
            logged += delta.text
            if delta.finished_by is not None:
                return
        second = TextStream(TOKENIZER, stops, min_tokens=min_tokens, ids=ids[:cut], text=logged)
        text, stop, used = run(second, ids[cut:])
        assert (logged + text, stop, cut + used) == whole

    @given(ids=ANSWERS, stops=STOPS, size=st.integers(1, 7), min_tokens=st.integers(0, 10))
    def test_several_tokens_at_once_end_where_single_ones_do(
        self, ids: list[int], stops: list[str], size: int, min_tokens: int
    ) -> None:
        stream = TextStream(TOKENIZER, stops, min_tokens=min_tokens)
        text, used, stop = "", 0, None
        for begin in range(0, len(ids), size):
            delta = stream.push(ids[begin : begin + size])
            text, used, stop = text + delta.text, used + delta.used, delta.finished_by
            if stop is not None:
                break
        if stop is None:
            text += stream.finish()
        assert (text, stop, used) == run(TextStream(TOKENIZER, stops, min_tokens=min_tokens), ids)

    @given(ids=st.lists(st.integers(0, 255), max_size=40))
    def test_without_stop_strings_it_is_the_whole_decode(self, ids: list[int]) -> None:
        assert run(TextStream(TOKENIZER), ids)[0] == TOKENIZER.decode(ids)

    def test_stop_string_is_ignored_before_min_tokens(self) -> None:
        assert run(TextStream(TOKENIZER, ["b"], min_tokens=2), list(b"abcb"))[0] == "abc"
        assert run(TextStream(TOKENIZER, ["c"], min_tokens=2), list(b"abcb"))[0] == "ab"

    def test_hidden_token_counts_but_does_not_show(self) -> None:
        stream = TextStream(TOKENIZER, ["zz"])
        delta = stream.push([ord("a"), ord("b")], hidden=1)
        assert (delta.text, delta.used, stream.count) == ("a", 2, 2)

    def test_near_miss_comes_out_at_the_end(self) -> None:
        stream = TextStream(TOKENIZER, ["stop!"])
        assert stream.push(list(b"sto")).text == ""
        assert stream.finish("length") == "sto"

    def test_character_cut_by_the_token_limit_is_left_out(self) -> None:
        ids = [ord("a"), *"🙂".encode()[:2]]
        assert run(TextStream(TOKENIZER), ids, "length")[0] == "a"
        assert run(TextStream(TOKENIZER), ids, "stop")[0] == "a\ufffd"

    def test_nothing_comes_after_a_stop_string_even_in_the_same_token(self) -> None:
        stream = TextStream(None, ["."])
        assert stream.push([0], text="end. more").text == "end"
        assert stream.stopped == "."
        assert stream.finish() == ""

    def test_text_of_the_engine_is_searched_for_stop_strings(self) -> None:
        stream = TextStream(None, ["ab"])
        assert stream.push([0], text="xa").text == "x"
        delta = stream.push([0], text="bc")
        assert (delta.text, delta.finished_by) == ("", "ab")

    def test_log_that_already_holds_the_stop_string_says_so(self) -> None:
        stream = TextStream(TOKENIZER, ["."], ids=list(b"end."), text="end")
        assert stream.stopped == "."

    def test_text_once_sent_stands_where_the_replay_disagrees(self) -> None:
        stream = TextStream(TOKENIZER, ids=list(b"abc"), text="abX")
        assert stream.push(list(b"d")).text == "d"
        behind = TextStream(TOKENIZER, ids=list(b"abc"), text="a")
        assert behind.push(list(b"d")).text == "bcd"
