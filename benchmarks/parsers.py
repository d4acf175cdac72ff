"""Measure what finding reasoning and tool calls costs per token, next to passing text on as it is.

    python -m benchmarks.parsers

Every family reads an answer that it could have written, one token at a time: reasoning, text, a call with a long string
and a call with many small values.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tokenizers import AddedToken

from benchmarks.report import table
from engine.checkpoints.store import resolve_model
from multimodal.answers.formats import PlainText
from multimodal.answers.parsers.choose import family
from multimodal.answers.parsers.engine import FamilyParser
from multimodal.answers.parts import Parser
from multimodal.text.tokenizer import Detokenizer, Tokenizer
from server.bench.machine import describe_machine

PROSE = "The engine computes one step after the other, and every step gives each sequence a token. " * 12
VALUES = {f"value_{number}": number * 1.5 for number in range(60)}
SCHEMAS = {"write": {"type": "object", "properties": {"text": {"type": "string"}}}, "measure": {"type": "object"}}
PAIRS = {
    "hermes": "qwen3",
    "qwen3_coder": "qwen3",
    "glm45": "glm45",
    "deepseek_v32": "deepseek_v3",
    "kimi_k2": "kimi_k2",
    "gpt_oss": "gpt_oss",
    "mistral": "mistral",
    "gemma4": "gemma4",
    "llama3_json": None,
}


def answer(tools: str, reasoning: str | None) -> str:
    """Return an answer as a family writes it. Arguments between markers are written as one argument."""
    found = family(tools, reasoning)
    if found.messages is not None:
        text = f"<|channel|>analysis<|message|>{PROSE}<|end|><|start|>assistant"
        text += f"<|channel|>commentary<|message|>{PROSE}<|end|>"
        form, section = found.messages.write, ("", "")
    else:
        assert found.tools is not None
        thoughts = found.reasoning.write if found.reasoning is not None else ("", "")
        text = f"{thoughts[0]}{PROSE}{thoughts[1]}" if found.reasoning is not None else ""
        text += PROSE if not found.tools.bare else ""
        form, section = found.tools.write, found.tools.write_section
    calls = [
        form.replace("NAME", name).replace("INDEX", "0").replace("ARGUMENTS", arguments(tools, values))
        for name, values in (("write", {"text": PROSE}), ("measure", VALUES))
    ]
    separator = found.tools.separator if found.tools is not None else ""
    return text + section[0] + separator.join(calls) + section[1]


def arguments(tools: str, values: dict[str, object]) -> str:
    """Return arguments in the notation of a family."""
    written = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    match tools:
        case "qwen3_coder":
            return "\n".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in written.items())
        case "glm45":
            return "\n".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in written.items()
            )
        case "deepseek_v32":
            return "\n".join(
                f'<｜DSML｜parameter name="{key}" string="{json.dumps(isinstance(values[key], str))}">{value}'
                "</｜DSML｜parameter>"
                for key, value in written.items()
            )
    return json.dumps(values)


def measure(make: Callable[[], Parser], deltas: Sequence[tuple[tuple[int], str]], rounds: int) -> float:
    """Return microseconds per token, the best of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        parser = make()
        began = time.process_time()
        for ids, text in deltas:
            parser.feed(ids, text)
        parser.finish()
        best = min(best, time.process_time() - began)
    return best / len(deltas) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parsers", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer makes the tokens")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    folder = resolve_model(args.model, Path("~/.cache/trellis"))
    rows = []
    for tools, reasoning in PAIRS.items():
        found = family(tools, reasoning)
        tokenizer = Tokenizer.load(folder)
        tokenizer.backend.add_special_tokens([AddedToken(marker, special=True) for marker in found.markers])
        tokenizer = Tokenizer(tokenizer.backend, {})
        detokenizer = Detokenizer(tokenizer, False)
        ids = tokenizer.encode(answer(tools, reasoning))
        deltas = [((token,), detokenizer.feed((token,))) for token in ids]

        rows.append(
            [
                tools,
                str(len(deltas)),
                *(
                    f"{measure(make, deltas, args.rounds):.2f}"
                    for make in (
                        PlainText,
                        partial(FamilyParser, found, SCHEMAS, tokenizer=tokenizer),
                        partial(FamilyParser, found, SCHEMAS, tokenizer=tokenizer, whole_calls=True),
                    )
                ),
            ]
        )
    for key, value in (describe_machine() | vars(args)).items():
        print(f"- {key}: {value}")
    print("\n" + table(["family", "tokens", "plain, us/token", "streamed calls", "whole calls"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
