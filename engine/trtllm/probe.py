"""Checks of what only the real package on a GPU can settle, each in bounded time, and their report.

`trellis doctor MODEL --engine trtllm --probe` runs them. Every group of checks is a process of its
own, `python -m engine.trtllm.probe GROUP MODEL`, which may hang or die: the others still run, and its process tree is
killed. A line of JSON on its standard output says which check begins, or how one ended.
"""

import asyncio
import contextlib
import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from engine.process import tree
from engine.process.command import module_command
from engine.trtllm.disaggregation import context_keywords
from engine.trtllm.library import installed
from engine.trtllm.watching import WORKER

SECONDS = 15 * 60.0
"""Most time of all groups together."""
GRACE_SECONDS = 10.0
_KILL_SECONDS = 10.0
"""Seconds after which an answer that should come at once counts as missing."""
POLL_SECONDS = 1.0
PROMPT = tuple(range(100, 164))
_MEMORY = {"free_gpu_memory_fraction": 0.25}
_EVENTS = {"event_buffer_max_size": 1000, "enable_block_reuse": True}
_TRANSCEIVER = {"cache_transceiver_config": {"backend": "DEFAULT"}}
REPORT = "trellis-probe"
"""Name of the report's files."""

Verdict = Literal["confirmed", "refuted", "not run"]
Note = Callable[[str, Verdict | bool, str], None]
"""Reports a check: its id, the verdict, the evidence."""


@dataclass(frozen=True)
class Outcome:
    """The result of checking one fact of the contract on this machine."""

    id: str
    fact: str
    verdict: Verdict
    evidence: str


FACTS: dict[str, str] = {
    "A1": "After a handoff, a request with log-probabilities raises AssertionError, and the executor goes on",
    "A2": "A poll of statistics blocks the thread that polls until its timeout",
    "A3.penalties": "The default sampler ignores penalties",
    "A3.bad_words": "The default sampler ignores bad_token_ids",
    "A3.seed": "The default sampler ignores seeds",
    "A4": "An error of the GPU in a step is a RequestError, and the executor calls itself healthy",
    "A5": "A worker that was killed leaves requests without an answer, and the executor calls itself healthy",
    "A6.own": "Prompt log-probabilities lack tokens of the prompt that are not among the most likely",
    "A6.cached": "Prompt log-probabilities cover only the part of a prompt that was not in the cache",
    "A7": "With the overlap scheduler, logits processors see a sequence one token short",
    "A8": "min_tokens counts the tokens of the prompt",
    "A9": "A context-only request to an engine without a transceiver ends the worker",
    "A10": "Handles of mRoPE positions are of memory on this machine",
    "A11": "All images of a request share one handle",
    "A12": "UCX_CUDA_IPC_CACHE=n makes KV transfers slower",
    "A13": "The workers end with a process that leaves by os._exit",
    "A14": "The guided backend xgrammar works with this model",
    "A15": "An abort of a request that waits in the queue gets no answer",
    "A16": "With return_perf_metrics every response has the request's metrics",
    "A17": "AutoDeploy's own class loads this model and generates",
    "A18": "The created event's window is the most that a sequence may hold",
}


# Checks, which run in processes of their own.


def _load(model: str, **arguments: Any) -> Any:
    from tensorrt_llm import LLM  # noqa: PLC0415 - takes seconds, and exists on GPU machines only

    cache = _MEMORY | arguments.pop("kv_cache_config", {})
    return LLM(model=model, kv_cache_config=cache, max_seq_len=2048, trust_remote_code=True, **arguments)


def _sampling(**fields: Any) -> Any:
    from tensorrt_llm import SamplingParams  # noqa: PLC0415

    return SamplingParams(**{"end_id": -1, "ignore_eos": True, "detokenize": False, "max_tokens": 16, **fields})


async def _generated(llm: Any, prompt: Sequence[int] = PROMPT, **fields: Any) -> Any:
    """Return the only output of a request."""
    result = llm.generate_async(inputs=list(prompt), sampling_params=_sampling(**fields))
    await result
    return result.outputs[0]


