"""`trellis sweep` against a running server on the fake engine."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import uvloop

from engine.process.sockets import free_port
from server.bench.client import LoadRun, Target, exchange
from server.cli import main
from server.commands.sweep import end_as_by_ctrl_c
from server.sweep.results import ResultFolder
from tests.support.servers import ServerThread

SECRET = "of-the-operators"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(api_keys="secret", internal_secret=SECRET) as running:
        yield running


def sweep(*arguments: str) -> int:
    return main(["sweep", "--requests-per-stream", "1", *arguments])


def test_a_sweep_measures_goes_on_and_names_what_failed(
    server: ServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INTERNAL_SECRET", SECRET)
    monkeypatch.setenv("API_KEYS", "secret")
    file = tmp_path / "sweep.yaml"
    running = f"  - {{name: there, url: '{server.url}'}}\n"
    file.write_text(
        "concurrency: [1, 2]\nlengths: ['40:4']\nslo: {ttft: 60000}\ndeployments:\n"
        f"  - {{name: nobody, url: 'http://127.0.0.1:{free_port()}'}}\n{running}"
    )
    output = tmp_path / "out"
    assert sweep(str(file), "--output", str(output), "--seed", "1") == 1
    said = capsys.readouterr()
    assert "failed: nobody at 40:4 c1, 40:4 c2: no server answers" in said.err and "2 of 4 points" in said.out
    content = json.loads((output / "sweep.json").read_text())
    points = {(point["deployment"], point["load"]): point for point in content["points"]}
    for load in ("c1", "c2"):
        point = points["there", load]
        assert (point["error"], point["note"], point["repeats"]) == ("", "", 3)
        figures = {name: figure["mean"] for name, figure in point["figures"].items()}
        assert figures["goodput"] == figures["requests_per_second"] > 0 and figures["cached_tokens"] == 0
        assert figures["per_user"] > 0 < figures["ttft_p50"] <= figures["ttft_p99"] < figures["latency_p99"]
    about = content["about"]
    assert about["plan"]["seed"] == 1 and about["deployments"]["there"]["settings"]["engine"] == "fake"
    assert {"commit", "cpu", "versions", "trellis", "command"} <= about["runs"][0].keys()
    assert SECRET not in json.dumps(about) and '"secret"' not in json.dumps(about)

    file.write_text(file.read_text().partition("  - ")[0] + running)
    before = (output / "measurements.jsonl").read_bytes()
    assert sweep(str(file), "--output", str(output), "--seed", "1", "--repeats", "4") == 0
    said = capsys.readouterr()
    assert "there: 6 measurements are there" in said.out and said.out.count("[4/4]") == 2
    assert (output / "measurements.jsonl").read_bytes().startswith(before)
    assert len(json.loads((output / "sweep.json").read_text())["about"]["runs"]) == 2

    assert sweep("--join", str(output), "--output", str(tmp_path / "joined"), "--ttft", "0.000001") == 1, (
        "nobody is there"
    )
    *_, point = json.loads((tmp_path / "joined" / "sweep.json").read_text())["points"]
    assert point["figures"]["goodput"]["mean"] == 0 and point["repeats"] == 4


async def test_requests_arrive_at_random_whatever_is_running(server: ServerThread) -> None:
    target = Target(f"{server.url}/v1", "fake", "secret")
    requests = [target.request(f"question {number}", 4) for number in range(12)]
    load = LoadRun(1, 12, 0, 4, rate=200.0)
    began = time.perf_counter()
    samples = await exchange(target, load, requests, random.Random(0))
    took, rng = time.perf_counter() - began, random.Random(0)
    assert took > 0.95 * sum(rng.expovariate(200.0) for _ in requests), "the last one does not come sooner"
    assert [sample.error for sample in samples] == [""] * 12 and all(sample.itl for sample in samples)


def test_caches_that_cannot_be_reset_are_noted(server: ServerThread, tmp_path: Path) -> None:
    flags = ["--url", server.url, "--api-key", "secret", "-c", "1", "--lengths", "40:4", "--output", str(tmp_path)]
    assert sweep(*flags) == 0
    notes = {record.note for record in ResultFolder(tmp_path).records}
    assert len(notes) == 1 and "caches were not reset: HTTP 401" in notes.pop()
    command = json.loads((tmp_path / "sweep.json").read_text())["about"]["runs"][0]["command"]
    assert "--api-key ..." in command


def test_aiperf_runs_in_its_own_environment(
    server: ServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in records what aiperf would; its flags are those of 0.13."""
    monkeypatch.setenv("CACHE_DIR", str(tmp_path))
    command = tmp_path / "aiperf-0.13" / "bin" / "aiperf"
    command.parent.mkdir(parents=True)
    command.write_text(
        f"#!{sys.executable} -SE\n"
        "import json, pathlib, sys\n"
        "given = dict(zip(sys.argv, sys.argv[1:]))\n"
        "folder = pathlib.Path(given['--artifact-dir'])\n"
        "if given['--tokenizer'] == 'missing':\n"
        "    (folder / 'logs').mkdir()\n"
        "    log = folder / 'logs' / 'aiperf.log'\n"
        "    log.write_text('now - one - INFO - begun\\nnow - one - ERROR - no tokenizer\\n')\n"
        "    sys.exit('Log File: somewhere')\n"
        "(folder / 'argv.json').write_text(json.dumps(sys.argv[1:]))\n"
        "values = {'request_latency': 9.0, 'time_to_first_token': 6.0}\n"
        "values['usage_completion_tokens'] = int(given['--osl'])\n"
        "metrics = {name: {'value': value} for name, value in values.items()}\n"
        "about = {'benchmark_phase': 'profiling', 'request_start_ns': 0, 'request_end_ns': 9 * 10**6}\n"
        "line = json.dumps({'metadata': about, 'metrics': metrics}) + '\\n'\n"
        "(folder / 'profile_export.jsonl').write_text(line * int(given['--request-count']))\n"
    )
    os.chmod(command, 0o755)
    output = tmp_path / "out"
    flags = ["--url", server.url, "--api-key", "secret", "--lengths", "40:4", "--tokenizer", "folder", "--rate", "3"]
    assert sweep(*flags, "--client", "aiperf", "--output", str(output)) == 0
    folders = sorted(output.glob("aiperf/*"))
    assert len(folders) == 3, [folder.name for folder in folders]
    arguments = json.loads((output / "aiperf/server-40-4-3-per-s-1/argv.json").read_text())
    text = " ".join(arguments)
    assert re.match("profile --streaming .*--request-rate 3 --arrival-pattern poisson .*--isl 40 --osl 4", text)
    assert "--extra-inputs ignore_eos:true" in text and "--api-key secret" in text
    flags = ["--url", server.url, "--api-key", "secret", "--lengths", "40:4", "--tokenizer", "missing"]
    assert sweep(*flags, "--client", "aiperf", "-c", "1", "--output", str(tmp_path / "bad")) == 1
    assert "aiperf ended with exit code 1: no tokenizer" in capsys.readouterr().err


def test_a_signal_during_a_callback_of_the_loop_ends_the_command(request: pytest.FixtureRequest) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        request.addfinalizer(partial(signal.signal, signum, signal.getsignal(signum)))
    end_as_by_ctrl_c()

    class Terminated(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)  # the signal's handler runs here

    async def receive() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_connection(Terminated, sock=ours)
        with theirs, closing(transport):
            theirs.send(b"x")
            await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(receive())
