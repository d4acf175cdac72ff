"""The GPU benchmark, tried on a CPU: its model folders, its client, its worker, its judgement and its table."""

import asyncio
import json
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
import pytest

from benchmarks.gpu.cells import WORKLOADS
from benchmarks.gpu.load import Clients, token_ids
from benchmarks.gpu.model import FIRST_WORD, LLAMA_8B, SHAPES, write_folder, write_weights
from benchmarks.gpu.report import GpuReport
from benchmarks.gpu.trace import table
from benchmarks.gpu.worker import (
    Continuation,
    Job,
    Measure,
    Measured,
    Message,
    Started,
    Transcribe,
    Transcript,
    measure,
    run,
    work,
)
from benchmarks.report import Cell
from benchmarks.servers import ROOT, Spec, fake, serving
from engine.config import EmbeddedConfig
from engine.create import create_engine
from engine.embedded.models.checkpoint import read_config
from engine.types import GenerateRequest, Logprob
from multimodal.text.tokenizer import Tokenizer
from server.bench.summary import Summary

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "tiny"
    write_folder(folder, TINY)
    write_weights(folder, seed=0)
    return folder


def config(folder: Path) -> EmbeddedConfig:
    return EmbeddedConfig(
        model=str(folder), device="cpu", dtype="float32", threads=1, max_num_tokens=64, num_blocks=256
    )


def summary_of(tokens_per_second: float, **other: float) -> Summary:
    whole = Summary(2.0, 10, 0, "", 100.0, 0, 10, tokens_per_second, 10, 10.0, 100.0, 200.0, 3.0, 4.0)
    return replace(whole, **other)  # type: ignore[arg-type]


def test_a_folder_without_weights_has_the_shape_and_a_tokenizer_whose_words_are_text(tmp_path: Path) -> None:
    from transformers import AutoConfig  # noqa: PLC0415 - seconds that the other tests need not wait for

    write_folder(tmp_path / "m", LLAMA_8B)
    found = AutoConfig.from_pretrained(tmp_path / "m")
    assert (found.hidden_size, found.num_hidden_layers, found.intermediate_size, found.vocab_size) == (
        4096,
        32,
        14336,
        49152,
    )
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (32, 8, 128)
    assert (found.rope_parameters["rope_theta"], found.rope_parameters["rope_type"]) == (500000.0, "default")
    assert not list((tmp_path / "m").glob("*.safetensors"))
    tokenizer = Tokenizer.load(tmp_path / "m")
    assert tokenizer.vocab_size == LLAMA_8B.vocabulary
    ids = token_ids(200, LLAMA_8B.vocabulary, random.Random(0))
    assert len(set(ids)) > 190
    assert min(ids) >= FIRST_WORD
    assert all(len(tokenizer.decode([token])) == 5 for token in [*ids, FIRST_WORD, LLAMA_8B.vocabulary - 1])
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.model_type != "llama"])
def test_shapes_of_other_kinds_are_computed_by_compiled_code(name: str, tmp_path: Path) -> None:
    """`read_config` refuses others."""
    write_folder(tmp_path, shape := SHAPES[name])
    read = read_config(tmp_path)
    assert (read.biased, read.head_norms) == (shape.model_type == "qwen2", shape.model_type == "qwen3")