async def _ends(work: Awaitable[Any], seconds: float = 0.0) -> str:
    """Return how something ends that may hang: `answered`, `no answer in 10 s`, or the error."""
    seconds = seconds or GRACE_SECONDS
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return f"no answer in {seconds:g} s"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "answered"


def _text(file: Path) -> str:
    """Return what is in a file; nothing if there is none."""
    return file.read_text(encoding="utf-8") if file.is_file() else ""


async def _part(name: str, model: str, **variables: str) -> "subprocess.CompletedProcess[bytes]":
    """Run a part of a group in a process of its own."""
    settings = [f"{variable}={value}" for variable, value in variables.items()]
    command = ["env", *settings, *module_command("engine.trtllm.probe", name, model)]
    return await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, check=False)


class _Lengths:
    """A logits processor that writes how long the sequence is each time it is called."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __call__(self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: Any, client_id: Any) -> None:
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(f"{len(token_ids[0])}\n")


class _Breaks:
    """A logits processor that asks the GPU for an element that there is not: a device-side assertion."""

    def __call__(self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: Any, client_id: Any) -> None:
        import torch  # noqa: PLC0415

        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")[torch.tensor([1 << 20], device="cuda")].sum().item()


async def requests(model: str, note: Note, begin: Callable[[str], None]) -> None:
    """Single requests to an engine with the default sampler, one at a time."""
    llm = _load(
        model,
        max_batch_size=1,
        enable_iter_perf_stats=True,
        return_perf_metrics=True,
        guided_decoding_backend="xgrammar",
        kv_cache_config=_EVENTS,
    )
    await _generated(llm, max_tokens=1)
    begin("A18")
    events = await asyncio.to_thread(llm.get_kv_cache_events, timeout=2)
    windows = [event["window_size"] for event in events if event["data"]["type"] == "created"]
    await _check_window(llm, windows, note)
    begin("A2")
    while await asyncio.to_thread(llm.get_stats, timeout=POLL_SECONDS / 2):
        pass
    started = time.monotonic()
    llm.get_stats_async(timeout=POLL_SECONDS)
    blocked = time.monotonic() - started
    said = f"get_stats_async(timeout={POLL_SECONDS:g}) of an idle engine took {blocked:.3f} s"
    note("A2", blocked >= POLL_SECONDS / 2, said)
    begin("A16")
    result = llm.generate_async(inputs=list(PROMPT), sampling_params=_sampling(), streaming=True)
    measured = [step.outputs[0].request_perf_metrics is not None async for step in result]
    note("A16", all(measured), f"{sum(measured)} of {len(measured)} responses had metrics")
    plain = (await _generated(llm)).token_ids
    begin("A3.penalties")
    punished = (await _generated(llm, repetition_penalty=50.0, frequency_penalty=2.0, presence_penalty=2.0)).token_ids
    repeats = len({*plain, *PROMPT}) < len(plain) + len(set(PROMPT))
    said = f"greedy {plain}, with penalties {punished}"
    note("A3.penalties", plain == punished if repeats else "not run", said if repeats else f"nothing repeats: {said}")
    begin("A3.bad_words")
    without = (await _generated(llm, bad_token_ids=[plain[0]])).token_ids
    note("A3.bad_words", without[0] == plain[0], f"greedy begins with {plain[0]}, with it forbidden: {without[0]}")
    begin("A3.seed")
    drawn = [(await _generated(llm, temperature=5.0, top_k=0, seed=7)).token_ids for _ in range(3)]
    note("A3.seed", len(set(map(tuple, drawn))) > 1, f"three draws with one seed: {drawn}")
    begin("A8")
    short = (await _generated(llm, end_id=plain[1], ignore_eos=False, max_tokens=8, min_tokens=8)).token_ids
    note("A8", len(short) < 8, f"min_tokens=8 gave {len(short)} tokens; the end of sequence is the second greedy one")
    begin("A7")
    await _check_lengths(llm, note)
    begin("A6.own")
    fresh = tuple(reversed(PROMPT))
    first, again = [(await _generated(llm, fresh, max_tokens=1, prompt_logprobs=1)).prompt_logprobs for _ in range(2)]
    own = sum(token in entry for entry, token in zip(first, fresh[1:], strict=False))
    wanted = len(fresh) - 1
    note("A6.own", own < wanted, f"{own} of {wanted} tokens of the prompt are in their entries")
    note("A6.cached", len(again) < len(first), f"{len(first)} entries at first, {len(again)} once the prompt is cached")
    begin("A14")
    from tensorrt_llm.llmapi import GuidedDecodingParams  # noqa: PLC0415

    guide = GuidedDecodingParams(json_object=True)
    ended = await _ends(_generated(llm, guided_decoding=guide))
    note("A14", ended == "answered", f"a request for a JSON object: {ended}")
    begin("A15")
    busy = llm.generate_async(inputs=list(PROMPT), sampling_params=_sampling(max_tokens=1500), streaming=True)
    await anext(busy)
    waiting = llm.generate_async(inputs=list(PROMPT), sampling_params=_sampling())
    waiting.abort()
    ended = await _ends(waiting)
    busy.abort()
    note("A15", ended.startswith("no answer"), f"an aborted request behind another: {ended}")


async def _check_window(llm: Any, windows: Sequence[int], note: Note) -> None:
    if not windows:
        note("A18", "not run", "there was no created event")
        return
    longest = max(windows)
    over = await _ends(_generated(llm, [PROMPT[0]] * (longest + 1), max_tokens=1))
    under = await _ends(_generated(llm, [PROMPT[0]] * (longest - 8), max_tokens=1))
    said = f"windows {windows}; a prompt of {longest + 1} tokens: {over[:200]}; of {longest - 8}: {under[:200]}"
    note("A18", over != "answered" and under == "answered", said)


async def _check_lengths(llm: Any, note: Note) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "lengths")
        await _generated(llm, max_tokens=4, logits_processor=_Lengths(str(file)))
        lengths = [int(line) for line in _text(file).split()]
    right = [len(PROMPT) + place for place in range(len(lengths))]
    if len(lengths) < 2:
        note("A7", "not run", f"the processor was called {len(lengths)} times")
    else:
        note("A7", lengths[1:] != right[1:], f"{len(PROMPT)} prompt tokens, then lengths {lengths}")


async def roles(model: str, note: Note, begin: Callable[[str], None]) -> None:
    """A request of a role that the engine was not started for."""
    from tensorrt_llm.llmapi import DisaggregatedParams  # noqa: PLC0415

    llm = _load(model)
    await _generated(llm, max_tokens=1)
    begin("A9")
    params = DisaggregatedParams(request_type="context_only")
    result = llm.generate_async(inputs=list(PROMPT), sampling_params=_sampling(), disaggregated_params=params)
    wrong = await _ends(result)
    after = await _ends(_generated(llm, max_tokens=1))
    note("A9", after != "answered", f"the request: {wrong[:200]}; a plain request afterwards: {after[:200]}")


async def device(model: str, note: Note, begin: Callable[[str], None]) -> None:
    """An error of the GPU."""
    from tensorrt_llm.llmapi import RequestError  # noqa: PLC0415

    llm = _load(model)
    begin("A4")
    kind = "answered"
    try:
        async with asyncio.timeout(GRACE_SECONDS):
            await _generated(llm, logits_processor=_Breaks())
    except Exception as error:
        kind = f"{type(error).__name__}: {error}"
        is_request_error = isinstance(error, RequestError)
    if kind == "answered":
        note("A4", "not run", "the GPU could not be made to fail")
        return
    await asyncio.sleep(POLL_SECONDS)  # main notices a moment after it has answered
    healthy = llm._check_health()
    note("A4", is_request_error and healthy, f"{kind[:300]}; _check_health() says {healthy}")


async def killed(model: str, note: Note, begin: Callable[[str], None]) -> None:
    """A worker that is killed."""
    llm = _load(model)
    await _generated(llm, max_tokens=1)
    begin("A5")
    found = workers()
    if not found:
        note("A5", "not run", f"the engine has no process that runs {WORKER}")
        return
    for worker in found:
        os.kill(worker.pid, signal.SIGKILL)
    await asyncio.sleep(POLL_SECONDS)
    ended = await _ends(_generated(llm, max_tokens=1))
    healthy = llm._check_health()
    said = f"{len(found)} worker(s) killed; a request: {ended[:200]}; _check_health() says {healthy}"
    note("A5", ended.startswith("no answer") and healthy, said)


async def orphans(model: str, note: Note, begin: Callable[[str], None]) -> None:
    """Workers whose parent ignores SIGINT, as the server's engine process does, and then leaves at once."""
    begin("A13")
    done = await _part("leave", model)
    found = [tree.RunningProcess(*worker) for worker in json.loads(done.stdout.splitlines()[-1])] if done.stdout else []
    if not found:
        note("A13", "not run", f"the engine has no process that runs {WORKER}")
        return
    await asyncio.sleep(GRACE_SECONDS)
    left = [worker for worker in found if tree.runs(worker)]
    for worker in left:
        os.kill(worker.pid, signal.SIGKILL)
    said = f"{len(left)} of {len(found)} worker(s) still ran {GRACE_SECONDS:g} s after their parent had left"
    note("A13", not left, said)


