"""Parsers by name, and for a model."""

import pytest

from multimodal.answers.parsers.choose import REASONING_PARSERS, TOOL_PARSERS, choose, family

# What vLLM and Dynamo call them, and issue 20 asks for.
TOOL_NAMES = (
    *("hermes", "qwen3", "qwen3_coder", "qwen3.5", "llama3_json", "llama4_pythonic", "pythonic", "mistral"),
    *("deepseek_v3", "deepseek_v31", "deepseek_v3_1", "deepseek_v32", "deepseek_v3_2", "deepseek_v4", "kimi_k2"),
    *("glm45", "glm47", "gpt-oss", "harmony", "openai", "gemma4", "functiongemma", "granite", "phi4_mini"),
    *("phi4_mini_json", "minimax_m2", "nemotron", "nemotron_deci", "nemotron_nano", "jamba", "seed_oss", "xlam"),
    *("deepseek_v3.1", "deepseek_v3.2"),
)
REASONING_NAMES = (
    *("deepseek_r1", "qwen3", "glm45", "gpt-oss", "openai_gptoss", "kimi", "kimi_k2", "minimax", "mistral", "granite"),
    *("minimax_append_think", "nemotron", "nemotron_deci", "seed_oss", "step3", "gemma4", "basic"),
    *("minimax_m2_append_think", "nemotron_nano", "qwen3.5", "qwen3-thinking", "deepseek_v3.2"),
)


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_tool_parsers_have_names_of_others(name: str) -> None:
    found = family(name)
    assert found.tools or found.messages


@pytest.mark.parametrize("name", REASONING_NAMES)
def test_reasoning_parsers_have_names_of_others(name: str) -> None:
    found = family(None, name)
    assert found.reasoning or found.messages


def test_names_are_listed_for_who_mistypes_one() -> None:
    with pytest.raises(ValueError, match=r"unknown tool parser hermez; .*hermes"):
        family("hermez")
    with pytest.raises(ValueError, match=r"none of the reasoning parsers .*qwen3"):
        family(None, "hermes")


def test_every_parser_can_be_chosen_by_its_name() -> None:
    assert all(family(name) for name in TOOL_PARSERS)
    assert all(family(None, name) for name in REASONING_PARSERS)


@pytest.mark.parametrize(
    ("template", "model_type", "tools", "reasoning"),
    [
        (
            "{%- if tools %}<tools></tools>return a json object within <tool_call></tool_call> XML tags"
            "{%- endif %}<|im_start|>assistant\n",
            "qwen2",
            "hermes",
            None,
        ),
        ("{% if tools %}<tool_call>{% endif %}<|im_start|>assistant\n<think></think>", "qwen3", "hermes", "qwen3"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=x>", "qwen3_moe", "qwen3_coder", None),
        ("<tool_call>\n<function=f>\n<parameter=x><|im_start|><think></think>", "qwen3_5", "qwen3_coder", "qwen3"),
        ("<tool_call>{name}<arg_key></arg_key><|assistant|>\n<think></think>", "glm4_moe", "glm45", "glm45"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", "mistral", None),
        ("[TOOL_CALLS][THINK]", "mistral3", "mistral", "mistral"),
        ("<|start|>{{role}}<|channel|>analysis<|message|>", "gpt_oss", "gpt_oss", "gpt_oss"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "deepseek_v3", "deepseek_v3", None),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}</think>", "deepseek_v3", "deepseek_v31", "deepseek_v3"),
        (None, "deepseek_v32", "deepseek_v32", "deepseek_v3"),
        ("<|start_header_id|>ipython{\"parameters\": {}}", "llama", "llama3_json", None),
        ("<|start_header_id|>user<|end_header_id|>{{ message }}", "llama", None, None),
        ("<|im_start|>{{ message['role'] }}", "llama", None, None),
        ("<|tool_call>call:f{s:<|\"|>x<|\"|>}<|channel>thought", "gemma4", "gemma4", "gemma4"),
        ("<seed:tool_call><function=f><parameter=s></seed:tool_call><seed:think>", "seed_oss", "seed_oss", "seed_oss"),
        ("<minimax:tool_call></think>", "minimax_m2", "minimax_m2", "deepseek_v3"),
        ("<|tool_calls_section_begin|><think></think>", "kimi_k2", "kimi_k2", "kimi_k2"),
        (None, None, None, None),
    ],
)  # fmt: skip
def test_template_and_model_type_decide(
    template: str | None, model_type: str | None, tools: str | None, reasoning: str | None
) -> None:
    assert choose(template, model_type) == (tools, reasoning)
    assert family(tools, reasoning) is not None
