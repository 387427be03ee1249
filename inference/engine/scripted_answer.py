"""What the scripted engine says: tokens as a pure function of prompt, seed and position."""

from __future__ import annotations

import msgspec

from inference.engine.scripted_tokenizer import PHRASE_LENGTH, PHRASES
from inference.messages import Grammar, Job, TokenLogprob


class ScriptedAnswer:
    """One running answer: its tokens by position, where it ends, what fault it is to make."""

    __slots__ = (
        "cost", "end", "fault", "fault_at", "id", "job", "key", "phrase", "position", "script", "stops"
    )  # fmt: skip

    def __init__(self, job: Job, position: int, key: int) -> None:
        params = job.params
        self.id = job.id
        self.job = job
        self.key = key
        self.position = position
        self.script: list[int] | None = None
        self.phrase: tuple[int, ...] = ()
        self.stops = frozenset(params.stop_token_ids)
        self.cost = len(job.prompt_ids) + params.max_tokens
        self.fault = b""
        self.fault_at = -1
        self.end = 1 << 62 if params.ignore_eos else max(16 + key % 240, params.min_tokens)
        if position % PHRASE_LENGTH:
            self.phrase = _phrase(key, position // PHRASE_LENGTH)

    def say(self, text: bytes) -> None:
        """Answer with ``text`` instead of phrases."""
        params = self.job.params
        self.script = list(text)
        if not params.ignore_eos:
            self.end = max(len(text), params.min_tokens)

    def obey(self, grammar: Grammar) -> None:
        """Answer with a text of the grammar, or fail at once where none is known."""
        if grammar.kind == "choice":
            self.say(msgspec.json.decode(grammar.spec, type=list[str])[0].encode())
        elif grammar.kind == "json_object":
            self.say(b'{"answer": 42}')
        else:
            self.fault, self.fault_at = b"error", self.position

    def next_token(self) -> int:
        position = self.position
        if self.script is not None:
            if position < len(self.script):
                return self.script[position]
            return self.script[position % len(self.script)] if self.script else 32
        place = position % PHRASE_LENGTH
        if not place:
            self.phrase = _phrase(self.key, position // PHRASE_LENGTH)
        return self.phrase[place]


def _phrase(key: int, block: int) -> tuple[int, ...]:
    """The tokens of one block of an answer; multiplicative hashing, no state."""
    mixed = ((key ^ (block * 0x9E3779B1)) * 0x85EBCA6B) & 0xFFFFFFFF
    return PHRASES[(mixed >> 16) % len(PHRASES)]


def logprob(token: int, position: int, alternatives: int) -> TokenLogprob:
    """Finite, negative, reproducible; the chosen token is the likeliest."""
    value = -(1 + (token * 31 + position) % 97) / 100
    top = [((token + step) % 256 if step else token, value - step) for step in range(alternatives)]
    return TokenLogprob(token, value, top)
