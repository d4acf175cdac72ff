"""The choice of a drafter for a configuration."""

import time

from engine.config import EmbeddedConfig
from engine.embedded.models.runner import ModelRunner
from engine.embedded.speculation.answers import Answers
from engine.embedded.speculation.costs import ROW_SHARE, ROW_SHARE_ON_GPU
from engine.embedded.speculation.drafter import Drafter
from engine.embedded.speculation.lookup import Lookup
from engine.embedded.speculation.speculator import Speculator


def create_speculator(config: EmbeddedConfig, runner: ModelRunner) -> Speculator | None:
    """Return the configured speculator, or None without speculation. Raises EngineFailure if its draft model or head
    cannot be loaded or does not fit the target."""
    drafter: Drafter
    match config.speculative:
        case "none":
            return None
        case "ngram":
            drafter = Lookup(config.speculative_min_match)
        case "suffix":
            drafter = Answers(config.speculative_min_match, config.speculative_answer_tokens)
        case "draft":
            from engine.embedded.speculation.draft_model import DraftModel  # noqa: PLC0415

            drafter = DraftModel(config, runner)
        case "eagle3":
            from engine.embedded.speculation.eagle import Eagle  # noqa: PLC0415

            drafter = Eagle(config, runner)
    on_cpu = runner.device.type == "cpu"
    return Speculator(
        drafter,
        lookup=Lookup(config.speculative_min_match),
        clock=time.process_time if on_cpu else time.monotonic,
        row_share=ROW_SHARE if on_cpu else ROW_SHARE_ON_GPU,
        most=config.speculative_tokens,
        min_speedup=config.speculative_min_speedup,
        context_length=runner.context_length,
        block_size=config.kv_block_size,
    )
