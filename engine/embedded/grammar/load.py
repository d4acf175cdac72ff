"""Loading the library that compiles a kind of guides."""

from __future__ import annotations

from engine.embedded.grammar.library import Library, Setup


def load(setup: Setup) -> Library:
    """Import a library and have it read the tokenizer, which may take seconds."""
    if setup.library == "llguidance":
        from engine.embedded.grammar.with_llguidance import Llguidance  # noqa: PLC0415

        return Llguidance(setup)
    from engine.embedded.grammar.with_xgrammar import Xgrammar  # noqa: PLC0415

    return Xgrammar(setup)
