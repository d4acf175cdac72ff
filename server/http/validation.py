"""Messages about malformed bodies, which name fields and repeat no values.

Pydantic reports a value that fits no branch of a union once for each branch. Of these reports, those on the branch that
was meant are kept: the one with a wrong value rather than a wrong type, else the one that got furthest. Where none did,
one sentence lists the types.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "bool_parsing": "true or false",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}
_SENTENCES = {
    "missing": "is missing",
    "literal_error": "must be {expected}",
    "finite_number": "must be a finite number",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have {max_length} or fewer entries",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have {max_length} or fewer characters",
    "string_pattern_mismatch": "must match {pattern}",
    "json_invalid": "is not valid JSON: {error}",
}
"""Messages for Pydantic's kinds of errors, except wrong types."""


class _Fault(NamedTuple):
    """One of Pydantic's reports."""

    path: tuple[str | int, ...]
    """Keys and indexes in the body."""
    branches: tuple[tuple[int, str], ...]
    """The unions on the way: the length of the path there, and the branch's name."""
    kind: str
    context: Mapping[str, Any]
    message: str

    @property
    def progress(self) -> tuple[bool, tuple[str | int, ...]]:
        """Measure of how far validation got before it failed: further is greater."""
        return self.kind not in _TYPES, self.path


def sentences(errors: Sequence[Mapping[str, Any]], body: Any) -> list[tuple[str, str]]:
    """Return the dotted paths of the values at fault, empty for the body itself, each with a sentence."""
    types: dict[tuple[str | int, ...], list[str]] = {}
    faults = _meant([_fault(entry, body) for entry in errors])
    for fault in faults:
        if fault.kind in _TYPES:
            types.setdefault(fault.path, []).append(_TYPES[fault.kind])
    found: dict[tuple[str, str], None] = {}
    for fault in faults:
        path = ".".join(map(str, fault.path))
        subject = f"'{path}'" if path else "The body"
        if fault.kind in _TYPES:
            said = f"{subject} must be {_any_of(types[fault.path])}."
        elif fault.kind in _SENTENCES:
            said = f"{subject} {_SENTENCES[fault.kind].format(**fault.context)}."
        else:
            said = f"{fault.message}."
        found[path, said] = None
    return list(found)


def _fault(entry: Mapping[str, Any], body: Any) -> _Fault:
    """Tell the keys of the body from the names of branches in Pydantic's location."""
    path: list[str | int] = []
    branches: list[tuple[int, str]] = []
    location = entry["loc"]
    if body is None and location[:1] == ("query",):
        location = location[1:]
        body = dict.fromkeys(location)
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if (isinstance(body, dict) and part in body) or (
            isinstance(body, list) and isinstance(part, int) and part < len(body)
        ):
            body = body[part]
            path.append(part)
        elif entry["type"] == "missing" and last:
            path.append(part)
        else:
            branches.append((len(path), str(part)))
    return _Fault(tuple(path), tuple(branches), entry["type"], entry.get("ctx", {}), entry["msg"])


def _meant(faults: Sequence[_Fault], depth: int = 0) -> list[_Fault]:
    """Keep the faults of the branch that was meant, of each union that is the `depth`-th on its path."""
    unions: dict[tuple[Any, ...], list[_Fault]] = {}
    for number, fault in enumerate(faults):
        place: tuple[Any, ...] = (number,)
        if depth < len(fault.branches):
            place = fault.path[: fault.branches[depth][0]], fault.branches[:depth]
        unions.setdefault(place, []).append(fault)
    kept: list[_Fault] = []
    for place, group in unions.items():
        if len(place) == 1:  # no union
            kept += group
            continue
        best = max(fault.progress for fault in group)
        meant = {fault.branches[depth] for fault in group if fault.progress == best}
        if len(meant) == 1:
            kept += _meant([fault for fault in group if fault.branches[depth] in meant], depth + 1)
        else:
            kept += [fault for fault in group if fault.progress == best]
    return kept


def _any_of(types: Sequence[str]) -> str:
    *first, last = dict.fromkeys(types)
    return f"{', '.join(first)} or {last}" if first else last
