"""Token ids to text, one step at a time, without ever showing half a character.

The definition of a text is by bytes: every token stands for a fixed string of
bytes (:meth:`TokenBytes.visible_bytes`), the text is their concatenation decoded
as UTF-8, and each maximal invalid stretch becomes one U+FFFD. Byte-level BPE
decodes exactly so. For vocabularies with byte fallback it differs from the
``tokenizers`` library in one way only: there a run of byte tokens that is
invalid anywhere is replaced as a whole, which would mean holding back every
emoji until the run has ended.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from inference.text.protocol import LeadingSpace, TokenBytes

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental decoder of one sequence; constant work per token.

    Invariant: what all calls of :meth:`push` and one final :meth:`flush` return,
    joined, equals :func:`decode_all` of all ids, however they were split.

    Args:
        continues: the text goes on after another one, so that a space at its start is kept.
    """

    __slots__ = ("_bytes_of", "_decoder", "_strip")

    def __init__(self, tokenizer: TokenBytes, *, continues: bool = False) -> None:
        self._bytes_of = tokenizer.visible_bytes
        self._decoder = _utf8("replace")
        self._strip: LeadingSpace = "keep" if continues else tokenizer.leading_space

    def push(self, ids: Iterable[int]) -> str:
        """Take more ids; return the text that has become certain, possibly none."""
        bytes_of = self._bytes_of
        if self._strip != "keep":
            return self._push_first(ids)
        return self._decoder.decode(b"".join([bytes_of(token) for token in ids]))

    def _push_first(self, ids: Iterable[int]) -> str:
        """As ``push`` while the text's first bytes, and so its leading space, are outstanding."""
        rest = iter(ids)
        for token in rest:
            first = self._bytes_of(token)
            if not first:
                continue
            first = first.lstrip(b" ") if self._strip == "strip_token" else first.removeprefix(b" ")
            self._strip = "keep"
            return self._decoder.decode(first) + self.push(rest)
        return ""

    def pending(self) -> bool:
        """Whether the last bytes are the beginning of a character that is not complete."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """End the text: an incomplete character at its end comes out as one U+FFFD."""
        return self._decoder.decode(b"", final=True)


def decode_all(tokenizer: TokenBytes, ids: Sequence[int]) -> str:
    """The whole text of ``ids``: what a :class:`Detokenizer` gives in pieces."""
    detokenizer = Detokenizer(tokenizer)
    return detokenizer.push(ids) + detokenizer.flush()