async def leave(model: str, note: Note, begin: Callable[[str], None]) -> None:
    """Load, print the pids of the workers, and leave without a shutdown. It is a part of `orphans`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    llm = _load(model)
    await _generated(llm, max_tokens=1)
    sys.stdout.write(json.dumps(workers()) + "\n")
    sys.stdout.flush()
    os._exit(1)


async def handoff(model: str, note: Note, begin: Callable[[str], None]) -> None:
    """Prefill in one engine and decode in another."""
    context, llm = _pair(model)
    begin("A1")
    result = await _handed_over(context, llm, logprobs=1)
    ended = await _ends(result)
    after = await _ends(_generated(llm, max_tokens=1))
    said = f"the request: {ended[:200]}; a plain request afterwards: {after[:200]}"
    note("A1", ended.startswith("AssertionError") and after == "answered", said)


async def transfers(model: str, note: Note, begin: Callable[[str], None]) -> None:
    """KV transfers with and without UCX's cache of IPC handles."""
    begin("A12")
    if not gpus():
        note("A12", "not run", "there is no GPU")
        return
    seconds = {}
    for value in ("y", "n"):
        done = await _part("transfer", model, UCX_CUDA_IPC_CACHE=value)
        if done.returncode:
            note("A12", "not run", f"transfers with UCX_CUDA_IPC_CACHE={value} ended with status {done.returncode}")
            return
        seconds[value] = json.loads(done.stdout.splitlines()[-1])
    said = f"median of a transfer: {seconds['y'] * 1e3:.2f} ms with the cache, {seconds['n'] * 1e3:.2f} ms without"
    note("A12", seconds["n"] > 1.5 * seconds["y"], said)


