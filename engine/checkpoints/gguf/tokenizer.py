"""Convert tokenizers of GGUF files, byte-level BPE ("gpt2") and SentencePiece ("llama"), to tokenizer.json."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.checkpoints.gguf.file import Metadata
from engine.errors import EngineFailure

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Numbers of the token types (llama.h, llama_token_type)."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "[EOT]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
"""Texts of tokens that end an answer even if the metadata does not say so (llama.cpp, special_eog_ids)."""


class PreTokenizer(NamedTuple):
    """Rules that split a text before pairs are merged."""

    patterns: tuple[str, ...]
    """Regular expressions, applied in order, each to the pieces that the previous one left."""
    whole_words: bool = False
    """Whether a piece that is a token itself is not split by merges."""
    begins: bool = False
    """Whether prompts begin with the beginning-of-sequence token if the file does not say."""


_LLAMA3 = PreTokenizer((_WORDS % "{1,3}",), whole_words=True, begins=True)
_QWEN2 = PreTokenizer((_WORDS % "",))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": PreTokenizer((_WORDS % "{1,3}",)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, begins=True),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}
"""Pre-tokenizers by llama.cpp's names, with its regular expressions (src/llama-vocab.cpp)."""


class GgufVocabulary:
    """The tokenizer of a GGUF file."""

    def __init__(self, metadata: Metadata, place: str) -> None:
        """Read the vocabulary. Raises EngineFailure, which names `place`, if it is unsupported or incomplete."""
        self._metadata = metadata
        self._place = place
        kind = self._get("model")
        if kind not in _KINDS:
            raise EngineFailure(f"{place} has a vocabulary of the kind {kind!r}; supported are {', '.join(_KINDS)}")
        self._make = _KINDS[kind]
        self._spaced = self._get("add_space_prefix", True)
        self.tokens: list[str] = self._list("tokens", str)
        self._kinds: list[int] = self._list("token_type", int, [_NORMAL] * len(self.tokens))
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self._ids) < len(self.tokens) or len(self._kinds) < len(self.tokens):
            raise EngineFailure(f"{place} has a damaged vocabulary: tokens that are equal, or without a kind")
        begins = kind == "llama" or self.pre_tokenizer.begins
        self.adds_bos: bool = self._get("add_bos_token", begins) and self.special("bos") is not None

    @property
    def pre_tokenizer(self) -> PreTokenizer:
        name = self._get("pre", "default")
        if name not in PRE_TOKENIZERS:
            raise EngineFailure(
                f"{self._place} has the pre-tokenizer {name!r}; supported are {', '.join(PRE_TOKENIZERS)}"
            )
        return PRE_TOKENIZERS[name]

    def special(self, name: str) -> int | None:
        """Return the id of the special token with this name in llama.cpp, or None if the vocabulary lacks it."""
        found = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        return found if type(found) is int and 0 <= found < len(self.tokens) else None

    @property
    def ends(self) -> list[int]:
        """Ids of the tokens that end an answer, beginning with the end-of-sequence token of the metadata."""
        named = [self.special(name) for name in ("eos", "eot", "eom")]
        texts = [self._ids[text] for text in _ENDS if text in self._ids]
        marked = [
            token_id for token_id in texts if self._kinds[token_id] != _NORMAL
        ]  # "</s>" is a word of HTML to some
        return list(dict.fromkeys(token_id for token_id in [*named, *marked] if token_id is not None))

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that tokenizer.json describes."""
        tokenizer = self._make(self)
        for kinds, special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
            added = [token for token, kind in zip(self.tokens, self._kinds, strict=False) if kind in kinds]
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
        if self.adds_bos:
            bos = self.special("bos")
            assert bos is not None
            text = self.tokens[bos]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{text} $A", pair=f"{text} $A $B", special_tokens=[(text, bos)]
            )
        return tokenizer

    def _byte_level(self) -> Tokenizer:
        pre = self.pre_tokenizer
        pairs = [tuple(merge.split(" ", 1)) for merge in self._list("merges", str)]
        try:
            bpe = models.BPE(vocab=self._ids, merges=pairs, ignore_merges=pre.whole_words)
        except Exception as error:  # the library raises nothing narrower
            raise EngineFailure(f"{self._place} has a damaged vocabulary: {error}") from error
        tokenizer = Tokenizer(bpe)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentence_pieces(self) -> Tokenizer:
        """Return a BPE tokenizer that is equivalent to SentencePiece.

        SentencePiece joins the neighbours whose union has the best score; BPE does so if its merges are ordered by
        score.
        """
        unknown = self.special("unknown")
        tokenizer = Tokenizer(
            models.BPE(
                vocab=self._ids,
                merges=self._merges(),
                unk_token=self.tokens[0 if unknown is None else unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaces = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._spaced:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
            steps.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = spaces
            tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _merges(self) -> list[tuple[str, str]]:
        """Return all pairs of tokens that join into a third token, the best score first."""
        scores = self._list("scores", float)
        if len(scores) < len(self.tokens):
            raise EngineFailure(f"{self._place} has a damaged vocabulary: tokens without a score")
        normal = [token for token, index in self._ids.items() if self._kinds[index] == _NORMAL and len(token) > 1]
        merges = []
        for token in sorted(normal, key=lambda token: -scores[self._ids[token]]):
            merges += [
                (token[:cut], token[cut:])
                for cut in range(1, len(token))
                if token[:cut] in self._ids and token[cut:] in self._ids
            ]
        return merges

    def _get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def _list(self, name: str, of: type, default: list[Any] | None = None) -> list[Any]:
        found = self._get(name, default)
        if not isinstance(found, list) or not all(isinstance(item, of) for item in found):
            raise EngineFailure(f"{self._place} lacks tokenizer.ggml.{name} in its metadata")
        return found


_KINDS: dict[str, Callable[[GgufVocabulary], Tokenizer]] = {
    "gpt2": GgufVocabulary._byte_level,
    "llama": GgufVocabulary._sentence_pieces,
}
