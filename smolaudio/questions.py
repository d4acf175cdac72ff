"""Texts of recordings, and questions about them in several wordings, each with its only correct answer."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = (
    *("apple", "bottle", "bridge", "butter", "camera", "candle", "castle", "chicken", "circle", "coffee", "doctor"),
    *("dragon", "eagle", "engine", "family", "finger", "flower", "forest", "garden", "guitar", "hammer", "honey"),
    *("island", "jacket", "jungle", "kettle", "ladder", "lemon", "letter", "lion", "market", "mirror", "monkey"),
    *("morning", "mountain", "music", "needle", "ocean", "orange", "paper", "pencil", "pepper", "piano", "pillow"),
    *("planet", "pocket", "potato", "rabbit", "river", "rocket", "school", "shadow", "silver", "spider", "station"),
    *("summer", "table", "teacher", "ticket", "tiger", "tomato", "tractor", "turtle", "umbrella", "village", "violin"),
    *("water", "weather", "whistle", "window", "winter", "wizard", "yellow", "zebra"),
)
ORDINALS = ("first", "second", "third", "fourth")
COUNTS = ("No", "One", "Two", "Three", "Four", "Five")
DEVICES = ("lamp", "heater", "fan", "radio", "television", "printer")
ROOMS = ("kitchen", "bedroom", "garage", "office", "bathroom", "basement")
HELD_OUT = frozenset(
    {("lamp", "garage"), ("fan", "kitchen"), ("radio", "office"), ("television", "bathroom"), ("heater", "basement")}
)
"""Pairs of device and room that training never hears."""
MUSIC = ("jazz", "rock", "classical", "country", "dance")
PEOPLE = ("Anna", "Peter", "Maria", "Thomas", "Robert", "Susan", "Oliver", "Emma")
CHORES = (
    *("buy milk", "feed the cat", "water the plants", "call the dentist", "wash the car", "pay the rent"),
    *("walk the dog", "clean the windows"),
)


class Saying(NamedTuple):
    """The spoken text of a recording: `text` as answers write it, `spoken` as it is read out, and the parts that
    questions ask for."""

    kind: str
    text: str
    spoken: str
    parts: dict[str, str]
    words: tuple[str, ...] = ()


class Turn(NamedTuple):
    """A question and its answer."""

    kind: str
    question: str
    answer: str


def make_saying(kind: str, rng: Random, *, held_out: bool = False) -> Saying:
    """Return something to say. Only held-out ones have held-out pairs."""
    return _SAYINGS[kind](rng, held_out)


def ask(kind: str, saying: Saying, rng: Random) -> Turn:
    """Return a question of a kind that `kinds_of` names."""
    if saying.kind == "nothing":
        return Turn(kind, _QUESTIONS[kind](rng.choice(_EXAMPLES), rng)[0], "Nothing is said.")
    return Turn(kind, *_QUESTIONS[kind](saying, rng))


def kinds_of(saying: Saying) -> tuple[str, ...]:
    """Return the kinds of questions that can be asked."""
    if saying.kind == "nothing":
        return ("nothing",)
    if saying.kind == "command":
        return ("command", "repeat", *(("detail",) if saying.parts else ()))
    return {
        "number": ("number", "repeat"),
        "digits": ("digits", "count", "repeat"),
        "word": ("word", "presence", "repeat"),
        "words": ("place", "presence", "count", "repeat"),
    }[saying.kind]


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def lexicon() -> list[str]:
    """Return all words that are said, as `Saying.text` spells them."""
    numbers = [str(number) for number in range(100)]
    commands = [*DEVICES, *ROOMS, *MUSIC, *PEOPLE, *" ".join(CHORES).split(), *_COMMAND_WORDS.split()]
    return sorted({*numbers, *WORDS, *commands})


_COMMAND_WORDS = "turn on off the in open close door window play some music set a timer for minutes temperature to "
_COMMAND_WORDS += "degrees call remind me"


def _number(rng: Random, _: bool) -> Saying:
    number = str(rng.choice((rng.randrange(100), rng.randrange(13, 20), rng.choice(range(30, 100, 10)))))
    return Saying("number", number, number, {})


def _digits(rng: Random, _: bool) -> Saying:
    digits = [rng.randrange(10) for _ in range(rng.randint(2, 5))]
    return Saying("digits", " ".join(map(str, digits)), ", ".join(DIGITS[digit] for digit in digits), {},
                  tuple(map(str, digits)))  # fmt: skip


def _word(rng: Random, _: bool) -> Saying:
    word = rng.choice(WORDS)
    return Saying("word", word, word, {}, (word,))


def _words(rng: Random, _: bool) -> Saying:
    words = rng.sample(WORDS, rng.randint(2, 4))
    return Saying("words", " ".join(words), (", " if rng.random() < 0.7 else " ").join(words), {}, tuple(words))


def _command(rng: Random, held_out: bool) -> Saying:
    form = rng.choices(("switch", "open", "play", "timer", "temperature", "call", "remind"), (8, 3, 2, 3, 2, 2, 2))[0]
    parts: dict[str, str] = {}
    if form == "switch":
        pairs = [(device, room) for device in DEVICES for room in ROOMS if held_out or (device, room) not in HELD_OUT]
        device, room = rng.choice(sorted(HELD_OUT)) if held_out and rng.random() < 0.4 else rng.choice(pairs)
        parts = {"device": device, "room": room}
        text = f"turn {rng.choice(('on', 'off'))} the {device} in the {room}"
    elif form == "open":
        parts = {"room": rng.choice(ROOMS)}
        text = f"{rng.choice(('open', 'close'))} the {rng.choice(('door', 'window'))} in the {parts['room']}"
    elif form == "play":
        parts = {"music": rng.choice(MUSIC)}
        text = f"play some {parts['music']} music"
    elif form == "timer":
        parts = {"minutes": str(rng.randint(2, 60))}
        text = f"set a timer for {parts['minutes']} minutes"
    elif form == "temperature":
        parts = {"degrees": str(rng.randint(10, 30))}
        text = f"set the temperature to {parts['degrees']} degrees"
    elif form == "call":
        parts = {"person": rng.choice(PEOPLE)}
        text = f"call {parts['person']}"
    else:
        text = f"remind me to {rng.choice(CHORES)}"
    return Saying("command", text, sentence(text), parts)


def _nothing(_rng: Random, _: bool) -> Saying:
    return Saying("nothing", "", "", {})


_SAYINGS: dict[str, Callable[[Random, bool], Saying]] = {
    "number": _number,
    "digits": _digits,
    "word": _word,
    "words": _words,
    "command": _command,
    "nothing": _nothing,
}
_EXAMPLES = tuple(
    make(Random(seed), False) for kind, make in _SAYINGS.items() if kind != "nothing" for seed in range(8)
)

_Asked = tuple[str, str]


def _ask_number(saying: Saying, rng: Random) -> _Asked:
    question = rng.choice(("What number is said?", "Which number is said?", "What number do you hear?",
                           "What is the number?", "Tell me the number."))  # fmt: skip
    return question, f"The number is {saying.text}."


def _ask_digits(saying: Saying, rng: Random) -> _Asked:
    question = rng.choice(("What digits are said?", "Which digits are said?", "Which digits do you hear?"))
    return question, f"The digits are {saying.text}."


def _ask_word(saying: Saying, rng: Random) -> _Asked:
    question = rng.choice(("Which word?", "Which word is said?", "What word do you hear?", "What is the word?",
                           "What word is said?"))  # fmt: skip
    return question, f"The word is {saying.text}."


def _ask_place(saying: Saying, rng: Random) -> _Asked:
    place = rng.randrange(len(saying.words))
    question = rng.choice(("What is the {} word?", "Which word comes {}?", "Which word is the {} one?"))
    return question.format(ORDINALS[place]), f"The {ORDINALS[place]} word is {saying.words[place]}."


def _ask_count(saying: Saying, rng: Random) -> _Asked:
    what = "digits" if saying.kind == "digits" else "words"
    question = rng.choice((f"How many {what} are said?", f"How many {what} do you hear?"))
    return question, f"{COUNTS[len(saying.words)]} {what} are said."


def _ask_presence(saying: Saying, rng: Random) -> _Asked:
    present = rng.random() < 0.5
    word = rng.choice(saying.words if present else [word for word in WORDS if word not in saying.words])
    question = rng.choice((f"Is the word {word} said?", f"Do you hear the word {word}?"))
    return question, f"Yes, the word {word} is said." if present else f"No, the word {word} is not said."


def _ask_command(saying: Saying, rng: Random) -> _Asked:
    question = rng.choice(("What is the command?", "Which command is given?", "What should be done?"))
    return question, sentence(saying.text)


def _ask_detail(saying: Saying, rng: Random) -> _Asked:
    part = rng.choice(sorted(saying.parts))
    value = saying.parts[part]
    return {
        "device": ("Which device is meant?", f"The device is the {value}."),
        "room": ("Which room is meant?", f"The room is the {value}."),
        "music": ("What music should be played?", f"The music is {value}."),
        "minutes": ("For how many minutes?", f"For {value} minutes."),
        "degrees": ("What is the temperature?", f"It is {value} degrees."),
        "person": ("Who should be called?", f"{value} should be called."),
    }[part]


def _ask_repeat(saying: Saying, rng: Random) -> _Asked:
    question = rng.choice(("Repeat what is said.", "What is said?", "What do you hear?", "Write down what is said.",
                           "Transcribe the recording."))  # fmt: skip
    return question, sentence(saying.text)


def _ask_any(saying: Saying, rng: Random) -> _Asked:
    return _QUESTIONS[rng.choice(kinds_of(saying))](saying, rng)


_QUESTIONS: dict[str, Callable[[Saying, Random], _Asked]] = {
    "number": _ask_number,
    "digits": _ask_digits,
    "word": _ask_word,
    "place": _ask_place,
    "count": _ask_count,
    "presence": _ask_presence,
    "command": _ask_command,
    "detail": _ask_detail,
    "repeat": _ask_repeat,
    "nothing": _ask_any,
}
KINDS = tuple(_QUESTIONS)