async def transfer(model: str, note: Note, begin: Callable[[str], None]) -> None:
    """Print the median seconds of a transfer. It is a part of `transfers`."""
    context, llm = _pair(model)
    times = []
    for place in range(9):
        started = time.monotonic()
        await (await _handed_over(context, llm, prompt=[100 + place, *PROMPT * 8], max_tokens=2))
        times.append(time.monotonic() - started)
    sys.stdout.write(f"{sorted(times)[len(times) // 2]}\n")


def _pair(model: str) -> tuple[Any, Any]:
    return _load(model, disable_overlap_scheduler=True, **_TRANSCEIVER), _load(model, **_TRANSCEIVER)


async def _handed_over(context: Any, llm: Any, prompt: Sequence[int] = PROMPT, **fields: Any) -> Any:
    """Return the result of a request that goes on from another engine's handoff."""
    from tensorrt_llm.llmapi import DisaggregatedParams  # noqa: PLC0415

    asked = DisaggregatedParams(**context_keywords(None, installed()))
    result = context.generate_async(
        inputs=list(prompt), sampling_params=_sampling(**fields), disaggregated_params=asked
    )
    await result
    params = result.outputs[0].disaggregated_params
    params.request_type = "generation_only"
    return llm.generate_async(inputs=list(prompt), sampling_params=_sampling(**fields), disaggregated_params=params)


