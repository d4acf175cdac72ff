"""Prompts made of a seed: chats of one user message, from templates and word lists. Half of the sequences have no
message: the model writes the user's part itself, which is more varied than any template.

Held-out prompts have other templates and other words than those of training.
"""

import random
from collections.abc import Sequence

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""Text that SmolLM2's chat template puts before a chat without a system message."""


def _words(text: str) -> list[str]:
    return " ".join(text.split()).split("; ")


TOPICS = _words("""
    photosynthesis; the water cycle; black holes; volcanoes; the Roman Empire; the French Revolution; jazz music;
    chess openings; machine learning; neural networks; databases; operating systems; compilers; the internet; solar
    power; wind turbines; electric cars; bicycles; coffee; tea; bread; chocolate; cheese; honey bees; ants; whales;
    penguins; elephants; wolves; cats; dogs; rain forests; deserts; coral reefs; glaciers; earthquakes; tides; the
    moon; Mars; Jupiter; comets; gravity; magnetism; electricity; light; sound; atoms; the periodic table; vaccines;
    antibiotics; the heart; the brain; sleep; memory; exercise; yoga; nutrition; vitamins; budgets; savings;
    inflation; taxes; trade; marketing; teamwork; leadership; job interviews; public speaking; time management;
    gardening; tomatoes; roses; oak trees; mushrooms; fishing; sailing; mountain climbing; running; swimming;
    football; tennis; painting; photography; poetry; theatre; opera; the piano; the guitar; the violin; castles;
    bridges; skyscrapers; trains; aeroplanes; rockets; satellites; maps; clocks; paper; printing; glass; steel;
    plastic; recycling; climate change; oceans; rivers; lakes; islands; Japan; India; Brazil; Egypt; Kenya; Canada;
    Italy; Greece; Mexico; Norway; democracy; human rights; philosophy; ethics; logic; probability; statistics;
    algebra; geometry; calculus; prime numbers; fractions; the Fibonacci sequence; encryption; passwords; robots;
    drones; 3D printing; virtual reality; video games; board games; puzzles; folk tales; mythology; dragons;
    pirates; detectives
""")
PEOPLE = _words("""
    a young girl; an old sailor; a tired teacher; a curious robot; two brothers; a lonely king; a baker; a shepherd;
    a travelling musician; a nurse; a lost astronaut; a shy dragon; a clever fox; a retired detective; a boy who
    cannot sleep; a gardener; a clockmaker; three friends; a librarian; a taxi driver; a painter; a fisherman
""")
PLACES = _words("""
    a small village; a big city; the edge of a forest; a lighthouse; an old castle; a space station; a busy market;
    the mountains; a quiet library; a train; a desert; an island; a snowy town; the bottom of the sea; a farm
""")
THINGS = _words("""
    a letter; a golden key; a broken watch; a map; a secret door; an old book; a mysterious box; a lamp; a song; a
    promise; a stolen painting; a strange signal; a lost dog; a storm; a wooden boat
""")
TASKS = _words("""
    reverses a string; checks whether a number is prime; computes the factorial of a number; sorts a list of
    numbers; counts the words in a text; finds the largest element of a list; merges two sorted lists; removes
    duplicates from a list; computes the greatest common divisor; converts Celsius to Fahrenheit; checks whether a
    word is a palindrome; reads a CSV file; writes a dictionary to a JSON file; computes the nth Fibonacci number;
    finds the most common letter in a string; validates an email address; implements a stack; implements a queue;
    implements binary search; flattens a nested list; computes the average of a list; generates a random password;
    counts vowels; transposes a matrix; sums the digits of a number; draws a triangle of stars; downloads a web
    page; parses a date; groups words by length; rotates a list
""")
LANGUAGES = ["Python", "Python", "Python", "JavaScript", "Java", "C", "Rust", "Go", "SQL", "Bash"]
ADJECTIVES = _words("""
    short; long; simple; detailed; funny; formal; friendly; professional; clear; creative; technical; beginner's
""")
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Kofi", "Lena", "Mei"]

