"""Trains the small vocabularies that lie beside this file; run it to make them anew.

``bytelevel.json``: byte-level BPE with ChatML tokens, as GPT-2, Llama 3 and Qwen have.
``sentencepiece.json``: BPE over "▁" with byte fallback, as Llama 2, Mistral and Gemma have.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
TEXT = [
    "the cat sat on the mat and the dog lay down beside it while rain fell on the roof",
    "an engine turns token ids into token ids and knows nothing of servers or of text",
    "every request ends exactly once, whichever way it ends, and leaves nothing behind",
    "def total(values):\n    return sum(value for value in values)\n",
    "0 1 2 3 10 100 1000; 3.14159, 2.71828 (what else?)",
    "naïve café, Straße, Übermut, señor, 東京は夜の七時, 你好世界, 안녕하세요, नमस्ते दुनिया, привет мир",
    "🙂 🚀 👍 ❤️ 👩‍👩‍👧 🇩🇪",
] * 4
CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=CHAT,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*specials, *(f"<0x{value:02X}>" for value in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in TEXT], trainer)
    # The byte tokens are ordinary entries of the vocabulary, not added tokens.
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [each for each in spec["added_tokens"] if each["content"] in specials]
    return Tokenizer.from_str(json.dumps(spec))


if __name__ == "__main__":
    byte_level().save(str(HERE / "bytelevel.json"), pretty=False)
    sentencepiece().save(str(HERE / "sentencepiece.json"), pretty=False)
