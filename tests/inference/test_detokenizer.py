"""Incremental detokenisation against decoding the whole at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from inference.engine.scripted import ScriptedTokenizer
from inference.text import Detokenizer, Tokenizer, decode_all
from tests.tokenizers import DATA, small_tokenizer

VOCABULARIES = ("bytelevel", "sentencepiece")
TEXTS = st.one_of(
    st.text(),
    st.text(st.sampled_from("🙂🚀👍❤\ufe0f👩\u200d👧🇩🇪")),
    st.text(st.sampled_from("東京は夜の七時你好世界안녕 ")),
    st.text(st.sampled_from("नमस्ते दुनिया क्षत्रिय ")),
    st.text(st.sampled_from(" \n\tab.▁")),
)


def tokenizer_named(name: str) -> Tokenizer:
    return ScriptedTokenizer() if name == "scripted" else small_tokenizer(name)


def split_at(ids: Sequence[int], places: Sequence[int]) -> list[Sequence[int]]:
    bounds = [0, *sorted(place % (len(ids) + 1) for place in places), len(ids)]
    return [ids[begin:end] for begin, end in itertools.pairwise(bounds)]


def pieces_of(tokenizer: Tokenizer, parts: Sequence[Sequence[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(part) for part in parts), detokenizer.flush()]


SPLITS = st.lists(st.integers(0, 10_000), max_size=12)


@pytest.mark.parametrize("name", [*VOCABULARIES, "scripted"])
class TestPieces:
    @given(ids=st.lists(st.integers(0, 700), max_size=60), places=SPLITS)
    def test_random_ids_in_any_split_join_to_the_whole(self, name: str, ids: list[int], places: list[int]) -> None:
        tokenizer = tokenizer_named(name)
        assert "".join(pieces_of(tokenizer, split_at(ids, places))) == decode_all(tokenizer, ids)

    @given(text=TEXTS)
    def test_no_piece_of_a_valid_text_holds_half_a_character(self, name: str, text: str) -> None:
        tokenizer = tokenizer_named(name)
        ids = tokenizer.encode(text, trusted=False)
        pieces = pieces_of(tokenizer, [[token] for token in ids])
        whole = "".join(pieces)
        assert whole.count("\ufffd") == text.count("\ufffd")
        assert pieces[-1] == "", "a complete text leaves nothing for the end"

    @given(text=TEXTS)
    def test_encoding_and_decoding_gives_the_text_back(self, name: str, text: str) -> None:
        tokenizer = tokenizer_named(name)
        decoded = tokenizer.decode(tokenizer.encode(text, trusted=False))
        # SentencePiece spells the space and its own mark alike.
        assert decoded == (text.replace("▁", " ") if name == "sentencepiece" else text)


@given(ids=st.lists(st.integers(0, 700), max_size=60), skip=st.booleans())
def test_byte_level_decodes_as_the_library_does(ids: list[int], skip: bool) -> None:
    library = Library.from_file(str(DATA / "bytelevel.json"))
    expected = library.decode(ids, skip_special_tokens=skip)
    assert small_tokenizer("bytelevel").decode(ids, skip_special=skip) == expected


@given(ids=st.lists(st.integers(0, 700), max_size=60))
def test_byte_fallback_decodes_as_the_library_does_where_the_bytes_are_valid(ids: list[int]) -> None:
    library = Library.from_file(str(DATA / "sentencepiece.json"))
    ours = small_tokenizer("sentencepiece").decode(ids)
    theirs = library.decode(ids, skip_special_tokens=True)
    if "\ufffd" in ours:
        assert "\ufffd" in theirs
    else:
        assert ours == theirs


def test_every_token_alone_decodes_as_the_library_does() -> None:
    library = Library.from_file(str(DATA / "bytelevel.json"))
    tokenizer = small_tokenizer("bytelevel")
    for token in range(library.get_vocab_size()):
        assert tokenizer.token_text(token) == library.decode([token], skip_special_tokens=False)


def test_character_of_four_byte_tokens_appears_with_its_last_byte() -> None:
    detokenizer = Detokenizer(ScriptedTokenizer())
    pieces = [detokenizer.push([byte]) for byte in "🙂".encode()]
    assert pieces == ["", "", "", "🙂"]
    assert not detokenizer.pending()


def test_invalid_byte_becomes_one_replacement_character_and_the_text_goes_on() -> None:
    detokenizer = Detokenizer(ScriptedTokenizer())
    assert detokenizer.push([0x61, 0xFF, 0x62]) == "a\ufffdb"


def test_unfinished_character_is_shown_at_the_end_only() -> None:
    detokenizer = Detokenizer(ScriptedTokenizer())
    assert detokenizer.push("é".encode()[:1]) == ""
    assert detokenizer.pending()
    assert detokenizer.flush() == "\ufffd"


def test_only_the_first_space_of_a_sentencepiece_text_is_left_out() -> None:
    tokenizer = small_tokenizer("sentencepiece")
    ids = tokenizer.encode("the cat  sat")
    assert pieces_of(tokenizer, [[token] for token in ids])[0].lstrip(" ") != ""
    assert "".join(pieces_of(tokenizer, [[token] for token in ids])) == "the cat  sat"


@pytest.mark.parametrize("name", VOCABULARIES)
@given(prompt=st.text(st.sampled_from("the catsn🙂 "), min_size=1).filter(str.strip), ids=st.lists(st.integers(0, 700)))
def test_a_text_that_goes_on_after_another_keeps_its_first_space(name: str, prompt: str, ids: list[int]) -> None:
    """The rest of a prompt was shown as a text of its own: "the cat" went on with "sat"."""
    tokenizer = small_tokenizer(name)
    before = tokenizer.encode(prompt, trusted=False)
    rest = Detokenizer(tokenizer, continues=True)
    assert prompt + rest.push(ids) + rest.flush() == decode_all(tokenizer, [*before, *ids])


def test_special_and_unknown_ids_add_nothing() -> None:
    tokenizer = small_tokenizer("bytelevel")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([*tokenizer.special_ids, 10**9, -1]) == ""
    assert detokenizer.flush() == ""