TRAINING = (
    "What is {topic}?",
    "What are the main facts about {topic}?",
    "Explain {topic} to a ten-year-old.",
    "Explain {topic} in a {adjective} way.",
    "Write a {adjective} essay about {topic}.",
    "Write a {adjective} introduction to {topic}.",
    "List {number} interesting facts about {topic}.",
    "Give me {number} tips about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "How has {topic} changed over time?",
    "Why is {topic} important?",
    "Compare {topic} and {topic2}.",
    "What do {topic} and {topic2} have in common?",
    "Write a quiz of {number} questions about {topic}, with answers.",
    "Write a {adjective} story about {person} in {place}.",
    "Write a story about {person} who finds {thing}.",
    "Tell me a {adjective} story about {person} and {thing}.",
    "Write a poem about {topic}.",
    "Write a {adjective} poem about {thing} in {place}.",
    "Write a dialogue between {person} and {person2} about {topic}.",
    "Write a {language} function that {task}.",
    "Write a {language} program that {task}, with comments.",
    "How do I write a {language} function that {task}? Explain each step.",
    "Fix and improve my {language} code that {task}.",
    "Write an email to {name} about {topic}.",
    "Write a {adjective} letter from {name} to {name2} about {thing}.",
    "{name} has {number} apples and buys {number2} more. How many apples does {name} have? Explain.",
    "What is {number} times {number2}? Show your work.",
    "A train travels {number2} km in {number} hours. What is its average speed?",
    "Summarise the history of {topic} in {number} sentences.",
    "Create a table about {topic} in Markdown.",
    "Write a JSON object that describes {person}.",
    "Plan a day in {place} for {person}.",
    "Make a weekly plan to learn about {topic}.",
    "I want to learn {topic}. Where do I start?",
    "Give me ideas for a presentation about {topic}.",
    "Write a product description for {thing}.",
    "Hello! Can you help me with {topic}?",
    "Who discovered the most about {topic}, and when?",
    "Translate this into simpler English: The study of {topic} requires patience and {topic2}.",
    "Rewrite this sentence in a {adjective} way: {person} saw {thing} near {place}.",
    "Describe {place} in a {adjective} way.",
    "What would happen if there were no {topic}?",
    "Write a speech by {name} about {topic}.",
)
HELD_OUT = (
    "How does {topic} work?",
    "Can you teach me the basics of {topic}?",
    "What are common mistakes when people deal with {topic}?",
    "Write a blog post titled 'My first year with {topic}'.",
    "Write a fairy tale in which {person} meets {person2}.",
    "Show me an example of {language} code that {task}.",
    "Give step-by-step instructions for a beginner interested in {topic}.",
    "What should {name} know before starting with {topic}?",
)
_HELD_OUT_WORDS = 5
"""Every fifth word of a list belongs to held-out prompts alone."""


def message(rng: random.Random, held_out: bool) -> str:
    """Return the user's message of a chat."""

    def one(words: Sequence[str]) -> str:
        return rng.choice([word for i, word in enumerate(words) if (i % _HELD_OUT_WORDS == 0) == held_out])

    return rng.choice(HELD_OUT if held_out else TRAINING).format(
        topic=one(TOPICS), topic2=one(TOPICS), person=one(PEOPLE), person2=one(PEOPLE), place=one(PLACES),
        thing=one(THINGS), task=one(TASKS), language=rng.choice(LANGUAGES), adjective=one(ADJECTIVES),
        name=one(NAMES), name2=one(NAMES), number=rng.randint(2, 12), number2=rng.randint(3, 99),
    )  # fmt: skip


def prompt(rng: random.Random, held_out: bool, system: str) -> str:
    """Return the text of a chat up to where the model goes on: the assistant's turn or, in training, for half of the
    chats that of the user. Half of the chats begin with `system`."""
    system = f"<|im_start|>system\n{system}<|im_end|>\n" if rng.random() < 0.5 else ""
    if not held_out and rng.random() < 0.5:
        return f"{system}<|im_start|>user\n"
    return f"{system}<|im_start|>user\n{message(rng, held_out)}<|im_end|>\n<|im_start|>assistant\n"
