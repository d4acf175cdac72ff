"""The imagined GPU: texts come out right, and drafts are computed."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import host
from tests.support.head_files import CONFIG, write_head

STREAMS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A model of which only the facts are read, and its head."""
    model, head = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("head")
    write_head(head)
    facts = CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
    (model / "config.json").write_text(json.dumps(facts))
    return model, str(head)


@pytest.mark.parametrize(("mode", "workload"), [("none", "own"), ("ngram", "edit"), ("eagle3", "own")])
def test_texts_are_computed_with_and_without_speculation(folders: tuple[Path, str], mode: str, workload: str) -> None:
    options = argparse.Namespace(streams=[STREAMS], step=1.0, several=0.0, row=1.0, right=0.9, round=1.2)
    core = host.core_of(mode, host.Device(), options, *folders)
    rates = [host.run(core, host.text_of(workload, 0), STREAMS, str(repeat)) for repeat in range(2)]
    stats = core.stats().spec_decoding_stats
    if mode == "none":
        assert stats is None and all(rate.tokens > 0 for rate in rates)
    else:
        assert stats is not None and 0 < stats.num_accepted_tokens < stats.num_draft_tokens
