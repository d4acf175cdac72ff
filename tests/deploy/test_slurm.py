"""`deploy/slurm/`: configurations for the job's nodes, and the whole way from submitting to the page with stand-ins for
SLURM's commands.
"""

import csv
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.process.sockets import free_port
from engine.trtllm.arguments import problems

FOLDER = Path(__file__).resolve().parents[2] / "deploy/slurm"
STAND_INS = Path(__file__).with_name("slurm")
_spec = importlib.util.spec_from_file_location("gen_yaml", FOLDER / "gen_yaml.py")
assert _spec is not None and _spec.loader is not None
gen_yaml = importlib.util.module_from_spec(_spec)
sys.modules["gen_yaml"] = gen_yaml  # its dataclasses look themselves up
_spec.loader.exec_module(gen_yaml)
LENGTHS = ["--isl", "8150", "--osl", "1024"]


def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, tasks: str, *flags: str) -> dict[str, Any]:
    monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks)
    assert gen_yaml.main([*flags, *LENGTHS, "--output", str(tmp_path)]) == 0
    files = {path.name: yaml.safe_load(path.read_text()) for path in tmp_path.glob("*.yaml")}
    lines = (tmp_path / "instances.tsv").read_text().splitlines()
    return {**files, "instances": [line.split("\t") for line in lines]}


def test_nodes_and_tasks_are_read_as_slurm_writes_them() -> None:
    assert gen_yaml.expand("a,gpu[01-03,7],r[1-2]n[1,3]") == [
        "a", "gpu01", "gpu02", "gpu03", "gpu7", "r1n1", "r1n3", "r2n1", "r2n3",
    ]  # fmt: skip
    assert gen_yaml.expand("one") == ["one"] and gen_yaml.tasks_of("4(x2),1") == [4, 4, 1]
    assert gen_yaml.graph_sizes(48) == [1, 2, 4, 8, 16, 32, 48] and gen_yaml.graph_sizes(4096)[-1] == 2048


def test_wide_decode_gets_whole_nodes_a_balancer_and_mtp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["disagg", "--prefill-replicas", "2", "--prefill-tp", "2", "--prefill-attention-dp", "--decode-tp", "16"]
    flags += ["--decode-attention-dp", "--decode-batch", "64", "--eplb-slots", "288", "--mtp", "3"]
    found = generate(tmp_path, monkeypatch, "n[1-5]", "4(x5)", *flags)
    prefill, decode = found["prefill.yaml"], found["decode.yaml"]
    for arguments in (prefill, decode):
        assert problems({"model": "m", **arguments}) == []
        assert arguments["kv_cache_config"]["dtype"] == "fp8" and not arguments["kv_cache_config"]["enable_block_reuse"]
        assert arguments["cache_transceiver_config"]["max_tokens_in_buffer"] >= 8150
        assert arguments["speculative_config"] == {"decoding_type": "MTP", "num_nextn_predict_layers": 3}
        assert arguments["max_seq_len"] >= 8150 + 1024
    assert prefill["disable_overlap_scheduler"] and prefill["moe_config"] == {"backend": "CUTLASS"}
    assert decode["moe_config"] == {"backend": "WIDEEP", "load_balancer": str(tmp_path / "eplb.yaml")}
    assert found["eplb.yaml"]["num_slots"] % 16 == 0
    assert decode["cuda_graph_config"]["batch_sizes"] == [1, 2, 4, 8, 16, 32, 64]
    assert found["instances"] == [
        ["prefill", "n1", "8100", "1", "2", "2", "n1", "0,1"],
        ["prefill", "n1", "8101", "1", "2", "2", "n1", "2,3"],
        ["decode", "n2", "8102", "4", "16", "4", "n2,n3,n4,n5", "all"],
    ]


def test_tensor_parallel_attention_takes_other_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = generate(tmp_path, monkeypatch, "n[1-2]", "4(x2)", "agg", "--tp", "8")
    arguments = found["agg.yaml"]
    assert problems({"model": "m", **arguments}) == []
    assert (arguments["allreduce_strategy"], arguments["moe_config"]) == ("MNNVL", {"backend": "TRTLLM"})
    assert "cache_transceiver_config" not in arguments and "speculative_config" not in arguments
    assert not (tmp_path / "eplb.yaml").exists()


