"""Two prefill and two decode replicas against one aggregated server, with the first layers of the real model.

OpenAI's client asks both, and the answers are equal. The CPU engine computes the same logits to the bit whatever else
is in a batch, so no comparison here is approximate.
"""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.disaggregated import servers, wait_empty
from tests.support.disaggregated_cases import Case, cases
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.timeout(180)
MODEL = "smollm2-135m-instruct"
EMBEDDED = (
    "--engine",
    "embedded",
    "--engine-process",
    "false",
    "--threads",
    "1",
    "--max-seq-len",
    "1024",
    "--max-num-tokens",
    "64",
    "--kv-cache-memory-mb",
    "13",
)
"""A cache of 46 blocks, and steps so small that most prompts take several."""
LAYERS = 2
CASES = cases()
STREAMS = 8


class Group:
    """Clients of the replicas, and the replicas themselves."""

    def __init__(self, whole: ServerProcess, prefill: list[ServerProcess], decode: list[ServerProcess]) -> None:
        self.whole, self.prefill, self.decode = whole, prefill, decode
        self.aggregated = client_of(whole)
        self.disaggregated = [client_of(server) for server in decode]
        self.threads = ThreadPoolExecutor(2 * STREAMS)
        """As many for one side as for the other."""

    def both(self, wanted: list[Case]) -> Iterator[tuple[Case, Any, Any]]:
        """What each side answers to each; all of them under way at once, the decode replicas in turn."""
        halves = (cycle([self.aggregated]), cycle(self.disaggregated))
        asked = [[self.threads.submit(ask, next(clients), case) for clients in halves] for case in wanted]
        for case, pair in zip(wanted, asked, strict=True):
            yield case, *(each.result() for each in pair)


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of SmolLM2 without most of its layers: it talks nonsense, which takes a fifth of the time."""
    folder = tmp_path_factory.mktemp("first") / MODEL
    folder.mkdir()
    for file in smollm2.iterdir():
        (folder / file.name).symlink_to(file)
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    config = json.loads((smollm2 / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    with safe_open(smollm2 / "model.safetensors", "pt") as weights:
        layers = {name: name.removeprefix("model.layers.").partition(".")[0] for name in weights.keys()}  # noqa: SIM118
        kept = [name for name, layer in layers.items() if not layer.isdecimal() or int(layer) < LAYERS]
        save_file({name: weights.get_tensor(name) for name in kept}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def group(model: Path) -> Iterator[Group]:
    """Everything is left idle, and nothing was computed where it should not have been."""
    common = (*EMBEDDED, "--model", str(model))
    prefilling = ("--disaggregation-mode", "prefill", *common)
    with ExitStack() as stack:
        whole, *prefill = stack.enter_context(servers(common, prefilling, prefilling))
        flags = (
            "--disaggregation-mode",
            "decode",
            "--prefill-urls",
            ",".join(peer.url for peer in prefill),
            "--prefill-min-tokens",
            "16",
            *common,
        )
        group = Group(whole, prefill, stack.enter_context(servers(flags, flags)))
        yield group
        group.threads.shutdown()
        wait_empty(whole, *prefill, *group.decode)


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, case: Case) -> dict[str, Any]:
    """Of each choice the text, the finish reason and the log-probabilities; and the usage."""
    create: Any = client.chat.completions.create if case.chat else client.completions.create
    prompt = {"messages": [{"role": "user", "content": case.prompt}]} if case.chat else {"prompt": case.prompt}
    if not case.stream:
        return folded([create(model=MODEL, **prompt, extra_body=case.fields).model_dump()])
    options = {"include_usage": True}
    return folded(
        [
            chunk.model_dump()
            for chunk in create(model=MODEL, **prompt, stream=True, stream_options=options, extra_body=case.fields)
        ]
    )


def folded(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """An answer, or the chunks of a stream, as one: texts and lists joined by choice."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said = found.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": {}})
        message = choice.get("message") or choice.get("delta") or choice
        said["text"] += message.get("content") or message.get("text") or ""
        said["finish_reason"] = choice["finish_reason"] or said["finish_reason"]
        for name, values in (choice.get("logprobs") or {}).items():
            said["logprobs"].setdefault(name, []).extend(values or [])
        said["prompt_logprobs"] = choice.get("prompt_logprobs") or said.get("prompt_logprobs")
    return {"choices": found, "usage": chunks[-1]["usage"], "prompt_logprobs": chunks[0].get("prompt_logprobs")}


def differences(left: Any, right: Any, where: str = "") -> Iterator[str]:
    """Where two answers differ; log-probabilities may by 1e-4."""
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        for name in left:
            yield from differences(left[name], right[name], f"{where}.{name}")
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, pair in enumerate(zip(left, right, strict=True)):
            yield from differences(*pair, f"{where}[{index}]")
    elif not (left == right or (isinstance(left, float) and isinstance(right, float) and abs(left - right) < 1e-4)):
        yield f"{where}: {left!r} is not {right!r}"


@pytest.mark.parametrize("kind", dict.fromkeys(case.kind for case in CASES))
def test_answers_are_those_of_an_aggregated_server(group: Group, kind: str) -> None:
    assert len(CASES) >= 200
    for case, aggregated, disaggregated in group.both([case for case in CASES if case.kind == kind]):
        if not case.cached:  # which prompt finds another's blocks is a matter of which was first, and where
            del aggregated["usage"]["prompt_tokens_details"], disaggregated["usage"]["prompt_tokens_details"]
        assert not list(differences(aggregated, disaggregated)), case
        assert all(choice["finish_reason"] for choice in aggregated["choices"].values()), "nothing has been compared"


def test_cached_tokens_of_one_client_are_those_of_an_aggregated_server(group: Group) -> None:
    """A decode replica asks the prefill replica that has the prefix.

    Requests come one after the other by one decode replica, which remembers where each prefix was computed.
    """
    counts = []
    for client in (group.aggregated, group.disaggregated[0]):
        counts.append([])
        for suffix in ("", " and more", " and something else", ""):
            for subject in ("Apples", "Pears"):
                prompt = (
                    f"{subject} are praised here at some length, since there is a lot to be said of them. " * 6 + suffix
                )
                answer = ask(client, Case("cached", False, prompt, {"temperature": 0, "max_tokens": 3}, False, True))
                counts[-1].append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert counts[0] == counts[1] and counts[0][:2] == [0, 0] and min(counts[0][2:]) >= 96


FIGURES = {
    "handed over": "trtllm_prefill_seconds_count",
    "read": "trtllm_kv_transfer_success_total",
    "computed here": "trtllm_prefill_local_total",
    "short": 'trtllm_prefill_local_total\\{.*reason="short"\\}',
}


def test_what_is_compared_is_handed_over(group: Group) -> None:
    """To both decode replicas, which compute short prompts alone: few others, where the machine is too busy.

    It needs no other test, since one that is repeated has new servers.
    """

    def figures(decode: ServerProcess) -> Counter[str]:
        return Counter({name: int(decode.metric(metric)) for name, metric in FIGURES.items()})

    before = [figures(decode) for decode in group.decode]
    asked = list(group.both([case for case in CASES if case.kind in ("stop", "short")]))
    for decode, old in zip(group.decode, before, strict=True):
        wait_empty(decode)  # by then the engine's statistics have arrived
        new = figures(decode)
        new.subtract(old)
        assert new["handed over"] >= len(asked) // 6 and new["read"] >= len(asked) // 8, new
        assert new["short"] >= len(asked) // 8 and new["computed here"] - new["short"] <= 2, new
    for prefill in group.prefill:
        assert prefill.metric("trtllm_iterations_total") > 0
