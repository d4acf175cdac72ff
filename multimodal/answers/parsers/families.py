"""The families: how models write reasoning and tool calls, under the names that vLLM and Dynamo give them."""

from multimodal.answers.parsers.formats import (
    NAME,
    SPACE,
    Bare,
    Json,
    JsonCall,
    MessagesFormat,
    Params,
    Pythonic,
    ReasoningFormat,
    ToolFormat,
)

_OBJECTS = r"(?=\{|\[\s{0,16}\{)"
_QWEN_PARAMETER = r"«<parameter=»(?P<key>[^>\n]{1,256})>"
_FUNCTION = r"«<function=»(?P<name>[^>\n]{1,256})>"


def _function_params(outer: str) -> Params:
    """Return arguments as Qwen3-Coder writes them: a line for each marker. Closing markers are sometimes left out."""
    return Params(
        begin=_QWEN_PARAMETER,
        close=rf"\n?«</parameter>»(?={SPACE}(?:«<parameter=»|«</function>»|«{outer}»|EOS))"
        rf"|\n(?=«<parameter=»[^>\n]{{1,256}}>)|\n(?=«</function>»{SPACE}(?:«{outer}»|EOS))",
        end="«</function>»",
        newline=True,
    )


def _dsml(outer: str, space: str = "") -> Params:
    tag = f"«｜DSML｜»{space}"
    return Params(
        begin=rf'<{tag}parameter name="(?P<key>[^"\n]{{1,256}})"(?:{SPACE}string="(?P<string>true|false)")?>',
        close=rf"</{tag}parameter>(?={SPACE}(?:<{tag}parameter |</{tag}invoke>|EOS))",
        end=rf"/>|</{tag}invoke>",
    )


def _dsml_tools(
    name: str, outer: str, space: str = "", xgrammar: str = "deepseek_xml", aliases: tuple[str, ...] = ()
) -> ToolFormat:
    tag = f"«｜DSML｜»{space}"
    text = f"｜DSML｜{space}"
    return ToolFormat(
        name=name,
        section=(f"<{tag}{outer}>", f"</{tag}{outer}>"),
        begin=rf'<{tag}invoke name="(?P<name>[^"\n]{{1,256}})"(?:>|(?=/>))',
        content=_dsml(outer, space),
        end="(?!)",
        marker=f"<{tag}{outer}>",
        write_section=(f"\n\n<{text}{outer}>\n", f"</{text}{outer}>"),
        write=f'<{text}invoke name="NAME">\nARGUMENTS\n</{text}invoke>\n',
        xgrammar=xgrammar,
        aliases=aliases,
    )


def _json_list(
    name: str, begin: str, end: str, write: tuple[str, str], aliases: tuple[str, ...] = (), marker: str = ""
) -> ToolFormat:
    """Return tools whose calls are a list of JSON objects behind a marker."""
    return ToolFormat(
        name=name,
        begin=rf"{begin}{SPACE}(?=[\[{{])",
        content=JsonCall(),
        end=rf"{SPACE}{end}" if end else "(?!)",
        marker=marker or begin,
        write_section=(f"{write[0]}[", f"]{write[1]}"),
        write='{"name": "NAME", "arguments": ARGUMENTS}',
        separator=", ",
        aliases=aliases,
    )


