"""Generate prompts of a given number of tokens without a tokenizer.

Prompts consist of words that are one token in most vocabularies; two probes, counted by the server's usage, correct the
estimate. Every request has a different prompt.
"""

import random
from dataclasses import dataclass

# All words have four letters, so that prompts also have equal lengths in byte-level vocabularies.
_TEXT = (
    "able acid also area army away baby back ball band bank base bath beat been bell belt best bill bird blow blue "
    "boat body bond bone book born both bowl burn bush busy call calm came camp card care case cash cast cell chat "
    "chip city club coal coat code cold come cook cool cope copy core cost crew crop dark data date dawn dead deal "
    "dear debt deep deny desk diet disc does done door down draw drew drop drug dual duke dust duty each earn ease "
    "east easy edge else even ever exit face fact fail fair fall farm fast fate fear feed feel feet fell felt file "
    "fill film find fine fire firm fish five flat flow food foot form fort four free from fuel full fund gain game "
    "gate gave gear gene gift girl give glad goal goes gold golf gone good gray grew grow gulf hair half hall hand "
    "hang hard hate have head hear heat held help here hero high hill hire hold hole holy home hope host hour huge "
    "hung hunt hurt idea inch into iron item join jump jury just keen keep kept kick kind king knee knew know lack "
    "lady lake land lane last late lead left less life lift like line link list live load loan lock long look lose "
    "loss lost love luck made mail main make male many mark mass meal mean meat meet menu mile milk mill mind mine "
    "miss mode mood moon more most move much must name navy near neck need news next nice nine none nose note once "
    "only onto open oral over pace pack page paid pain pair palm park part pass past path peak pick pink pipe plan "
    "play plot plus poll pool poor port post pull pure push race rail rain rank rare rate read real rear rely rent "
    "rest rice rich ride ring rise risk road rock role roll roof room root rose rule rush safe said sake sale salt "
    "same sand save seat seed seek seem seen"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Generates texts of a number of tokens: `overhead` for the chat template, plus `per_word` for each word."""

    overhead: float = 0.0
    per_word: float = 1.0

    @classmethod
    def fit(cls, probes: tuple[tuple[int, int], tuple[int, int]]) -> "PromptMaker":
        """Fit to two probes of (words sent, prompt tokens counted by the server)."""
        (few, few_tokens), (many, many_tokens) = probes
        per_word = (many_tokens - few_tokens) / (many - few)
        return cls(few_tokens - few * per_word, per_word)

    def text(self, tokens: int, rng: random.Random) -> str:
        """Return a text of at least one word that makes a prompt of about `tokens` tokens."""
        return words(max(1, round((tokens - self.overhead) / self.per_word)), rng)


def words(count: int, rng: random.Random) -> str:
    """`count` random words."""
    return " ".join(rng.choices(WORDS, k=count))
