"""What each token id of a ``tokenizer.json`` stands for, in bytes.

Knows the two families that language models use: byte-level BPE, and
SentencePiece-like vocabularies with or without byte fallback. Other decoders
(WordPiece, none) are taken as far as one token on its own tells its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from inference.text.protocol import LeadingSpace

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class Vocabulary:
    """Token bytes by id, and what else follows from the tokenizer's description.

    Attributes:
        bytes: of every id, special tokens as they are written; empty for ids without a token.
        visible: the same with nothing for special tokens.
        special: ids of special tokens.
        leading_space: see :data:`inference.text.protocol.LeadingSpace`.
    """

    def __init__(self, spec: Mapping[str, Any], tokens: Mapping[str, int], alone: Callable[[int], str]) -> None:
        """``spec`` is the parsed file, ``tokens`` the whole vocabulary, ``alone`` decodes one id."""
        self.special = frozenset(added["id"] for added in spec.get("added_tokens", ()) if added["special"])
        self.leading_space: LeadingSpace = "keep"
        to_bytes = self._reader(flatten(spec.get("decoder"), "decoders"))
        table = [b""] * (max(tokens.values(), default=-1) + 1)
        for text, token in tokens.items():
            table[token] = alone(token).encode() if to_bytes is None else to_bytes(text)
        self.bytes = tuple(table)
        for token in self.special:
            table[token] = b""
        self.visible = tuple(table)
        self.longest = max(map(len, self.bytes), default=1)

    def _reader(self, steps: list[Mapping[str, Any]]) -> Callable[[str], bytes] | None:
        """How one token's text turns into bytes; ``None`` where only the library can tell."""
        kinds = [step["type"] for step in steps]
        if "ByteLevel" in kinds:
            return _byte_level
        replaced: list[tuple[str, str]] = []
        fallback = fused = False
        for step in steps:
            kind = step["type"]
            if kind == "Replace" and "String" in step["pattern"]:
                replaced.append((step["pattern"]["String"], step["content"]))
            elif kind == "Metaspace":
                replaced.append((step["replacement"], " "))
                scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
                self.leading_space = "keep" if scheme == "never" else "strip_token"
            elif kind == "ByteFallback":
                fallback = True
            elif kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and step["content"] == " " and step["stop"] == 0:
                self.leading_space = "strip_one" if step["start"] == 1 else "keep"
            else:
                return None
        if not steps:
            return None

        def read(text: str) -> bytes:
            if fallback and (match := _BYTE_TOKEN.match(text)):
                return bytes([int(match[1], 16)])
            for old, new in replaced:
                text = text.replace(old, new)
            return text.encode()

        return read


def flatten(step: Mapping[str, Any] | None, nested: str) -> list[Mapping[str, Any]]:
    """The steps of a component that may be a ``Sequence`` of others."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for each in step[nested] for inner in flatten(each, nested)]
    return [step]


def _byte_letters() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the rest is shifted up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(value): value for value in plain}
    others = (value for value in range(256) if chr(value) not in letters)
    shifted = {chr(256 + place): value for place, value in enumerate(others)}
    return letters | shifted


_LETTERS = _byte_letters()


def _byte_level(text: str) -> bytes:
    """A token with a character outside the alphabet (an added token) stands for its own text."""
    try:
        return bytes([_LETTERS[char] for char in text])
    except KeyError:
        return text.encode()


def text_can_vanish(spec: Mapping[str, Any]) -> bool:
    """Whether any amount of text may become few tokens, so that length says nothing.

    That is so where runs of unknown characters are fused, or where whitespace is dropped.
    """
    model = spec.get("model") or {}
    if model.get("fuse_unk") and not model.get("byte_fallback"):
        return True
    if model.get("type") not in ("BPE", "Unigram"):
        return True
    if any(added["lstrip"] or added["rstrip"] for added in spec.get("added_tokens", ())):
        return True
    known = {"ByteLevel", "Split", "Metaspace", "Digits", "Punctuation", "UnicodeScripts"}
    steps = flatten(spec.get("pre_tokenizer"), "pretokenizers")
    return any(step["type"] not in known or step.get("behavior") == "Removed" for step in steps)


def text_can_shrink(spec: Mapping[str, Any]) -> bool:
    """Whether a normaliser may make the text shorter (NFC, stripping), by a factor of a few."""
    steps = flatten(spec.get("normalizer"), "normalizers")
    return any(step["type"] not in ("Prepend", "Replace") for step in steps)