TOOLS = (
    ToolFormat(
        name="hermes",
        begin=rf"«<tool_call>»{SPACE}(?=[\[{{])",
        bare=rf"\s{{0,64}}{_OBJECTS}",
        loose=rf"(?:```(?:json|xml)?|<tools>|<function_call>){SPACE}{_OBJECTS}",  # Qwen2.5-Coder, say
        content=JsonCall(),
        end=rf"{SPACE}(?:«</tool_call>»|```|</tools>|</function_call>)",
        marker="«<tool_call>»",
        write='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
        separator="\n",
        aliases=("qwen3", "qwen25", "qwen2_5", "hermes2_pro", "hermes2pro", "granite4"),
    ),
    ToolFormat(
        name="qwen3_coder",
        begin=rf"(?:«<tool_call>»{SPACE})?{_FUNCTION}",
        content=_function_params("</tool_call>"),
        end=rf"{SPACE}«</tool_call>»",
        marker="«<tool_call>»",
        write="<tool_call>\n<function=NAME>\nARGUMENTS\n</function>\n</tool_call>",
        separator="\n",
        xgrammar="qwen_xml",
        aliases=(
            "qwen3.5",
            "qwen3_xml",
            "qwen3_coder_xml",
            "nemotron_nano",
            "nemotron_nano_v3",
            "nemotron3",
            "nemotron_v3",
            "mimo",
        ),
    ),
    ToolFormat(
        name="llama3_json",
        begin=rf"«<|python_tag|>»{SPACE}(?=\{{)",
        bare=r"\s{0,64}(?:;\s{0,64})?(?=\{)",
        content=JsonCall(),
        end=rf"{SPACE}«<|eom_id|>»",
        marker="«<|python_tag|>»",
        write='{"name": "NAME", "parameters": ARGUMENTS}',
        separator="; ",
        trim=False,
        aliases=("llama3", "llama4_json"),
    ),
    ToolFormat(
        name="llama4_pythonic",
        begin=rf"«<|python_start|>»{SPACE}(?=\[)",
        bare=r"\s{0,64}(?=\[)",
        content=Pythonic(),
        end=rf"{SPACE}«<|python_end|>»",
        marker="«<|python_start|>»",
        write="NAME(ARGUMENTS)",
        write_section=("[", "]"),
        separator=", ",
        xgrammar="",
        trim=False,
        aliases=("pythonic", "llama4"),
    ),
    ToolFormat(
        name="mistral",
        begin=rf"«[TOOL_CALLS]»{SPACE}(?:(?P<name>{NAME})(?:«[CALL_ID]»(?P<id>\w{{1,64}}))?(?:«[ARGS]»)?{SPACE}(?=\{{)|(?=[\[{{]))",
        content=JsonCall(),
        end="(?!)",
        marker="«[TOOL_CALLS]»",
        write="[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
        trim=False,
        id_length=9,
        aliases=("mistral_v3", "mistral_v11"),
    ),
    ToolFormat(
        name="deepseek_v3",
        section=("«<｜tool▁calls▁begin｜>»", "«<｜tool▁calls▁end｜>»"),
        begin=rf"«<｜tool▁call▁begin｜>»\w{{1,32}}«<｜tool▁sep｜>»(?P<name>{NAME})\s{{0,16}}```(?:json)?\s{{0,16}}(?=\{{)",
        content=Json(),
        end=r"\s{0,16}```\s{0,16}«<｜tool▁call▁end｜>»",
        marker="«<｜tool▁calls▁begin｜>»",
        write_section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        write="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        separator="\n",
        aliases=("deepseekv3",),
    ),
    ToolFormat(
        name="deepseek_v31",
        section=("«<｜tool▁calls▁begin｜>»", "«<｜tool▁calls▁end｜>»"),
        begin=rf"«<｜tool▁call▁begin｜>»(?P<name>{NAME})«<｜tool▁sep｜>»{SPACE}(?=\{{)",
        content=Json(),
        end=rf"{SPACE}«<｜tool▁call▁end｜>»",
        marker="«<｜tool▁calls▁begin｜>»",
        write_section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        write="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        aliases=("deepseekv31", "deepseek_v3_1"),
    ),
    _dsml_tools("deepseek_v32", "function_calls", aliases=("deepseekv32", "deepseek_v3_2")),
    _dsml_tools("deepseek_v4", "tool_calls", aliases=("deepseekv4",)),
    _dsml_tools("deepseek_v41", "calls", " ", xgrammar="deepseek_v4_1_xml", aliases=("deepseek_v4_1",)),
    ToolFormat(
        name="kimi_k2",
        section=("«<|tool_calls_section_begin|>»", "«<|tool_calls_section_end|>»"),
        begin=rf"«<|tool_call_begin|>»{SPACE}(?P<id>(?:functions\.)?(?P<name>[^\s<>:]{{1,256}})(?::\d{{1,9}})?){SPACE}«<|tool_call_argument_begin|>»{SPACE}(?=\{{)",
        content=Json(),
        end=rf"{SPACE}«<|tool_call_end|>»",
        marker="«<|tool_calls_section_begin|>»",
        write_section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        write="<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        trim=False,
    ),
    ToolFormat(
        name="kimi_k3",
        section=("«<|open|>»tools«<|sep|>»", "«<|close|>»tools«<|sep|>»"),
        begin=r'«<|open|>»call tool="(?P<name>[^"\n]{1,256})"(?: index="\d{1,9}")?«<|sep|>»',
        content=Params(
            begin=r'«<|open|>»argument key="(?P<key>[^"]{1,256})"(?: type="(?P<type>\w{1,16})")?«<|sep|>»',
            close=rf"«<|close|>»argument«<|sep|>»(?={SPACE}(?:«<|open|>»argument |«<|close|>»call|EOS))",
            end="«<|close|>»call«<|sep|>»",
            escaped=True,
        ),
        end="(?!)",
        marker="«<|open|>»tools«<|sep|>»",
        markup="«<|open|>»response«<|sep|>»|«<|close|>»(?:response|message)«<|sep|>»",
        write_section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        write='<|open|>call tool="NAME" index="INDEX"<|sep|>ARGUMENTS<|close|>call<|sep|>',
        trim=False,
        xgrammar="kimi_k3_xml",
    ),
    ToolFormat(
        name="glm45",
        begin=rf"«<tool_call>»{SPACE}(?P<name>[^\s<>]{{1,256}}){SPACE}(?=«<arg_key>»|«</tool_call>»)",
        content=Params(
            begin=r"«<arg_key>»(?P<key>[^<]{1,256})«</arg_key>»\s{0,16}«<arg_value>»",
            close=rf"«</arg_value>»(?={SPACE}(?:«<arg_key>»|«</tool_call>»|EOS))|(?=«</tool_call>»{SPACE}(?:«<tool_call>»|EOS))",
            end="«</tool_call>»",
        ),
        end="(?!)",
        marker="«<tool_call>»",
        write="<tool_call>NAME\nARGUMENTS\n</tool_call>",
        separator="\n",
        xgrammar="glm_xml",
        aliases=("glm4_moe", "glm47", "glm4_7", "glm47_moe", "glm53", "glm5"),
    ),
    ToolFormat(
        name="gemma4",
        begin=rf"«<|tool_call>»{SPACE}call:(?P<name>{NAME}){SPACE}(?=\{{)",
        content=Bare('<|"|>'),
        end=rf"{SPACE}«<tool_call|>»",
        marker="«<|tool_call>»",
        write="<|tool_call>call:NAMEARGUMENTS<tool_call|>",
        trim=False,
    ),
    ToolFormat(
        name="functiongemma",
        begin=rf"«<start_function_call>»{SPACE}call:(?P<name>{NAME}){SPACE}(?=\{{)",
        content=Bare("<escape>"),
        end=rf"{SPACE}«<end_function_call>»",
        marker="«<start_function_call>»",
        write="<start_function_call>call:NAMEARGUMENTS<end_function_call>",
    ),
    ToolFormat(
        name="minimax_m2",
        section=("«<minimax:tool_call>»", "«</minimax:tool_call>»"),
        begin=r'<invoke name="?(?P<name>[^">\n]{1,256})"?>',
        content=Params(
            begin=r'<parameter name="?(?P<key>[^">\n]{1,256})"?>',
            close=rf"\n?</parameter>(?={SPACE}(?:<parameter name=|</invoke>|EOS))",
            end="</invoke>",
            newline=True,
        ),
        end="(?!)",
        marker="«<minimax:tool_call>»",
        write_section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        write='<invoke name="NAME">\nARGUMENTS\n</invoke>\n',
        xgrammar="minimax_xml",
        aliases=("minimax",),
    ),
    ToolFormat(
        name="seed_oss",
        begin=rf"«<seed:tool_call>»{SPACE}{_FUNCTION}",
        content=_function_params("</seed:tool_call>"),
        end=rf"{SPACE}«</seed:tool_call>»",
        marker="«<seed:tool_call>»",
        write="<seed:tool_call>\n<function=NAME>\nARGUMENTS\n</function>\n</seed:tool_call>",
        separator="\n",
        xgrammar="qwen_xml",
        aliases=("seed36",),
    ),
    _json_list(
        "nemotron",
        "«<TOOLCALL>»",
        "«</TOOLCALL>»",
        ("<TOOLCALL>", "</TOOLCALL>"),
        ("nemotron_deci", "nemotron_json", "nemotron_nano_v2"),
    ),
    _json_list("jamba", "«<tool_calls>»", "«</tool_calls>»", ("<tool_calls>", "</tool_calls>"), ("minimax_m1",)),
    _json_list(
        "granite",
        "(?:«<|tool_call|>»|«<tool_call>»|«<function_call>»)",
        "«</tool_call>»",
        ("<tool_call>", "</tool_call>"),
        ("granite-20b-fc",),
    ),
    _json_list(
        "phi4_mini",
        "(?:«<|tool_call|>»|functools)",
        "«<|/tool_call|>»",
        ("functools", ""),
        ("phi4_mini_json", "phi4"),
        marker="«<|tool_call|>»|functools",
    ),
    ToolFormat(
        name="xlam",
        begin=rf"(?:«<tool_call>»|«[TOOL_CALLS]»|```(?:json)?){SPACE}(?=[\[{{])",
        bare=r"\s{0,64}(?=[\[{])",
        content=JsonCall(),
        end=rf"{SPACE}(?:«</tool_call>»|```)",
        marker="«<tool_call>»|«[TOOL_CALLS]»",
        write_section=("[", "]"),
        write='{"name": "NAME", "arguments": ARGUMENTS}',
        separator=", ",
    ),
)