async def autodeploy(model: str, note: Note, begin: Callable[[str], None]) -> None:
    """AutoDeploy."""
    from tensorrt_llm._torch.auto_deploy import LLM as AutoDeployLLM  # noqa: N811, PLC0415

    begin("A17")
    llm = AutoDeployLLM(model=model, max_seq_len=2048)
    ended = await _ends(_generated(llm, max_tokens=4), 60.0)
    note("A17", ended == "answered", f"a request of four tokens: {ended[:300]}")


async def images(model: str, note: Note, begin: Callable[[str], None]) -> None:
    """Two images of one prompt, encoded apart from the model."""
    known = json.loads(_text(Path(model, "config.json")) or "{}")
    token = known.get("image_token", "<image>")
    if "vision_config" not in known:
        for check in ("A10", "A11"):
            note(check, "not run", "the model has no vision_config, or is not a folder: name a vision-language model")
        return
    from PIL import Image  # noqa: PLC0415
    from tensorrt_llm.llmapi import MultimodalEncoder  # noqa: PLC0415

    begin("A11")
    encoder = MultimodalEncoder(model=model, max_batch_size=1)
    pictures = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    result = encoder.generate_async(
        inputs={"prompt": f"{token} {token} what?", "multi_modal_data": {"image": pictures}}
    )
    await result
    params = result.disaggregated_params
    handles = params.multimodal_embedding_handles
    note("A11", len(handles) == 1, f"two images gave {len(handles)} handle(s)")
    positions = params.mrope_position_ids_handle
    said = (
        "the encoder gave no handle of positions" if positions is None else f"keys of the handle: {sorted(positions)}"
    )
    note("A10", "not run" if positions is None else "method_key" in positions, said)


@dataclass(frozen=True)
class CheckGroup:
    """Checks that share a process, and so a loaded model."""

    run: Callable[[str, Note, Callable[[str], None]], Coroutine[Any, Any, None]]
    checks: tuple[str, ...] = ()
    """Empty for a part of another group."""
    seconds: float = 150.0


GROUPS: dict[str, CheckGroup] = {
    "requests": CheckGroup(
        requests,
        (
            *("A2", "A3.penalties", "A3.bad_words", "A3.seed", "A6.own", "A6.cached"),
            *("A7", "A8", "A14", "A15", "A16", "A18"),
        ),
        210.0,
    ),
    "roles": CheckGroup(roles, ("A9",)),
    "handoff": CheckGroup(handoff, ("A1",)),
    "device": CheckGroup(device, ("A4",)),
    "killed": CheckGroup(killed, ("A5",)),
    "orphans": CheckGroup(orphans, ("A13",)),
    "images": CheckGroup(images, ("A10", "A11")),
    "autodeploy": CheckGroup(autodeploy, ("A17",), 240.0),
    "transfers": CheckGroup(transfers, ("A12",), 240.0),
    "leave": CheckGroup(leave),
    "transfer": CheckGroup(transfer),
}


def main(arguments: Sequence[str]) -> int:
    """Run one group, in its process. Its end is that of the process: no LLM is shut down, which may hang."""
    name, model = arguments

    def write(**fields: str) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    def note(check: str, verdict: Verdict | bool, evidence: str) -> None:
        said = verdict if isinstance(verdict, str) else "confirmed" if verdict else "refuted"
        write(check=check, verdict=said, evidence=evidence)

    asyncio.run(GROUPS[name].run(model, note, lambda check: write(begun=check)))
    sys.stdout.flush()
    os._exit(0)


# The parent.


