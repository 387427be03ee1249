"""From token ids to the text that a client sees."""

from inference.text.detokenizer import Detokenizer, decode_all
from inference.text.protocol import LeadingSpace, TokenBytes, Tokenizer
from inference.text.stops import StopMatcher
from inference.text.stream import TextDelta, TextStream

__all__ = [
    "Detokenizer",
    "LeadingSpace",
    "StopMatcher",
    "TextDelta",
    "TextStream",
    "TokenBytes",
    "Tokenizer",
    "decode_all",
]