_THINK = ("«<think>»", "«</think>»")

REASONING = (
    ReasoningFormat(
        "deepseek_r1",
        *_THINK,
        implied=True,
        write=("<think>\n", "\n</think>\n\n"),
        aliases=(
            "basic",
            "minimax",
            "minimax_m2",
            "minimax_append_think",
            "minimax_m2_append_think",
            "nemotron_nano",
            "nemotron_nano_v2",
            "nano_v3",
            "nemotron",
            "nemotron_deci",
            "step3p5",
        ),
    ),
    ReasoningFormat(
        "deepseek_v3",
        *_THINK,
        write=("<think>", "</think>"),
        aliases=("deepseek_v31", "deepseek_v3_1", "deepseek_v32", "deepseek_v3_2", "deepseek_v4", "deepseek_v41"),
    ),
    ReasoningFormat(
        "qwen3",
        "«<think>»",
        "«</think>»",
        cut=rf"«<tool_call>»{SPACE}«<function=»",
        write=("<think>\n", "\n</think>\n\n"),
        aliases=("qwen3_5", "qwen3_thinking", "hunyuan_a13b", "nemotron_v3"),
    ),
    ReasoningFormat("glm45", *_THINK, write=("\n<think>", "</think>\n"), aliases=("glm47",)),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷", write=("◁think▷", "◁/think▷"), aliases=("kimi_vl",)),
    ReasoningFormat(
        "kimi_k2", "«<think>»", "«</think>»", cut="«<|tool_calls_section_begin|>»", write=("<think>", "</think>")
    ),
    ReasoningFormat(
        "kimi_k3",
        "«<|open|>»think«<|sep|>»",
        "«<|close|>»think«<|sep|>»",
        cut="«<|open|>»response«<|sep|>»|«<|open|>»tools«<|sep|>»",
        markup="«<|open|>»response«<|sep|>»|«<|close|>»(?:response|message)«<|sep|>»",
        write=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    ReasoningFormat(
        "mistral", "«[THINK]»|«<think>»", "«[/THINK]»|«</think>»", write=("[THINK]", "[/THINK]"), aliases=("magistral",)
    ),
    ReasoningFormat(
        "granite",
        "Here's my thought process:|Here is my thought process:|«<think>»",
        r"Here's my response:|Here is my response:|«</think>»(?:\s{0,16}<response>)?",
        markup="</response>",
        write=("Here is my thought process:\n", "\nHere is my response:\n"),
    ),
    ReasoningFormat("seed_oss", "«<seed:think>»", "«</seed:think>»", write=("<seed:think>\n", "\n</seed:think>\n\n")),
    ReasoningFormat("step3", *_THINK, implied=True, write=("", "\n</think>\n\n")),
    ReasoningFormat("gemma4", r"«<|channel>»thought\n?", "«<channel|>»", write=("<|channel>thought\n", "\n<channel|>")),
)

MESSAGES = (
    MessagesFormat(
        name="gpt_oss",
        header=r"\s{0,16}(?:«<|start|>»)?\s?(?:assistant)?\s?(?:to=(?P<to>[^\s<]{1,256}+))?\s?"
        r"(?:«<|channel|>»\s?(?P<channel>\w{1,32})\s?(?:to=(?P<to>[^\s<]{1,256}+))?\s?){1,4}"
        r"(?:«<|constrain|>»)?\s?\w{0,32}\s?«<|message|>»",
        kinds=(("analysis", "reasoning"), ("commentary", "text"), ("final", "text")),
        end="«<|end|>»|«<|return|>»|«<|call|>»|(?=«<|start|>»assistant)",
        reasoning_begin="«<|channel|>»analysis«<|message|>»",
        reasoning_end="«<|end|>»|(?=«<|start|>»assistant)",
        call=r"functions\.(?P<name>[^\s<]{1,256})\Z",
        readers=("assistant", "user", "final"),
        unfinished=r"\s*(?:«<|start|>»)?\s?(?:assistant)?(?:\s?to=[^\s<]*)?\s?(?:«<|channel|>»\s?\w*\s?(?:to=[^\s<]*)?\s?)?(?:«<|constrain|>»)?\s?\w*\Z",
        restart="(?=«<|start|>»|«<|channel|>»)",
        write="<|start|>assistant to=functions.NAME<|channel|>commentary <|constrain|>json<|message|>ARGUMENTS<|call|>",
        write_reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
        write_next=("<|start|>assistant<|channel|>", "analysis"),
        aliases=("gpt-oss", "harmony", "openai", "openai_gptoss"),
    ),
)
