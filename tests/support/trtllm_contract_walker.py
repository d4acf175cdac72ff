"""What a file uses of `tensorrt_llm`, read from its syntax and held against the contract.

Nothing is run. A `Walker` follows TensorRT-LLM's objects from the imports, and from the expressions that are said to
hold them, through assignments, calls, attributes, items and loops. Whatever is done with one must be in the contract.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.support.trtllm_contract_api import (
    API,
    ATTRIBUTES,
    FINISH_REASONS,
    METHODS,
    PACKAGE,
    Kind,
    constructor,
    has,
    imported,
    kind_of,
    signature,
)


@dataclass
class Findings:
    """What a walk has found. `faults` are lines for people; the rest is what syntax alone cannot judge."""

    faults: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    starred: set[str] = field(default_factory=set)
    """Callables that get keywords by `**`."""
    dynamic: set[str] = field(default_factory=set)
    """Classes whose attributes are read by `getattr` with a name that is computed."""
    passed_on: set[str] = field(default_factory=set)
    """Methods that are named and not called, so that somebody else may."""


class Walker(ast.NodeVisitor):
    """One file. `found` holds what there was."""

    def __init__(self, file: str, held: Mapping[str, str]) -> None:
        self._file = file
        self._held = held
        self._scope: dict[str, Kind] = {}
        self.found = Findings()

    def walk(self, source: str) -> Findings:
        self.visit(ast.parse(source))
        return self.found

    # What an expression is.

    def kind(self, node: ast.expr) -> Kind | None:
        text = ast.unparse(node)
        if text in self._scope:
            return self._scope[text]
        if text in self._held:
            self.found.held.add(text)
            name = self._held[text]
            return Kind(METHODS["LLM"][name[4:]], "method") if name.startswith("LLM.") else Kind(name)
        match node:
            case ast.Attribute(value=value, attr=attr):
                return self._member(self.kind(value), attr)
            case ast.Subscript(value=value):
                return self._element(self.kind(value), "list")
            case ast.Await(value=value) | ast.NamedExpr(value=value):
                return self.kind(value)
            case ast.Call(func=func):
                return self._returned(self.kind(func))
        return None

    def _member(self, base: Kind | None, attr: str) -> Kind | None:
        if base is None or base.form != "object":
            return None
        if attr in METHODS.get(base.name, {}):
            stated = API["callables"][METHODS[base.name][attr]]
            return None if "property" in stated.get("kind", "") else Kind(METHODS[base.name][attr], "method")
        return kind_of(ATTRIBUTES[base.name].get(attr, ""))

    def _returned(self, function: Kind | None) -> Kind | None:
        if function is None or function.form == "object":
            return None
        if function.form == "class":
            return Kind(function.name)
        returns = API["callables"][function.name]["returns"] or ""
        return Kind("RequestOutput") if returns == "self" else kind_of(returns)

    def _element(self, base: Kind | None, form: str) -> Kind | None:
        return Kind(base.name) if base is not None and base.form == form else None

    # What is done with it.

    def _fault(self, node: ast.AST, text: str) -> None:
        self.found.faults.append(f"{self._file}:{getattr(node, 'lineno', 0)}: {text}")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == PACKAGE:
                self._fault(node, f"imports the module {alias.name}, not names of it")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if module.split(".")[0] != PACKAGE:
            return
        for alias in node.names:
            if (module, alias.name) == (PACKAGE, "__version__"):
                continue
            if (kind := imported(module, alias.name)) is None:
                self._fault(node, f"{module} has no {alias.name}")
            else:
                self._scope[alias.asname or alias.name] = kind

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        base = self.kind(node.value)
        if base is None:
            return
        if base.form == "list" and hasattr(list, node.attr):
            return
        if base.form != "object" or not has(base.name, node.attr):
            self._fault(node, f"{base.name} has no {node.attr}")
        if (member := self.kind(node)) is not None and member.form == "method":
            self.found.passed_on.add(member.name)

    def visit_Call(self, node: ast.Call) -> None:
        function = self.kind(node.func)
        for child in (
            node.func.value if isinstance(node.func, ast.Attribute) else node.func,
            *node.args,
            *node.keywords,
        ):
            self.visit(child)
        if (
            ast.unparse(node.func) in ("getattr", "hasattr", "setattr")
            and (base := self.kind(node.args[0])) is not None
        ):
            self._reflected(node, base)
        if isinstance(node.func, ast.Attribute):
            self._check_member_call(node, node.func)
        if function is not None:
            self._check_call(node, function)

    def _check_member_call(self, node: ast.Call, func: ast.Attribute) -> None:
        base = self.kind(func.value)
        if base is not None and base.form == "object" and self._member(base, func.attr) is None:
            self._fault(
                node,
                f"{base.name}.{func.attr} is no method"
                if has(base.name, func.attr)
                else f"{base.name} has no {func.attr}",
            )

    def _reflected(self, node: ast.Call, base: Kind) -> None:
        name = node.args[1]
        if not isinstance(name, ast.Constant):
            self.found.dynamic.add(base.name)
        elif not has(base.name, str(name.value)):
            self._fault(node, f"{base.name} has no {name.value!s}")

    def _check_call(self, node: ast.Call, function: Kind) -> None:
        if function.form in ("object", "list"):
            self._fault(node, f"calls a {function.name}")
            return
        method = function.form == "method"
        stated = constructor(function.name) if function.form == "class" else signature(function.name, drop=int(method))
        names = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
        starred = len(names) < len(node.keywords)
        if starred:
            self.found.starred.add(function.name)
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            self._fault(node, f"{function.name}: positional arguments by *")
        elif node.args and function.name.endswith(".generate_async"):
            self._fault(node, f"{function.name}: its positions differ between versions, so keywords only")
        bind = stated.bind_partial if starred else stated.bind
        try:
            bind(*([None] * len(node.args)), **dict.fromkeys(names))
        except TypeError as error:
            self._fault(node, f"{function.name}: {error}")

    def visit_Compare(self, node: ast.Compare) -> None:
        """A finish reason is compared with reasons that there are."""
        self.generic_visit(node)
        if (
            isinstance(node.left, ast.Attribute)
            and node.left.attr == "finish_reason"
            and self.kind(node.left.value) is not None
        ):
            constants = {
                child.value
                for right in node.comparators
                for child in ast.walk(right)
                if isinstance(child, ast.Constant)
            }
            for reason in constants - FINISH_REASONS - {None}:
                self._fault(node, f"no finish_reason is {reason!r}")

    # Where it goes.

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            for name, value in _pairs(target, node.value):
                self._bind(name, self.kind(value))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._bind(node.target, self.kind(node.value))

    def _bind(self, target: ast.expr, kind: Kind | None) -> None:
        if kind is not None and isinstance(target, ast.Name):
            self._scope[target.id] = kind

    def _loop(self, node: ast.For | ast.AsyncFor | ast.comprehension) -> None:
        """Iterating over a result gives itself; over a list, its items."""
        over = self.kind(node.iter)
        self._bind(node.target, over if over == Kind("RequestOutput") else self._element(over, "list"))
        self.generic_visit(node)

    visit_For = visit_AsyncFor = visit_comprehension = _loop  # noqa: N815 - ast's names

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for generator in node.generators:
            self.visit(generator)
        for child in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(child)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension  # noqa: N815 - ast's names

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._scope = self._scope, dict(self._scope)
        self.generic_visit(node)
        self._scope = outer

    visit_FunctionDef = visit_AsyncFunctionDef = _function  # noqa: N815 - ast's names


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def untyped(tree: ast.Module) -> Iterator[str]:
    """Parameters, variables and attributes that are said to be `Any`, of which one could be TensorRT-LLM's."""
    for node in ast.walk(tree):
        annotation = getattr(node, "annotation", None)
        if isinstance(node, ast.arg | ast.AnnAssign) and isinstance(annotation, ast.Name) and annotation.id == "Any":
            yield node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
