"""Models of transformers that are loaded once for many cores: that takes several times as long as most tests' steps."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from engine.embedded.kv.layout import Attends
from engine.embedded.models.torch import runner


@contextmanager
def loaded_once(copies: int = 1) -> Iterator[None]:
    """Load each folder `copies` times at most, and let runners of transformers' models have these in turn. A folder
    that is written again gives the old model.

    So `copies` cores of a folder that are made one after the other share nothing. A core does not change a model that
    another has adapted. What such a model attends to is known from its first core, before it was adapted.
    """
    load, ask = runner.load_weights, runner.ask
    turns: defaultdict[Any, Iterator[int]] = defaultdict(count)
    made: dict[Any, Any] = {}
    asked: dict[Any, Attends] = {}

    def load_weights(auto: Any, folder: str, facts: Any, **options: Any) -> Any:
        key = (folder, options["dtype"], next(turns[folder, options["dtype"]]) % copies)
        if key not in made:
            made[key] = load(auto, folder, facts, **options)
        return made[key]

    def ask_once(module: Any, config: Any, context_length: int) -> Attends:
        if module not in asked:
            asked[module] = ask(module, config, sys.maxsize)
        windows = asked[module].windows
        shorter = tuple(None if window is None or window >= context_length else window for window in windows)
        return asked[module]._replace(windows=shorter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "load_weights", load_weights)
        patch.setattr(runner, "ask", ask_once)
        yield
