"""The output format of a request: the parser of its answer, and the grammar of its tool calls."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.types import GuideKind, ReasoningBudget
from multimodal.answers.budgets import budget_of
from multimodal.answers.parsers.engine import FamilyParser
from multimodal.answers.parsers.formats import OutputFormat
from multimodal.answers.parsers.tags import structural_tags
from multimodal.answers.parts import Parser, Part, Text
from multimodal.errors import RequestError
from multimodal.request import Ask, AskedGuide, Conversation, TextGrammar, Tools
from multimodal.text.tokenizer import Tokenizer

_TEXT: dict[str, Any] = {"type": "any_text"}


class PlainText:
    """The parser of answers that are text alone."""

    malformed = 0

    def feed(self, token_ids: Sequence[int], text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


@dataclass(frozen=True)
class AnswerFormat:
    """The format in which a model writes reasoning and tool calls.

    With `stream_arguments`, a stream has the arguments of a call as they are generated. Without it, a stream has whole
    calls, and a call that never completes becomes text. So it does in other answers, unless the call was forced: then
    it is as far as it went. `reasoning_budget` is that of requests without one; -1 is no limit.
    """

    family: OutputFormat = field(default_factory=OutputFormat)
    stream_arguments: bool = True
    reasoning_budget: int = -1

    @property
    def reads_prompts(self) -> bool:
        """Whether the end of the prompt decides where the answer begins, for example inside reasoning."""
        return self.family.reasoning is not None or self.family.messages is not None

    @property
    def calls(self) -> bool:
        """Whether the model can call tools."""
        return self.family.tools is not None or self.family.messages is not None

    @property
    def parser_names(self) -> tuple[str, str]:
        """The parser of tool calls and that of reasoning; empty for none."""
        messages = self.family.messages
        if messages is not None:
            return messages.name, messages.name
        tools, reasoning = self.family.tools, self.family.reasoning
        return tools.name if tools is not None else "", reasoning.name if reasoning is not None else ""

    def parser(self, ask: Ask, kinds: Collection[GuideKind], tokenizer: Tokenizer, opening: str) -> Parser:
        """Return the parser of one choice. `opening` is the text of the prompt behind the last message; `kinds` are the
        engine's kinds of grammars.
        """
        tools = ask.tools.offered if ask.tools is not None else {}
        forced = ask.tools is not None and ask.tools.mode == "required" and not _has_grammar(ask)
        gradual = self.stream_arguments if ask.stream else forced
        if not isinstance(ask.prompt, Conversation) or not (tools or self.reads_prompts):
            return PlainText()
        parser = FamilyParser(
            self.family,
            {name: tool.parameters for name, tool in tools.items()},
            tokenizer=tokenizer,
            skip_special_tokens=ask.skip_special_tokens,
            prompt=opening,
            whole_calls=not gradual,
            forced=forced and gradual,
        )
        described = ask.guides and not tools and not (parser.reasons and "structural_tag" in kinds)
        return PlainText() if described else parser

    def check(self, ask: Ask, kinds: Collection[GuideKind], text_grammars: bool = False) -> None:
        """Raise RequestError for tools that this model cannot call, or cannot be forced to call. `text_grammars`:
        whether the engine supports these.
        """
        if (tools := ask.tools) is None:
            return
        if not self.calls:
            raise RequestError(
                "This server has no parser for tool calls of this model (TOOL_CALL_PARSER).",
                tools.param,
                "unsupported_parameter",
            )
        if tools.guided and "structural_tag" not in kinds:
            raise RequestError(
                f"The engine cannot constrain tool calls, which {tools.guided!r} asks for.",
                tools.guided,
                "unsupported_parameter",
            )
        texts = _texts(tools)
        lark = next((text.field for text in texts.values() if text.syntax == "lark"), "")
        if lark and not text_grammars:
            raise RequestError(
                f"The engine cannot hold the input of a tool to a Lark grammar, which {lark!r} asks for.",
                lark,
                "unsupported_parameter",
            )
        if tools.guided and structural_tags(self.family, _schemas(tools), texts if text_grammars else {}) is None:
            raise RequestError(
                f"No grammar describes this model's tool calls, which {tools.guided!r} asks for.",
                tools.guided,
                "unsupported_parameter",
            )

    def guided(self, ask: Ask, kinds: Collection[GuideKind], parser: Parser, text_grammars: bool = False) -> Ask:
        """Return the request with the grammar that its tools or its output format need. If the parser says that the
        answer begins inside reasoning, the grammar applies after that.
        """
        reasons = isinstance(parser, FamilyParser) and parser.reasons
        tools = ask.tools
        guides = [] if _has_grammar(ask) else [_format(guide) for guide in ask.guides]
        calls = tools is not None and (tools.guided or guides)
        if "structural_tag" not in kinds or _has_grammar(ask) or not (calls or (reasons and guides)):
            return ask
        if tools is not None and calls:
            body = self._calls(tools, guides, _texts(tools) if text_grammars else {})
            if body is None:
                return ask
        else:
            (body,) = guides
        spec = {"type": "structural_tag", "format": self._after_reasoning(body, reasons)}
        texts = _texts(tools) if tools is not None else {}
        name = next((text.field for text in texts.values()), ask.guides[0].field if ask.guides else "tools")
        fields = {**ask.fields, "guide": name}
        return replace(ask, guides=(AskedGuide(name, "structural_tag", spec),), fields=fields)

    def limits(self, ask: Ask) -> bool:
        """Return whether the reasoning of a request has a budget."""
        budget = self.reasoning_budget if ask.reasoning_budget is None else ask.reasoning_budget
        return budget >= 0 and isinstance(ask.prompt, Conversation) and self.reads_prompts

    def budget(
        self, ask: Ask, guided: Ask, parser: Parser, tokenizer: Tokenizer, refused: Collection[str] = ()
    ) -> ReasoningBudget | None:
        """Return the budget of reasoning for a request after `guided`; None for no limit. `refused` are parameters that
        the engine refuses. Raises RequestError.

        A model without reasoning needs no limit, nor does an output that the request itself describes in full.
        """
        described = guided.guides and guided.guides == ask.guides
        if not self.limits(ask) or not isinstance(parser, FamilyParser) or described:
            return None
        if not ask.needs_budget and "reasoning_budget" in refused:
            return None
        tokens = self.reasoning_budget if ask.reasoning_budget is None else ask.reasoning_budget
        found = budget_of(self.family, tokens, tokenizer=tokenizer, inside=parser.reasons, guided=bool(guided.guides))
        if found is None:
            raise RequestError(
                "This model's reasoning cannot be limited: its markers are no fixed texts.",
                ask.spelled("reasoning_budget"),
                "unsupported_parameter",
            )
        return found

    def _calls(
        self, tools: Tools, guides: list[dict[str, Any]], texts: Mapping[str, TextGrammar]
    ) -> dict[str, Any] | None:
        """Return the format of calls, or of the answer that `guides` describe instead."""
        tags = structural_tags(self.family, _schemas(tools), texts)
        if tags is None:
            return None
        single = not tools.parallel or self.family.messages is not None
        required = tools.mode == "required" or bool(guides)
        found: dict[str, Any] = tags.xgrammar(at_least_one=required, stop_after_first=single)["format"]
        if not guides or tools.mode == "required":
            return found
        return {"type": "or", "elements": [*guides, found]}

    def _after_reasoning(self, body: dict[str, Any], reasons: bool) -> dict[str, Any]:
        if self.family.messages is not None:
            begin, end = self.family.messages.write_reasoning
            thoughts = {"type": "tag", "begin": begin, "content": _TEXT, "end": end}
            return {"type": "sequence", "elements": [thoughts, body]}
        reasoning = self.family.reasoning
        if reasoning is None:
            return body
        begin, end = reasoning.write[0].strip(), reasoning.write[1].strip()
        if reasons:
            thoughts = {"type": "tag", "begin": "", "content": _TEXT, "end": end}
        elif begin:
            thoughts = {"type": "tag", "begin": begin, "content": _TEXT, "end": end}
            thoughts = {"type": "optional", "content": thoughts}
        else:
            return body
        spaces = {"type": "regex", "pattern": r"\s{0,4}"}
        return {"type": "sequence", "elements": [thoughts, spaces, body]}


def _has_grammar(ask: Ask) -> bool:
    """Return whether the request itself describes all of the answer, its calls included."""
    return len(ask.guides) > 1 or any(guide.kind == "structural_tag" for guide in ask.guides)


def _schemas(tools: Tools) -> Mapping[str, dict[str, Any]]:
    """Return the schemas that a grammar holds calls to. Where the model may choose, only strict tools have theirs."""
    loose = tools.mode == "auto"
    return {name: {} if loose and not tool.strict else tool.parameters for name, tool in tools.offered.items()}


def _texts(tools: Tools) -> Mapping[str, TextGrammar]:
    """Return the grammars of tools that are called with one text."""
    return {name: tool.text for name, tool in tools.offered.items() if tool.text is not None}


def _format(guide: AskedGuide) -> dict[str, Any]:
    """Return a guide as a part of a structural tag."""
    match guide.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            try:
                value = json.loads(guide.value) if isinstance(guide.value, str) else guide.value
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{guide.field!r} is not valid JSON.", guide.field) from error
            return {"type": "json_schema", "json_schema": value}
        case "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in guide.value]}
        case "regex":
            return {"type": "regex", "pattern": guide.value}
    return {"type": "grammar", "grammar": guide.value}
