"""Token ids to text as they come, exact for characters that consist of several tokens."""

import codecs
from collections.abc import Sequence

from multimodal.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence. What `feed` and a last `flush` return, joined, is the text of all the ids.

    A token's bytes go through an incremental UTF-8 decoder: an unfinished character is held back until its last byte,
    and bytes that can never become one turn into U+FFFD.

    The text is what `Tokenizer.decode` returns for the prompt and these ids, less the prompt's text: a leading space,
    which decoders strip from the start of a text, stays.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that is complete after these ids."""
        table, skipped = self._bytes, self._skipped
        return self._decoder.decode(b"".join(table[i] for i in ids if i not in skipped and i < len(table)))

    def flush(self) -> str:
        """Return the end of the text: an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
