"""Grammar-constrained decoding through llguidance."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray

from inference.engine.grammar_check import compile_source
from inference.messages import Grammar

if TYPE_CHECKING:
    from inference.engine.transformers.generation import Generation


class GrammarCompiler:
    """Makes matchers for one tokenizer. Its methods block: call them off the event loop.

    Args:
        tokenizer: a fast Hugging Face tokenizer, or ``None`` where the model has none.
        vocab_size: width of the model's logits.
        eos_ids: ids that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()
        self._prepared: LLTokenizer | None = None

    def matcher(self, grammar: Grammar, tokens: Sequence[int] = ()) -> LLMatcher:
        """A matcher that has already followed ``tokens``.

        Raises:
            ValueError: the grammar is invalid, or the tokens do not follow it.
        """
        matcher = LLMatcher(self._prepare(), compile_source(grammar), log_level=0)
        if matcher.is_error():
            raise ValueError(f"The grammar is invalid: {' '.join(matcher.get_error().split())[:300]}")
        if tokens and not matcher.consume_tokens(list(tokens)):
            raise ValueError("The answer so far does not follow the grammar.")
        return matcher

    def _prepare(self) -> LLTokenizer:
        """The tokenizer as llguidance wants it; takes a few hundred milliseconds once."""
        with self._lock:
            if self._prepared is None:
                if self._tokenizer is None or not self._eos_ids:
                    raise ValueError("This model's tokenizer does not support grammars.")
                self._prepared = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_ids)
            return self._prepared


def allowed_tokens(generations: Sequence[Generation], vocab_size: int) -> NDArray[np.bool_]:
    """Which tokens each generation's grammar allows next, ``[generations, vocab_size]``.

    A matcher that fails marks its generation with ``error`` and allows everything.
    """
    bits = np.zeros((len(generations), (vocab_size + 31) // 32), np.int32)
    for row, generation in zip(bits, generations, strict=True):
        matcher = generation.matcher
        if matcher is None:
            continue
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            generation.error = "The grammar could not be followed any further."
            row[:] = -1
    unpacked = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return unpacked.view(np.bool_)
