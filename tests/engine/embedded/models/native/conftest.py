"""The levels of instructions that tests of the compiled path run at."""

import pytest

from engine.embedded.models.native import levels
from engine.embedded.models.native.levels import LEVELS, available


def as_here(level: levels.Level) -> levels.Level:
    """The level itself, or its vector width in instructions that this processor has.

    It takes 23 s to compile that with -O3, and 4 s with -O1.
    """
    here = available()
    return level if level in here else level._replace(flags=(*here[-1].flags, "-O1"), needs=frozenset())


ALL_LEVELS = tuple(map(as_here, LEVELS))


@pytest.fixture(params=[level.name for level in LEVELS if level in available() or not level.name.endswith("vnni")])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A level's name, which can be had in the test. Without VNNI, its levels are the same code as others."""
    monkeypatch.setattr(levels, "LEVELS", ALL_LEVELS)
    return str(request.param)
