"""Two hundred requests of every kind for SmolLM2, with short answers.

A disaggregated server has to answer them like an aggregated one.
"""

from collections.abc import Iterator
from itertools import cycle
from typing import Any, NamedTuple

_WORDS = "rivers bread planets chess bees glass tides maps violins snow salt clocks bridges tea stars paper"
TOPICS = _WORDS.split()
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["wheel", "well", "bell", "sail"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}
LISTS = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 3}


class Case(NamedTuple):
    """A request; `fields` are those beside the model and the prompt."""

    kind: str
    chat: bool
    prompt: Any
    fields: dict[str, Any]
    stream: bool
    cached: bool
    """Whether the cached tokens of the usage are the same whichever replica is asked."""


def cases() -> list[Case]:
    """Greedy unless they say otherwise; every second one streams."""
    streams = cycle((False, True))
    found = []
    for kind, chat, prompt, fields in (*_plain(), *_sampled(), *_bound(), *_stopped(), *_reported()):
        given = {"temperature": 0, "max_tokens": 8, **fields}
        found.append(Case(kind, chat, prompt, given, next(streams), kind in ("short", "cache_salt")))
    return found


Fields = Iterator[tuple[str, bool, Any, dict[str, Any]]]


def _plain() -> Fields:
    for index, topic in enumerate(TOPICS):
        yield "chat", True, f"Tell me something about {topic} that few people know.", {"max_tokens": 6 + index % 5}
        yield (
            "max_tokens",
            index % 2 == 0,
            f"In one word, and without any explanation: what do {topic} have to do with {topic}?",
            {"max_tokens": 1},
        )
    for index in range(12):
        yield "short", False, f"{index} is", {"max_tokens": 4 + index}
        yield "long", False, f"Chapter {index}. " + f"{TOPICS[index]} and then some more, " * (20 + 2 * index), {}
    for index in range(20):
        lead = (
            f"These are the rules of club {index % 4}: nobody is late, everybody brings a friend, "
            "and nobody speaks of it. " * 3
        )
        yield "prefix", index % 2 == 1, f"{lead}Rule number {index} is about {TOPICS[index % 16]}:", {}
    for index in range(10):
        yield (
            "cache_salt",
            False,
            "The same words again and again, for whoever has another salt than those before, " * 3,
            {"cache_salt": f"salt {index}"},
        )
    for index in range(4):
        yield (
            "several",
            False,
            [
                f"{topic} are known to most people for one reason only, " * (1 + index)
                for topic in TOPICS[index : index + 3]
            ],
            {},
        )


def _sampled() -> Fields:
    for index in range(14):
        yield (
            "seed",
            index % 2 == 0,
            f"Invent a name for a shop that sells {TOPICS[index]}, and a reason for it.",
            {
                "temperature": 0.7 + 0.1 * (index % 5),
                "seed": index,
                **({"top_p": 0.9} if index % 3 == 0 else {"top_k": 20 + index} if index % 3 == 1 else {}),
            },
        )
    for index in range(12):
        yield (
            "n",
            index % 2 == 0,
            f"Begin a story about {TOPICS[index]}, with a hero who has never seen any of them.",
            {
                "n": 3,
                "temperature": 0.0 if index % 4 == 0 else 1.0,
                "seed": 100 + index,
            },
        )
    for index in range(14):
        penalty = (("presence_penalty", 1.5), ("frequency_penalty", 1.2), ("repetition_penalty", 1.3))[index % 3]
        yield (
            "penalties",
            index % 2 == 0,
            f"Say {TOPICS[index]} ten times, then say it again: {TOPICS[index]}, {TOPICS[index]},",
            {
                penalty[0]: penalty[1],
                "max_tokens": 12,
                **({"temperature": 0.9, "seed": index} if index % 2 else {}),
            },
        )
    for index in range(10):
        bias = {str(1000 + 7 * index): 100} if index % 2 else {"28": -100, "198": -100, str(260 + index): 5}
        yield (
            "logit_bias",
            index % 3 == 0,
            f"The best thing about {TOPICS[index]} is that there are so many ways to",
            {"logit_bias": bias},
        )


def _bound() -> Fields:
    for index in range(12):
        yield (
            "json_schema",
            True,
            f"Make up an object about {TOPICS[index]} and answer as JSON, with nothing else around it.",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "thing", "schema": SCHEMA if index % 2 else LISTS, "strict": True},
                },
                "max_tokens": 24,
            },
        )
    for index in range(12):
        bound = (
            {"guided_regex": rf"[A-Z][a-z]{{2,5}}, (19|20)\d{{{1 + index % 3}}}\."}
            if index % 3
            else {"guided_choice": ["yes", "no", "perhaps"]}
        )
        yield (
            "guided",
            index % 2 == 0,
            f"Who first wrote about {TOPICS[index]}, and in which year was that, as far as is known?",
            {
                **bound,
                "max_tokens": 14,
            },
        )


def _stopped() -> Fields:
    for index in range(14):
        stop = ([" the"], [" a", "and"], ["e"], ["\n", "."], ["zzz"])[index % 5]
        yield (
            "stop",
            index % 2 == 0,
            f"Explain in a few simple words how {TOPICS[index]} came into the world, and why.",
            {
                "stop": stop,
                "max_tokens": 12,
                "include_stop_str_in_output": index % 4 == 1,
            },
        )
    for index in range(8):
        yield (
            "min_tokens",
            True,
            f"Answer yes or no, and nothing more than that: are {TOPICS[index]} older than people?",
            {
                "min_tokens": 5 + index,
                "max_tokens": 14,
                "ignore_eos": index % 4 == 3,
            },
        )


def _reported() -> Fields:
    for index in range(18):
        chat = index % 2 == 0
        logprobs = {"logprobs": True, "top_logprobs": index % 4} if chat else {"logprobs": 1 + index % 4}
        sampled = {"temperature": 1.1, "seed": index} if index % 3 == 2 else {}
        yield (
            "logprobs",
            chat,
            f"What comes to your mind first when you hear of {TOPICS[index % 16]} and {TOPICS[index % 7]}?",
            {
                **logprobs,
                **sampled,
            },
        )
    for index in range(6):
        yield (
            "prompt_logprobs",
            False,
            f"All the {TOPICS[index]} of the world, and what may be said of each of them. " * 3,
            {
                "logprobs": 1,
                "max_tokens": 3,
                **({"echo": True} if index % 2 else {"prompt_logprobs": 1}),
            },
        )