def test_clients_share_the_streams_and_merge_what_they_saw(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", TINY)
    spec = fake(2.0, engine_process=False)
    spec = Spec(spec.name, (*spec.argv, "--model", str(tmp_path / "m")), spec.health)
    with Clients(2, 500) as clients, serving(spec, log=tmp_path / "server.log") as server:
        target = replace(server.target, endpoint="completions")
        summary = clients.run(target, WORKLOADS["64"], Cell(5, 300, 16), "seed")
        looped = clients.run(target, WORKLOADS["64-mixed"], Cell(3, 300, 16), "seed", rounds=3)
        refused = clients.run(replace(target, model="no such model"), WORKLOADS["1"], Cell(1, 10, 4), "seed")
    assert (summary.errors, summary.first_error) == (0, "")
    assert (summary.requests, summary.completion_tokens, summary.prompt_tokens) == (5, 80, 300)
    assert (looped.errors, looped.first_error, looped.requests, looped.completion_tokens) == (0, "", 9, 144)
    assert 0.03 < summary.seconds < 20
    assert 0 < summary.ttft_p50 < summary.seconds * 1e3
    assert refused.errors == 1
    assert refused.first_error.startswith("HTTP 404")
    assert (tmp_path / "server.log").exists()


def test_prefill_counts_the_prompts_and_the_rest_counts_output() -> None:
    summary = summary_of(5.0, requests=12, errors=2)
    assert WORKLOADS["prefill"].rate(summary) == 100.0 * 10 / 2.0
    assert WORKLOADS["64"].rate(summary) == 5.0
    assert WORKLOADS["256"].warm_up() == Cell(256, 512, 24)
    assert WORKLOADS["prefill"].warm_up() == WORKLOADS["prefill"].cell


def test_rows_differ_from_greedy_requests_by_their_fields() -> None:
    rng = random.Random(0)
    assert WORKLOADS["64"].fields(rng, 256) == {}
    assert WORKLOADS["64-truncated"].fields(rng, 256) == {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
    seeds = {str(WORKLOADS["1-seed"].fields(rng, 256)) for _ in range(10)}
    mixed = {str(WORKLOADS["1-mixed"].fields(rng, 256)) for _ in range(10)}
    assert len(seeds) == len(mixed) == 10
    assert WORKLOADS["256-guided"].cell == WORKLOADS["256"].cell
    assert "prefill-seed" not in WORKLOADS


def test_the_table_sets_our_figures_beside_the_anchors(tmp_path: Path) -> None:
    report = GpuReport("test", {"seed": "1"}, anchored=True)
    report.http["64"] = [summary_of(8_000.0), summary_of(7_554.0), summary_of(1.0)]
    report.in_process["64"] = [summary_of(7_650.0)] * 3
    page = report.write(tmp_path)
    row = next(line for line in page.read_text().splitlines() if "64 x (512, 256)" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:4] == ["7,554", "-", "100 / 200"]
    assert cells[8:] == ["0.987", "9,000", "0.84", "6,867", "389 / -", "1.10", "7,900 missed"]
    assert json.loads(page.with_suffix(".json").read_text())["http"]["64"][0] == asdict(summary_of(8_000.0))
    report.http["64-seed"] = [summary_of(7_176.3)]
    report.http["256"] = [summary_of(14_600.0)]
    first = "p50 550 reached, p99 3,050 reached"
    assert targets(report) == ["7,900 missed", f"11,200 reached, {first}", "7,176 reached"]
    report.fp8 = True
    assert targets(report)[:2] == ["9,700 missed", f"14,500 reached, {first}"]
    report.anchored = False
    seeded = next(line for line in report.markdown().splitlines() if "64 x (512, 256) seed" in line)
    assert [cell.strip() for cell in seeded.strip("|").split("|")][1:3] == ["7,176", "0.950"]
    assert "vLLM tok/s" not in report.markdown()


def targets(report: GpuReport) -> list[str]:
    rows = [line for line in report.markdown().splitlines() if " x (512, 256)" in line]
    return [row.strip("|").split("|")[-1].strip() for row in rows]


def test_a_worker_measures_the_engine_without_http(tiny: Path, tmp_path: Path) -> None:
    cells = [(Cell(3, 70, 8), "a"), (Cell(1, 20, 1), "b")]
    started, first, second = work(Job(config(tiny), Measure(cells)), tmp_path / "log")
    assert isinstance(started, Started)
    assert (started.info.vocab_size, started.info.dtype) == (TINY.vocabulary, "float32")
    assert isinstance(first, Measured)
    assert isinstance(second, Measured)
    assert (first.summary.requests, first.summary.errors, first.summary.completion_tokens) == (3, 0, 24)
    assert (first.summary.prompt_tokens, first.summary.cached_tokens) == (70, 0)
    assert 0 < first.summary.ttft_p50 < first.summary.seconds * 1e3
    assert (second.summary.completion_tokens, second.summary.gap_p50) == (1, 0)


@pytest.mark.parametrize("row", ["guided", "strings", "mixed"])
async def test_requests_of_a_row_are_measured_without_http(row: str, tiny: Path) -> None:
    workload = WORKLOADS[f"1-{row}"]
    engine = create_engine(config(tiny))
    await engine.start()
    try:
        sent: list[GenerateRequest] = []
        generate = engine.generate
        with patch.object(engine, "generate", lambda request: (sent.append(request), generate(request))[1]):
            found = await measure(engine, Cell(2, 8, 4), "seed", workload)
    finally:
        await engine.close()
    assert (found.errors, found.completion_tokens) == (0, 8)
    fields = workload.fields(random.Random(), 4)
    assert all((request.sampling.guide is not None) == ("guided_json" in fields) for request in sent)
    first, second = (request.sampling for request in sent)
    assert (first == second) == (row != "mixed")


def test_a_trace_names_what_idle_time_lies_between() -> None:
    def event(name: str, start: float, end: float) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=span, device_type=SimpleNamespace(name="CUDA"))

    found = table([event("a", 0, 10), event("long", 5, 60), event("b", 90, 100)], top=2)
    assert "busy 70.0%" in found
    assert "30.0% idle between long and b" in found


def test_a_worker_that_fails_tells_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-folder"):
        list(work(Job(config(tmp_path / "no-such-folder"), Measure([])), tmp_path / "log"))


def test_the_engine_agrees_with_float32_and_a_wrong_one_is_found_out(tiny: Path, tmp_path: Path) -> None:
    import torch  # noqa: PLC0415 - seconds that the other tests need not wait for
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from benchmarks.gpu.check import agreements, passes  # noqa: PLC0415

    prompts = [token_ids(length, TINY.vocabulary, random.Random(length)) for length in (5, 33, 70, 150)]
    with (tmp_path / "messages").open("w+b") as file:
        asyncio.run(run(Job(config(tiny), Transcribe(prompts, 12, 20, [1, 4])), file))
        file.seek(0)
        messages = [msgspec.json.decode(line, type=Message) for line in file]
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    rounded = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).eval()
    assert [message.batch for message in messages[1:] if isinstance(message, Transcript)] == [1, 4]
    for message in messages[1:]:
        assert isinstance(message, Transcript)
        pairs = list(zip(prompts, message.continuations, strict=True))
        same, engine = agreements("x", reference, {"same": reference}, pairs)
        assert (same.mean_error, same.tokens) == (0, 1)
        assert passes(same, engine)
        assert (engine.tokens, engine.sequences, engine.worst_margin) == (1, 1, 0)
        near, _ = agreements("x", reference, {"rounded": rounded}, pairs)
        assert near.mean_error > 1e-3
        assert passes(near, engine)
        assert not passes(same, near)
        # One that forgets the last token of every prompt.
        _, wrong = agreements(
            "x", reference, {"rounded": rounded}, [(prompt[:-1], continuation) for prompt, continuation in pairs]
        )
        assert not passes(near, wrong)