@pytest.mark.parametrize(
    ("nodes", "tasks", "flags", "said"),
    [
        ("", "", ["agg"], "inside a SLURM job"), ("n[1-2]", "4", ["agg"], "has 2 nodes, SLURM_TASKS_PER_NODE 1"),
        ("n1", "many", ["agg"], "not understood"), ("n1", "4", ["agg", "--tp", "8"], "needs more tasks; the job has 4"),
        ("n[1-2]", "4(x2)", ["agg", "--tp", "6"], "needs nodes that it fills"),
        ("n1", "4", ["disagg", "--prefill-tp", "4"], "decode with 1 tasks needs more tasks"),
    ],
)  # fmt: skip
def test_an_allocation_that_does_not_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    nodes: str, tasks: str, flags: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks)
    assert gen_yaml.main([*flags, *LENGTHS, "--output", str(tmp_path / "none")]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "none").exists()


def shellcheck() -> str | None:
    beside = Path(sys.executable).with_name("shellcheck")
    return str(beside) if beside.is_file() else shutil.which("shellcheck")


@pytest.mark.skipif(shellcheck() is None, reason="shellcheck is not installed")
def test_the_scripts_are_clean() -> None:
    scripts = [*sorted(FOLDER.glob("*.sh")), *sorted(STAND_INS.iterdir())]
    assert len(scripts) == 8
    command = [str(shellcheck()), "--external-sources", *map(str, scripts)]
    checked = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_jobs_are_submitted_measured_and_joined(tmp_path: Path) -> None:
    """One aggregated replica; one prefill and two decode replicas behind a router; and a job that gets too few GPUs."""
    trellis = tmp_path / "trellis"
    trellis.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FOLDER.parents[1] / "trellis.py"}" "$@"\n')
    trellis.chmod(0o755)
    results = tmp_path / "results"
    environment = {
        **os.environ, "PATH": f"{STAND_INS}:{os.environ['PATH']}", "TRELLIS": str(trellis), "PYTHON": sys.executable,
        "RESULTS": str(results), "MODEL": "fake", "ENGINE": "fake", "ISL": "40", "OSL": "4", "CONCURRENCY": "2",
        "REQUESTS_PER_STREAM": "1", "ONLY": "agg-tep4|agg-dep8|1p2tep8", "SHORT": "dep8", "API_KEYS": "",
        "FIRST_PORT": str(free_port()), "ROUTER_PORT": str(free_port()), "PREFILL_MIN_TOKENS": "0",
        "ENGINE_PROCESS": "false",
    }  # fmt: skip

    def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(FOLDER / script), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    aggregated, disaggregated = run("submit_agg.sh", "mtp=on"), run("submit_disagg.sh", "tep")
    assert (aggregated.returncode, disaggregated.returncode) == (0, 0), aggregated.stderr + disaggregated.stderr
    assert "2 jobs submitted" in aggregated.stdout and "1 jobs submitted" in disaggregated.stdout
    joined = run("post_process.sh", str(results), "--ttft", "60000")
    assert "failed: agg-dep8-mtp3: error: agg with 8 tasks needs more tasks" in joined.stderr, logs(results)
    assert joined.returncode == 0, logs(results)
    rows = list(csv.DictReader((results / "results.csv").read_text().splitlines()))
    found = {(row["deployment"], row["load"]): row for row in rows}
    assert {name for name, _ in found} == {"agg-tep4-mtp3", "disagg-1p2tep8-mtp0"}
    assert found["disagg-1p2tep8-mtp0", "c2"]["units"] == "20" and {row["repeats"] for row in rows} == {"3"}
    assert "Pareto" in (results / "index.html").read_text()
    settings = json.loads((results / "disagg-1p2tep8-mtp0/sweep.json").read_text())["about"]["deployments"]
    assert settings["disagg-1p2tep8-mtp0"]["settings"]["disaggregation_mode"] == "router"
    again = run("submit_agg.sh", "mtp=on", "tep")
    assert "agg-tep4-mtp3: results are there" in again.stdout and "0 jobs submitted" in again.stdout
    assert run("submit_agg.sh", "all", "pep").returncode == 2


def logs(results: Path) -> str:
    return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in sorted(results.rglob("*.log")))
