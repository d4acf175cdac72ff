"""Parsers by name, and the choice of a parser for a model."""

from collections.abc import Iterable
from typing import TypeVar

from multimodal.answers.parsers.families import MESSAGES, REASONING, TOOLS
from multimodal.answers.parsers.formats import MessagesFormat, OutputFormat, ReasoningFormat, ToolFormat

Format = TypeVar("Format", bound=ToolFormat | ReasoningFormat | MessagesFormat)


def _by_name(formats: Iterable[Format]) -> dict[str, Format]:
    table: dict[str, Format] = {}
    for record in formats:
        table.update(dict.fromkeys(map(_plain, (record.name, *record.aliases)), record))
    return table


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


_TOOLS, _REASONING, _MESSAGES = _by_name(TOOLS), _by_name(REASONING), _by_name(MESSAGES)

TOOL_PARSERS = tuple(sorted({record.name for record in TOOLS} | {record.name for record in MESSAGES}))
REASONING_PARSERS = tuple(sorted({record.name for record in REASONING} | {record.name for record in MESSAGES}))

# Texts that a chat template contains, all of them, and the parser of its calls. The first match counts.
_TOOL_TEMPLATES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>", "<|start|>"), "gpt_oss"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|tool_call>", '<|"|>'), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("｜DSML｜ calls",), "deepseek_v41"),
    (("｜DSML｜tool_calls",), "deepseek_v4"),
    (("｜DSML｜function_calls",), "deepseek_v32"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<TOOLCALL>",), "nemotron"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("functools[",), "phi4_mini"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini"),
    (("<|tool_call|>",), "granite"),
    (("<|start_of_role|>", "<tool_call>["), "granite"),
    (("<tool_calls>",), "jamba"),
    (("<tool_call>",), "hermes"),
    (("<|header_start|>", "<|python_start|>"), "llama4_pythonic"),
    (("<|header_start|>", "[func_name1("), "llama4_pythonic"),
    (("<|start_header_id|>", "[func_name1("), "pythonic"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
)
_REASONING_TEMPLATES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>", "<|start|>"), "gpt_oss"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("<|channel>thought",), "gemma4"),
    (("<seed:think>",), "seed_oss"),
    (("[THINK]",), "mistral"),
    (("◁think▷",), "kimi"),
    (("Here is my thought process:",), "granite"),
    (("<|tool_calls_section_begin|>", "</think>"), "kimi_k2"),
    (("<arg_key>", "</think>"), "glm45"),
    (("<|im_start|>", "</think>"), "qwen3"),
    (("</think>",), "deepseek_v3"),
)
# Models whose prompts come from a program instead of a chat template, or whose template does not show the format.
_MODEL_TYPES: dict[str, tuple[str | None, str | None]] = {
    "gpt_oss": ("gpt_oss", "gpt_oss"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "kimi_k3": ("kimi_k3", "kimi_k3"),
    "deepseek_v32": ("deepseek_v32", "deepseek_v3"),
    "deepseek_v4": ("deepseek_v4", "deepseek_v3"),
    "deepseek_v41": ("deepseek_v41", "deepseek_v3"),
    "minimax_m2": ("minimax_m2", "deepseek_v3"),
    "seed_oss": ("seed_oss", "seed_oss"),
    "glm4_moe": ("glm45", "glm45"),
    "mistral": ("mistral", None),
    "mistral3": ("mistral", "mistral"),
    "ministral3": ("mistral", "mistral"),
    "gemma4": ("gemma4", "gemma4"),
    "gemma4_text": ("gemma4", "gemma4"),
    "jamba": ("jamba", None),
    "granite": ("granite", "granite"),
    "step3": (None, "step3"),
    "step3p5": (None, "step3"),
}


def choose(chat_template: str | None, model_type: str | None) -> tuple[str | None, str | None]:
    """Return the names of the tool parser and the reasoning parser for a model; None if it needs none. The chat
    template decides, since fine-tuned models have their own; without a match there, the model's type does.
    """
    template = chat_template or ""
    tools, reasoning = _MODEL_TYPES.get(model_type or "", (None, None))
    if template:
        tools = _first(_TOOL_TEMPLATES, template) or (tools if "tools" in template else None)
        reasoning = _first(_REASONING_TEMPLATES, template) or (reasoning if "think" in template.lower() else None)
    return tools, reasoning


def family(tools: str | None = None, reasoning: str | None = None) -> OutputFormat:
    """Return the family of parsers chosen by name. Raises ValueError for an unknown name, and lists the known."""
    if tools is not None and _plain(tools) not in {*_TOOLS, *_MESSAGES}:
        raise ValueError(f"unknown tool parser {tools}; the known ones are {', '.join(TOOL_PARSERS)}")
    if reasoning is not None and _plain(reasoning) not in {*_REASONING, *_MESSAGES}:
        raise ValueError(f"unknown reasoning parser {reasoning}; the known ones are {', '.join(REASONING_PARSERS)}")
    messages = _MESSAGES.get(_plain(tools or "")) or _MESSAGES.get(_plain(reasoning or ""))
    if messages is not None:
        return OutputFormat(messages=messages)
    return OutputFormat(
        reasoning=_REASONING[_plain(reasoning)] if reasoning else None,
        tools=_TOOLS[_plain(tools)] if tools else None,
    )


def _first(rules: Iterable[tuple[tuple[str, ...], str]], template: str) -> str | None:
    return next((name for texts, name in rules if all(text in template for text in texts)), None)
