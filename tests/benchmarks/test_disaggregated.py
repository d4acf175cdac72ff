"""The benchmark of disaggregated serving, on a model of random weights that is as small as can be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.disaggregated import Mix, mix_of
from benchmarks.servers import ROOT
from tests.support.waiting import slowness


def test_a_mix_is_read() -> None:
    assert mix_of("32:512:1200:8192:0.5") == Mix(32, 512, 1200, 8192, 0.5)


@pytest.mark.timeout(600)
def test_both_sides_are_measured(tmp_path: Path) -> None:
    options = [
        "--model",
        "tiny",
        "--prompts",
        "300",
        "--repeats",
        "1",
        "--mix",
        "2:40:60:200:0.1",
        "--output",
        str(tmp_path),
    ]
    command = [
        sys.executable,
        "-m",
        "benchmarks.disaggregated",
        *options,
        "--label",
        "try",
        "--kv-cache-memory-mb",
        "16",
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=110 * slowness(), stdout=subprocess.DEVNULL)
    (page,) = tmp_path.glob("*.md")
    found = json.loads(page.with_suffix(".json").read_text())
    ours, theirs = found["disaggregated"], found["aggregated"]
    assert ours.keys() - theirs.keys() == {f"300 tokens: {what}" for what in MOVED} and not theirs.keys() - ours.keys()
    assert ours["300 tokens: KV blocks, MiB"] == pytest.approx(
        320 * 2 * 2 * 2 * 16 * 4 / 2**20
    )  # ten blocks of float32
    nothing = [name for side in (ours, theirs) for name, value in side.items() if not value > 0]
    pair = ("from first token to second, ms", "from second to third, ms", "to the second token, GB/s")
    at_once = {"mix: gap p50, ms", "mix: gap p90, ms", *(f"300 tokens: {what}" for what in pair)}
    assert set(nothing) <= at_once, "on a busy machine tokens come several at a time"
    assert "mix: gap p99, ms |" in page.read_text()


MOVED = ("KV blocks, MiB", "transfer, ms", "transfer, GB/s", "to the second token, GB/s")