def test_agreement_counts_tokens_and_sequences(tiny: Path) -> None:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from benchmarks.gpu.check import agreements  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    prompt = [300, 301, 302]
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    (best, second) = logprobs.topk(2).indices.tolist()
    entry = tuple(Logprob(token, logprobs[token].item() + 0.5, 1) for token in (best, best, second))
    right, wrong = (Continuation([token], [entry]) for token in (best, second))
    _, engine = agreements(
        "x", model, {"same": model}, [(prompt, right), (prompt, wrong), (prompt, right), (prompt, right)]
    )
    assert (engine.tokens, engine.sequences) == (0.75, 0.75)
    assert engine.max_error == pytest.approx(0.5, abs=1e-4)
    assert engine.worst_margin == pytest.approx((logprobs[best] - logprobs[second]).item(), abs=1e-5)


OPTIONS = [
    "--shape",
    "tiny",
    "--device",
    "cpu",
    "--attention",
    "auto",
    "--dtype",
    "float32",
    "--load-format",
    "auto",
    "--max-num-tokens=256",
    "--max-seq-len=2048",
    "--seed",
    "1",
    "--no-in-process",
]


def test_one_run_starts_the_server_loads_it_and_writes_the_table(tmp_path: Path) -> None:
    options = [
        *OPTIONS,
        "--starts",
        "1",
        "--cells",
        "1",
        "--repeats",
        "1",
        "--clients",
        "1",
        "--label",
        "test",
        "--commit",
        "abc",
    ]
    told = bench(*options, "--output", str(tmp_path), "--logs", str(tmp_path / "logs"))
    assert told.returncode == 0, told.stdout + told.stderr
    (path,) = tmp_path.glob("*-test.json")
    found = json.loads(path.read_text())
    assert found["machine"]["commit"] == "abc"
    assert "--max-num-tokens 256" in found["settings"]["server"]
    assert [run["completion_tokens"] for run in found["http"]["1"]] == [768]
    assert found["first"]["1"]["gap_max"] >= found["first"]["1"]["gap_p99"] > 0
    assert "first run after the start" in told.stdout and "tok/s, of greedy, longest gap in ms" in told.stdout
    assert found["starts"][0][1] >= found["starts"][0][0] > 0
    assert (tmp_path / "logs" / "server-1.log").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cells", "1,2"], "no such cells: 2"),
        (["--max-num-tokens"], "--max-num-tokens is neither an option of this program nor a setting with a value"),
        (["256"], "256 is neither"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], message: str) -> None:
    told = bench(*options)
    assert told.returncode == 2
    assert message in told.stderr


def bench(*options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_wheels_to_bring_along_are_pinned() -> None:
    script = (ROOT / "benchmarks/gpu/wheels.sh").read_text()
    packages = script.split('packages="')[1].split('"')[0].split()
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert len(packages) > 20
    assert set(packages) <= pinned
