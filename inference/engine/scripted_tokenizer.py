"""The vocabulary of the scripted engine: bytes, a few special tokens, a few words.

Ids 0 to 255 are bytes, 256 to 259 special tokens, the rest words that only
answers are made of (prompts are encoded byte by byte, so that their length in
tokens can be told from their text). Some phrases hold characters of several
byte tokens, so that every path a model's text takes is walked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from inference.errors import TooLarge
from inference.text.detokenizer import decode_all
from inference.text.protocol import LeadingSpace

START, EOS, TOOL_START, TOOL_END = 256, 257, 258, 259
SPECIALS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
_WORDS = (
    " the of and to in is that it was for on are with as they be at one have this from by hot word but what "
    "some we can out other were all there when up use your how said an each she which do their time if will "
    "way about many then them write would like so these her long make thing see him two has look more day "
    "could go come did number sound no most people my over know water than call first who may down side been "
    "now find any new work part take get place made live where after back little only round man year came "
    "show every good me give our under name very through just form sentence great think say help low line "
    "differ turn cause much mean before move right boy old too same tell does set three want air well also "
    "play small end put home read hand port large spell add even land here must big high such follow act why"
)
WORDS = tuple(f" {word}" for word in _WORDS.split())
FIRST_WORD = 256 + len(SPECIALS)
VOCAB_SIZE = FIRST_WORD + len(WORDS)
PHRASE_LENGTH = 8
_CHARACTERS = ("é", "ß", "€", "語", "क", "🙂", "🚀", "한")


def _make_phrases() -> tuple[tuple[int, ...], ...]:
    """64 phrases of exactly ``PHRASE_LENGTH`` tokens; every eighth ends in a character of byte tokens."""
    phrases = []
    for number in range(64):
        tail = tuple(_CHARACTERS[number // 8].encode()) if number % 8 == 7 else ()
        words = PHRASE_LENGTH - len(tail)
        head = [FIRST_WORD + (number * 37 + step * step * 11 + step) % len(WORDS) for step in range(words)]
        if not tail:
            head[-1] = ord(",") if number % 2 else ord(".")
        phrases.append((*head, *tail))
    return tuple(phrases)


PHRASES = _make_phrases()


class ScriptedTokenizer:
    """Satisfies :class:`inference.text.protocol.Tokenizer` without any file."""

    leading_space: LeadingSpace = "keep"
    vocab_size = VOCAB_SIZE
    eos_ids = frozenset({EOS})
    special_ids = frozenset({START, EOS})
    has_chat_template = True
    upstream = False

    def __init__(self, *, context_length: int = 4096) -> None:
        self.context_length = context_length

    def encode(self, text: str, *, add_special_tokens: bool = False, trusted: bool = True) -> list[int]:
        """Byte by byte; where ``trusted``, special tokens written in the text become such."""
        if not trusted or "<" not in text:
            return list(text.encode("utf-8", "replace"))
        ids: list[int] = []
        while True:
            found = [(at, n) for n, special in enumerate(SPECIALS) if (at := text.find(special)) >= 0]
            if not found:
                return ids + list(text.encode("utf-8", "replace"))
            at, number = min(found)
            ids += [*text[:at].encode("utf-8", "replace"), 256 + number]
            text = text[at + len(SPECIALS[number]) :]

    def encode_bounded(
        self, text: str, limit: int, *, add_special_tokens: bool = False, trusted: bool = True
    ) -> list[int]:
        """As ``encode``.

        Raises:
            TooLarge: the text has more than ``limit`` tokens.
        """
        if self.estimate_min_tokens(text) > limit:
            raise TooLarge(f"The text has more than {limit} tokens.")
        ids = self.encode(text, add_special_tokens=add_special_tokens, trusted=trusted)
        if len(ids) > limit:
            raise TooLarge(f"The text has {len(ids)} tokens; at most {limit} are possible.")
        return ids

    def estimate_min_tokens(self, text: str) -> int:
        """A lower bound of the tokens of ``text``, without encoding it."""
        return len(text) // len(SPECIALS[0])

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if skip_special:
            return decode_all(self, ids)
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def visible_bytes(self, token_id: int) -> bytes:
        return _VISIBLE[token_id] if 0 <= token_id < VOCAB_SIZE else b""

    def token_bytes(self, token_id: int) -> bytes:
        return _BYTES[token_id] if 0 <= token_id < VOCAB_SIZE else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        limit: int | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """ChatML: role and content of each message between the special tokens.

        Raises:
            TooLarge: the prompt has more than ``limit`` tokens.
        """
        ids: list[int] = []
        if tools:
            listed = "Tools: " + msgspec.json.encode(list(tools)).decode()
            ids += [START, *self.encode(f"system\n{listed}", trusted=False), EOS, 10]
        for message in messages:
            text = f"{message.get('role')}\n{_content(message)}"
            if limit is not None and len(ids) + len(text) > limit:
                raise TooLarge(f"The prompt has more than {limit} tokens.")
            ids += [START, *self.encode(text, trusted=False), EOS, 10]
        if continue_final and messages:
            del ids[-2:]
        elif add_generation_prompt:
            ids += [START, *self.encode("assistant\n")]
        if limit is not None and len(ids) > limit:
            raise TooLarge(f"The prompt has {len(ids)} tokens; at most {limit} are possible.")
        return ids


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    else:
        text = "".join(part.get("text", "") for part in content)
    if message.get("tool_calls"):
        text += msgspec.json.encode(message["tool_calls"]).decode()
    return text


_BYTES = (
    *(bytes([value]) for value in range(256)),
    *(special.encode() for special in SPECIALS),
    *(word.encode() for word in WORDS),
)
_VISIBLE = tuple(b"" if token in ScriptedTokenizer.special_ids else value for token, value in enumerate(_BYTES))