def run(model: str, folder: Path, seconds: float = SECONDS, names: Sequence[str] = ()) -> int:
    """Run all groups, or those of these `names`, and write the report into `folder`. Return 1 if a fact was refuted."""
    outcomes = list(outcomes_of(model, seconds, names))
    facts = machine()
    report = {"model": model, **facts, "outcomes": [asdict(outcome) for outcome in outcomes]}
    (folder / f"{REPORT}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / f"{REPORT}.md").write_text(markdown(model, facts, outcomes), encoding="utf-8")
    return int(any(outcome.verdict == "refuted" for outcome in outcomes))


def outcomes_of(model: str, seconds: float, names: Sequence[str] = ()) -> Iterator[Outcome]:
    """Run groups one after the other, and yield what comes of their checks."""
    deadline = time.monotonic() + seconds
    for name, group in GROUPS.items():
        if group.checks and (not names or name in names):
            limit = min(group.seconds, deadline - time.monotonic())
            lines, end = _ran(name, model, limit) if limit > 0 else ([], "there was no time left")
            yield from _read(group, lines, end)


def _ran(name: str, model: str, limit: float) -> tuple[list[str], str]:
    """Return the lines of a group's process, and how it ended. Nothing that it started is left."""
    command, mark = module_command("engine.trtllm.probe", name, model), secrets.token_hex(8)
    marked = tree.environment(mark)
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=printed, stderr=errors, start_new_session=True, env=marked)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit)
        status = process.poll()
        tree.kill(mark, _KILL_SECONDS)
        process.wait()
        printed.seek(0)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
        lines = printed.read().decode(errors="replace").splitlines()
    if status is None:
        return lines, f"it was stopped after {limit:.0f} s"
    return lines, f"its process ended with status {status}" + (f": {said[-1]}" if said and status else "")


def _read(group: CheckGroup, lines: Sequence[str], end: str) -> Iterator[Outcome]:
    """Yield an outcome for each check of a group."""
    found: dict[str, dict[str, str]] = {}
    begun = ""
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            said = json.loads(line)
            begun = said.get("begun", begun)
            if "check" in said:
                found[said["check"]] = said
    for check in group.checks:
        said = found.get(check)
        if said is None:
            during = f", while {begun} was checked" if begun else ", before the first check"
            yield Outcome(check, FACTS[check], "not run", end + during)
        else:
            yield Outcome(check, FACTS[check], said["verdict"], said["evidence"])  # type: ignore[arg-type]


def workers() -> list[tree.RunningProcess]:
    """Return the MPI workers of this process's engine."""
    return [process for process in tree.descendants(os.getpid()) if WORKER in tree.command(process)]


def gpus() -> list[str]:
    """Return a line for each GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []


def machine() -> dict[str, Any]:
    """Return versions and GPUs."""
    versions = {"python": platform.python_version()}
    for package in ("tensorrt_llm", "torch", "transformers", "xgrammar", "mpi4py"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    entry = Path("/opt/nvidia/nvidia_entrypoint.sh")
    return {
        "gpus": gpus(),
        "versions": versions,
        "cuda": os.environ.get("CUDA_VERSION", ""),
        "nvidia_entrypoint": entry.exists(),
        "forward_compatibility": "/compat" in os.environ.get("LD_LIBRARY_PATH", ""),
    }


def markdown(model: str, facts: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Return the report for people."""
    lines = ["# TensorRT-LLM as this machine has it", "", f"- model: {model}"]
    lines += [f"- {name}: {value}" for name, value in facts["versions"].items()]
    lines += [f"- GPU: {gpu}" for gpu in facts["gpus"]] or ["- GPU: none"]
    lines += [f"- CUDA: {facts['cuda'] or 'unknown'}"]
    lines += [f"- NVIDIA's entry point: {'there' if facts['nvidia_entrypoint'] else 'not there'}"]
    lines += [f"- CUDA's forward compatibility: {'on' if facts['forward_compatibility'] else 'off'}"]
    lines += ["", "| | fact | verdict | evidence |", "|---|---|---|---|"]
    for outcome in outcomes:
        evidence = " ".join(outcome.evidence.replace("|", "\\|").split())
        lines.append(f"| {outcome.id} | {outcome.fact} | {outcome.verdict} | {evidence} |")
    return "\n".join(lines) + "\n"


def _entry() -> int:
    """Run `main` of the module by its name, by which workers unpickle the processors above."""
    from engine.trtllm import probe  # noqa: PLC0415 - this one is called __main__

    return probe.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_entry())
