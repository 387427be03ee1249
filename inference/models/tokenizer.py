"""A model's tokenizer and chat template, without torch or transformers.

API servers hold one per served model; workers use it to build text.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# One text at a time is encoded, off the event loop; a thread pool of the library's own would
# only warn about forks. To be set before the library is imported.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer as _Library

from inference.errors import ModelUnavailable, TooLarge
from inference.models.chat_template import ChatTemplate, ChatTemplateError
from inference.models.vocabulary import Vocabulary, text_can_shrink, text_can_vanish
from inference.text.detokenizer import decode_all
from inference.text.protocol import LeadingSpace

__all__ = ["ChatTemplateError", "ModelTokenizer"]

_SLICE = 1 << 17  # characters that are encoded between two looks at the limit
_CUT_COST = 32  # tokens that cutting a text in two may add, generously
_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)


class ModelTokenizer:
    """Satisfies :class:`inference.text.protocol.Tokenizer`; every method may be called from any thread.

    Args:
        folder: holds ``tokenizer.json`` and what else models come with:
            ``tokenizer_config.json``, ``chat_template.jinja``, ``config.json``,
            ``generation_config.json``.
        context_length: overrides what the model's configuration says, where greater than 0.

    Raises:
        ModelUnavailable: a file is missing or malformed.
    """

    upstream = False

    def __init__(self, folder: str | Path, *, context_length: int = 0) -> None:
        self._folder = Path(folder)
        spec, self._trusted, self._untrusted = self._read_vocabulary()
        self._settings = _read_json(self._folder / "tokenizer_config.json")
        self._model = _read_json(self._folder / "config.json")
        self._vocabulary = Vocabulary(
            spec,
            self._trusted.get_vocab(with_added_tokens=True),
            lambda token: self._trusted.decode([token], skip_special_tokens=False),
        )
        self._lock = threading.Lock()
        self._context_length = context_length or self._read_context_length()
        self._eos_ids = self._read_eos_ids()
        self._bytes_per_token = 0
        if not text_can_vanish(spec):
            self._bytes_per_token = self._vocabulary.longest * (4 if text_can_shrink(spec) else 1)
        added = spec.get("added_tokens", ())
        self._control_tokens = [each["content"] for each in added if each["special"]]
        self._soft_tokens = _soft_tokens(spec)
        self._sources = self._read_templates()
        self._templates: dict[str, ChatTemplate] = {}

    # What it is

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token."""
        return len(self._vocabulary.bytes)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer: the model's and its tokenizer's, together."""
        return self._eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self._vocabulary.special

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer in tokens; 0 where the model's files do not say."""
        return self._context_length

    @property
    def has_chat_template(self) -> bool:
        return bool(self._sources)

    @property
    def leading_space(self) -> LeadingSpace:
        return self._vocabulary.leading_space

    # Text to ids

    def encode(self, text: str, *, add_special_tokens: bool = False, trusted: bool = True) -> list[int]:
        """The ids of ``text``.

        Args:
            add_special_tokens: put what the model expects around a text (BOS) there.
            trusted: take control tokens written in the text for such; otherwise they
                are encoded letter by letter like any other text.
        """
        library = self._trusted
        if not trusted and any(token in text for token in self._control_tokens + self._soft_tokens):
            library = self._untrusted
        # Not ``encode``: that holds the GIL, for half a second per megabyte; the batch call does not.
        try:
            encoded = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            # Lone surrogates, which JSON can spell, are no text.
            clean = text.encode("utf-8", "replace").decode()
            encoded = library.encode_batch_fast([clean], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        return ids

    def estimate_min_tokens(self, text: str) -> int:
        """A number of tokens that ``text`` has at least, told from its length at no cost."""
        if not self._bytes_per_token:
            return 0
        # Characters instead of bytes: counting those would copy the text.
        return -(-len(text) // self._bytes_per_token)

    def encode_bounded(
        self, text: str, limit: int, *, add_special_tokens: bool = False, trusted: bool = True
    ) -> list[int]:
        """As :meth:`encode`, with work bounded by ``limit`` however long the text is.

        Raises:
            TooLarge: the text has more than ``limit`` tokens.
        """
        least = self.estimate_min_tokens(text)
        if least > limit:
            raise TooLarge(f"The text has at least {least} tokens; at most {limit} are possible.")
        self._count_slices(text, limit, trusted)
        ids = self.encode(text, add_special_tokens=add_special_tokens, trusted=trusted)
        if len(ids) > limit:
            raise TooLarge(f"The text has {len(ids)} tokens; at most {limit} are possible.")
        return ids

    def _count_slices(self, text: str, limit: int, trusted: bool) -> None:
        """Encode a long text in slices, only to give up as soon as it can no longer fit."""
        count = begun = 0
        while len(text) - begun > _SLICE:
            # Before a space is where every pre-tokeniser cuts; without one, anywhere will do.
            end = text.rfind(" ", begun + _SLICE // 2, begun + _SLICE)
            end = begun + _SLICE if end < 0 else end
            count += len(self.encode(text[begun:end], trusted=trusted)) - _CUT_COST
            if count > limit:
                raise TooLarge(f"The text has more than {count} tokens; at most {limit} are possible.")
            begun = end

    # Ids to text

    def visible_bytes(self, token_id: int) -> bytes:
        """See :class:`inference.text.protocol.TokenBytes`."""
        table = self._vocabulary.visible
        return table[token_id] if 0 <= token_id < len(table) else b""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, also of a special one; empty for an unknown id."""
        table = self._vocabulary.bytes
        return table[token_id] if 0 <= token_id < len(table) else b""

    def token_text(self, token_id: int) -> str:
        """The token as text; parts of characters come out as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of all ``ids`` at once; see :mod:`inference.text.detokenizer` for its definition."""
        return decode_all(self if skip_special else _Unskipped(self), ids)

    # Chat

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
        """The prompt of a chat, by the model's own template.

        Control tokens written in messages or tools are encoded as plain text. Everything else
        is what ``apply_chat_template`` of transformers gives.

        Args:
            continue_final: end the prompt within the last message, so that the answer continues it.
            limit: most tokens that the prompt may have; bounds the work.

        Raises:
            ChatTemplateError: no template, or it does not take these messages.
            TooLarge: more than ``limit`` tokens.
        """
        if limit is not None and self._bytes_per_token:
            least = -(-_text_length([messages, tools or ()], 0) // self._bytes_per_token)
            # Templates may leave parts out (earlier reasoning), but none leaves out most of a prompt.
            if least > 4 * limit:
                raise TooLarge(f"The messages have at least {least} tokens; at most {limit} are possible.")
        template = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
        ids: list[int] = []
        rendered = template.render(messages, tools, add_generation_prompt, continue_final, **template_kwargs)
        for piece, trusted in rendered:
            if limit is None:
                ids += self.encode(piece, trusted=trusted)
            else:
                ids += self.encode_bounded(piece, limit - len(ids), trusted=trusted)
        return ids

    def _template(self, name: str) -> ChatTemplate:
        source = self._sources.get(name) or next(iter(self._sources.values()), None)
        if source is None:
            raise ChatTemplateError("The model has no chat template; use the completions endpoint instead.")
        with self._lock:
            if name not in self._templates:
                self._templates[name] = ChatTemplate(
                    source,
                    variables=self._named_tokens(),
                    control_tokens=self._control_tokens,
                    soft_tokens=self._soft_tokens,
                )
            return self._templates[name]

    def _named_tokens(self) -> dict[str, str]:
        """``bos_token`` and its like, as templates know them."""
        named = {}
        for name, value in self._settings.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(text, str):
                named[name] = text
        return named

    # Files

    def _read_vocabulary(self) -> tuple[dict[str, Any], _Library, _Library]:
        """The parsed file, the tokenizer, and one that takes control tokens for plain text.

        The second is made at once: making it when first needed would hold up a running server.
        """
        path = self._folder / "tokenizer.json"
        try:
            source = path.read_text(encoding="utf-8")
            spec: dict[str, Any] = json.loads(source)
            trusted, untrusted = (_Library.from_str(source) for _ in range(2))
        except FileNotFoundError:
            message = "the model's folder holds no tokenizer.json; only models with a fast tokenizer can be served"
            raise ModelUnavailable(message) from None
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ModelUnavailable(f"the model's tokenizer.json can not be read: {error}") from error
        for library in (trusted, untrusted):
            # A model's limits are checked by us, with an answer to the caller; never silently cut or padded.
            library.no_truncation()
            library.no_padding()
        untrusted.add_special_tokens(_soft_tokens(spec))
        untrusted.encode_special_tokens = True
        return spec, trusted, untrusted

    def _read_templates(self) -> dict[str, str]:
        """Chat templates by name; the file wins over the setting."""
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            sources = {"default": file.read_text(encoding="utf-8")}
            for extra in sorted((self._folder / "additional_chat_templates").glob("*.jinja")):
                sources[extra.stem] = extra.read_text(encoding="utf-8")
            return sources
        setting = self._settings.get("chat_template")
        setting = setting or _read_json(self._folder / "chat_template.json").get("chat_template")
        if isinstance(setting, str):
            return {"default": setting}
        return {each["name"]: each["template"] for each in setting or ()}

    def _read_eos_ids(self) -> frozenset[int]:
        found: set[int] = set()
        for settings in (self._model, _read_json(self._folder / "generation_config.json")):
            value = settings.get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
        named = self._named_tokens().get("eos_token")
        if named is not None and (token := self._trusted.token_to_id(named)) is not None:
            found.add(token)
        return frozenset(found)

    def _read_context_length(self) -> int:
        for settings in (self._model, self._model.get("text_config") or {}):
            for field in _CONTEXT_FIELDS:
                if isinstance(settings.get(field), int):
                    return int(settings[field])
        longest = self._settings.get("model_max_length")
        # Absent lengths are spelled as a number beyond all reason.
        return int(longest) if isinstance(longest, (int, float)) and 0 < longest < 1e9 else 0


class _Unskipped:
    """A view of a tokenizer that shows special tokens too."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.leading_space: LeadingSpace = tokenizer.leading_space
        self.visible_bytes = tokenizer.token_bytes


def _soft_tokens(spec: Mapping[str, Any]) -> list[str]:
    """Added tokens that are not special, such as ``<think>``.

    Runs of whitespace, which some vocabularies add, are text like any other.
    """
    added = spec.get("added_tokens", ())
    return [each["content"] for each in added if not each["special"] and not each["content"].isspace()]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelUnavailable(f"the model's {path.name} is not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _text_length(value: Any, depth: int) -> int:
    """Characters of all strings in plain data."""
    if isinstance(value, str):
        return len(value)
    if depth > 32:
        return 0
    if isinstance(value, Mapping):
        return sum(_text_length(each, depth + 1) for each in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_text_length(each, depth + 1) for each in value)
    return 0
