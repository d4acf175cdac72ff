"""`trellis sweep` with servers that it starts: it is interrupted and continued, and leaves no process behind."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.servers import ROOT, running
from tests.support.waiting import slowness

PLAN = """
concurrency: [1]
lengths: ["40:4"]
requests_per_stream: 1
settings: {engine: fake, engine_process: false}
deployments:
  - name: one
  - name: split
    prefill: 1
    decode: 1
    settings: {prefill_min_tokens: 0}
  - name: wrong
    settings: {max_queue_size: many}
"""


def test_a_sweep_starts_measures_resumes_and_stops_deployments(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(PLAN)
    command = [sys.executable, str(ROOT / "trellis.py"), "sweep", str(file), "--output", str(tmp_path / "out")]
    environment = {**os.environ, "MODEL_OPTIONAL": "true"}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stdout is not None
    lines = []
    for line in first.stdout:
        lines.append(line)
        if line.startswith("one 40:4 c1 [1/3]"):
            break
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=60 * slowness())
    assert first.returncode == 130 and "the same command goes on from here" in said, (lines, said)
    assert children and psutil.wait_procs(children, timeout=20)[1] == []

    second = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60 * slowness(), check=False
    )
    assert second.returncode == 1, second.stderr
    assert re.search("one: [123] measurements are there", second.stdout), second.stdout  # the signal may come late
    assert "failed: wrong at 40:4 c1: it ended before it was ready: error: --max-queue-size" in second.stderr
    content = json.loads((tmp_path / "out" / "sweep.json").read_text())
    points = {point["deployment"]: point for point in content["points"]}
    assert [(points[name]["repeats"], points[name]["units"], points[name]["note"]) for name in ("one", "split")] == [
        (3, 1, ""),
        (3, 2, ""),
    ], "caches were reset on every replica"
    assert content["about"]["deployments"]["split"]["settings"]["disaggregation_mode"] in ("prefill", "decode")
    assert not running(psutil.Process(), str(ROOT / "trellis.py"))
