"""Control tokens, such as `<|im_start|>`: only the chat template writes them; in a message they are plain text.

A rendered prompt mixes the template's words with a client's, and shows no difference. Therefore literals of the
template are marked (`mark`) before it is rendered: its control tokens then have marks around them, whatever the
template does with the messages, and a client's text has none (`resolve`). The marks are random characters, which no
client can know, and are removed when the text is tokenised (`encode`).
"""

import re
import secrets
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate, groupby, pairwise, takewhile

import tokenizers
from tokenizers import AddedToken

from multimodal.text.tokenizer import Tokenizer


def _secret() -> str:
    """Return 8 of 20,992 characters, at random: letters without case, which templates and normalisers leave alone."""
    return "".join(chr(0x4E00 + secrets.randbelow(0x5200)) for _ in range(8))


MARK = _secret()
"""Mark before and after each control token that the template wrote."""
_EDGE = _secret()
"""Mark at the start or end of a control token that the template composes with a role: `<|` + role + `|>`."""
_COMPOSED = re.compile(r"(\W+)(?:assistant|developer|function|model|system|tool|user)(\W+)", re.IGNORECASE)


class ControlTokens:
    """The control tokens of one model: its tokenizer's special tokens, and those that stand for media.

    `texts` are all of them; the other added tokens, such as `<think>` in most models, stay tokens wherever they occur.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = frozenset(texts)
        self._any = re.compile(_longest_of(self._texts))
        composed = {text: match for text in self._texts if (match := _COMPOSED.fullmatch(text))}
        self._heads = tuple({match[1] for match in composed.values()})
        self._tails = tuple({match[2] for match in composed.values()})
        self._whole = re.compile(f"{MARK}(?:({self._any.pattern}){MARK})?")
        self._composed = re.compile(f"{_EDGE}(?:({_longest_of(composed)}){_EDGE})?")
        self._trusted: re.Pattern[str] | None = None

    def trust(self, texts: Iterable[str]) -> None:
        """Treat some control tokens as the template's wherever they occur."""
        self._trusted = re.compile(f"({MARK}{self._any.pattern}{MARK})|{_longest_of(texts)}")

    def mark(self, text: str) -> str:
        """Return a text of the template or the server with marks around its control tokens."""
        return self._any.sub(lambda match: f"{MARK}{match[0]}{MARK}", text)

    def mark_ends(self, literal: str) -> str:
        """Return a literal that the template joins with other texts, with marks where the result may be a control token
        that names a role.
        """
        if head := max(filter(literal.endswith, self._heads), key=len, default=""):
            literal = literal.removesuffix(head) + _EDGE + head
        if tail := max(filter(literal.startswith, self._tails), key=len, default=""):
            literal = tail + _EDGE + literal.removeprefix(tail)
        return literal

    def resolve(self, rendered: str) -> str:
        """Return the output of a template with marked literals, with marks around control tokens only."""
        text = self._whole.sub(lambda match: match[0] if match[1] else "", rendered)
        if _EDGE in text:
            text = self._composed.sub(lambda match: f"{MARK}{match[1]}{MARK}" if match[1] else "", text)
        if self._trusted is not None:
            text = self._trusted.sub(lambda match: match[1] or f"{MARK}{match[0]}{MARK}", text)
        return text

    def forged(self, marked: str) -> list[str]:
        """Return the control tokens of a rendered prompt that the template did not write."""
        return [token for _, token in self._forged(*_parted(marked))]

    def encode(self, marked: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a rendered prompt. A control token without marks is tokenised as plain text. Without
        such a token, the ids are those of the text without marks.
        """
        text, own = _parted(marked)
        if self._formed_otherwise or any(self._forged(text, own)):
            return self._encode_marked(marked, add_special_tokens)
        return self._tokenizer.encode(text, add_special_tokens)

    def defused(self, marked: str) -> str:
        """Return a rendered prompt for a tokenizer that knows no marks: zero-width spaces break control tokens that
        have none.
        """
        text, own = _parted(marked)
        cuts = [0, *(place for place, _ in self._forged(text, own)), len(text)]
        return "\u200b".join(text[start:end] for start, end in pairwise(cuts))

    def _forged(self, text: str, own: dict[int, int]) -> Iterator[tuple[int, str]]:
        """Find control tokens that are not among the template's `own`. Yields for each a place inside that breaks it,
        and its text."""
        position = 0
        while match := self._any.search(text, position):
            start, position = match.span()
            if own.get(start) != position:
                position = own.get(start, start + 1)
                yield position, match[0]

    @cached_property
    def _formed_otherwise(self) -> bool:
        """Whether texts that only resemble a control token may become one: by normalisation, or by the model itself."""
        backend = self._tokenizer.backend
        return any(
            token.normalized or backend.model.token_to_id(token.content) is not None
            for token in backend.get_added_tokens_decoder().values()
            if token.content in self._texts and (backend.normalizer is not None or "▁" in token.content)
        )

    def _encode_marked(self, marked: str, add_special_tokens: bool) -> list[int]:
        backend, ids = self._marked
        encoding = backend.encode_batch_fast([marked], add_special_tokens=add_special_tokens)[0]
        found: list[int] = []
        for token_id, inserted in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if token_id in self._merged and not inserted:
                found += self._letters(token_id)
            else:
                found.append(ids.get(token_id, token_id))
        return found

    @cached_property
    def _marked(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer with the same model whose control tokens have marks, and the real ids of its added tokens."""
        backend = self._tokenizer.backend
        marked = tokenizers.Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := getattr(backend, part)) is not None:
                setattr(marked, part, value)
        # Ids that the model uses must not be given to added tokens again: these take them up.
        used = range(self._tokenizer.vocab_size - marked.get_vocab_size())
        added = {
            token_id: AddedToken(
                f"{MARK}{token.content}{MARK}" if token.content in self._texts else token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
            )
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        marked.add_tokens([*(f"{MARK}{number}{_EDGE}" for number in used), *added.values()])
        found = ((marked.token_to_id(token.content), token_id) for token_id, token in added.items())
        return marked, {new: token_id for new, token_id in found if new is not None}

    @cached_property
    def _merged(self) -> frozenset[int]:
        """Control tokens that the model itself may form, without the one for unknown characters."""
        model = self._tokenizer.backend.model
        texts = self._texts - {self._tokenizer.special_tokens.get("unk_token")}
        return frozenset(token_id for text in texts if (token_id := model.token_to_id(text)) is not None)

    def _letters(self, token_id: int) -> list[int]:
        """Return the tokens of a token's letters, as the vocabulary spells it."""
        model = self._tokenizer.backend.model
        return [token.id for letter in model.id_to_token(token_id) for token in model.tokenize(letter)]


def unmarked(text: str) -> str:
    """Return a text without marks."""
    return text.replace(MARK, "").replace(_EDGE, "")


def _parted(marked: str) -> tuple[str, dict[int, int]]:
    """Return a marked text without its marks, and where each marked token starts and ends."""
    pieces = marked.split(MARK)
    ends = [*accumulate(map(len, pieces))]
    return "".join(pieces), dict(zip(ends[::2], ends[1::2], strict=False))


def _longest_of(texts: Iterable[str]) -> str:
    """Return a regular expression for the longest of some texts: a tree, which is searched faster than a list."""
    if not (ordered := sorted(texts)):
        return "(?!)"
    same = takewhile(lambda pair: pair[0] == pair[1], zip(ordered[0], ordered[-1], strict=False))
    shared = "".join(letter for letter, _ in same)
    rests = [text.removeprefix(shared) for text in ordered]
    branches = [_longest_of(group) for first, group in groupby(rests, key=lambda rest: rest[:1]) if first]
    return re.escape(shared) + (f"(?:{'|'.join(branches)}){'' if rests[0] else '?'}" if branches else "")
