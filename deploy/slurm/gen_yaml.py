"""Write TensorRT-LLM's arguments for the replicas of a SLURM job, and on which nodes each of them runs.

`agg` writes agg.yaml, `disagg` prefill.yaml and decode.yaml, with --eplb-slots also eplb.yaml. instances.tsv has a line
for each replica: role, host, port, nodes, tasks, tasks on each node, list of nodes, GPUs of its only node.

SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE say what the job has: one task for each GPU.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FIRST_PORT = 8100
STREAM_INTERVAL = 20
TRANSCEIVER_TOKENS = 4608
LARGEST_GRAPH = 2048
WIDE_TP = 16
"""Tensor parallel size from which experts are spread by WIDEEP, with attention data parallelism."""
MNNVL_TP = 8


class AllocationError(Exception):
    """The job's nodes and tasks are missing, contradict each other, or are too few."""


def expand(nodelist: str) -> list[str]:
    """Return the names in SLURM's notation: a,gpu[01-03,7] is a, gpu01, gpu02, gpu03, gpu7."""
    names: list[str] = []
    for part in re.findall(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*(?:,|$)", nodelist):
        names += _expanded(part.rstrip(","))
    return [name for name in names if name]


def _expanded(part: str) -> list[str]:
    found = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if found is None:
        return [part]
    before, ranges, after = found.groups()
    names = []
    for one in ranges.split(","):
        low, dash, high = one.partition("-")
        numbers = [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)] if dash else [one]
        names += [f"{before}{number}{rest}" for number in numbers for rest in _expanded(after)]
    return names


def tasks_of(text: str) -> list[int]:
    """Return SLURM_TASKS_PER_NODE as a list: 4(x2),1 is 4, 4, 1."""
    tasks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise AllocationError(f"SLURM_TASKS_PER_NODE is not understood: {text}")
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks


def allocation() -> list[tuple[str, int]]:
    """Return the job's nodes with the tasks of each. Raises AllocationError."""
    nodelist, tasks = os.environ.get("SLURM_JOB_NODELIST", ""), os.environ.get("SLURM_TASKS_PER_NODE", "")
    if not nodelist or not tasks:
        raise AllocationError("SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE are not set: run this inside a SLURM job")
    nodes, counts = expand(nodelist), tasks_of(tasks)
    if len(nodes) != len(counts):
        raise AllocationError(f"SLURM_JOB_NODELIST has {len(nodes)} nodes, SLURM_TASKS_PER_NODE {len(counts)}")
    return list(zip(nodes, counts, strict=True))


@dataclass(frozen=True)
class Instance:
    """One replica and its place."""

    role: str
    nodes: tuple[str, ...]
    tasks: int
    devices: range
    """GPUs on its node; empty for one of several nodes, which has all of them."""

    def line(self, port: int) -> str:
        each = self.tasks // len(self.nodes)
        devices = ",".join(map(str, self.devices)) or "all"
        return "\t".join(
            [
                self.role,
                self.nodes[0],
                str(port),
                str(len(self.nodes)),
                str(self.tasks),
                str(each),
                ",".join(self.nodes),
                devices,
            ]
        )


def placed(wanted: list[tuple[str, int]], nodes: list[tuple[str, int]]) -> Iterator[Instance]:
    """Yield a place for each role with its tasks: on the rest of a node, or on whole nodes. Raises AllocationError."""
    index, used = 0, 0
    for role, tasks in wanted:
        if index < len(nodes) and used and tasks > nodes[index][1] - used:
            index, used = index + 1, 0
        if index < len(nodes) and tasks <= nodes[index][1] - used:
            yield Instance(role, (nodes[index][0],), tasks, range(used, used + tasks))
            used += tasks
            if used == nodes[index][1]:
                index, used = index + 1, 0
            continue
        taken: list[str] = []
        missing = tasks
        while missing > 0 and index < len(nodes):
            taken.append(nodes[index][0])
            missing -= nodes[index][1]
            index += 1
        if missing:
            what = "more tasks" if missing > 0 else "nodes that it fills"
            raise AllocationError(
                f"{role} with {tasks} tasks needs {what}; the job has {sum(count for _, count in nodes)}"
            )
        yield Instance(role, tuple(taken), tasks, range(0))


def graph_sizes(batch: int) -> list[int]:
    """Return the batch sizes of CUDA graphs: powers of two up to the batch, and the batch."""
    powers = [1 << power for power in range(LARGEST_GRAPH.bit_length()) if 1 << power < min(batch, LARGEST_GRAPH + 1)]
    return [*powers, batch] if batch <= LARGEST_GRAPH else powers


def arguments(
    tp: int, *, attention_dp: bool, batch: int, tokens: int, length: int, memory: float, mtp: int,
    balancer: str = "", prefill: bool = False, transfers: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments of one replica. `transfers` is the longest prompt that is sent or received, 0 without."""
    moe: dict[str, Any] = {"backend": "TRTLLM" if not attention_dp else "WIDEEP" if tp >= WIDE_TP else "CUTLASS"}
    if balancer and moe["backend"] == "WIDEEP":
        moe["load_balancer"] = balancer
    found: dict[str, Any] = {
        "tensor_parallel_size": tp,
        "moe_expert_parallel_size": tp,
        "enable_attention_dp": attention_dp,
        "max_batch_size": batch,
        "max_num_tokens": tokens,
        "max_seq_len": length,
        "kv_cache_config": {"free_gpu_memory_fraction": memory, "enable_block_reuse": False, "dtype": "fp8"},
        "moe_config": moe,
        "stream_interval": STREAM_INTERVAL,
    }
    if prefill:
        found |= {"disable_overlap_scheduler": True, "cuda_graph_config": None}
    else:
        found["cuda_graph_config"] = {"enable_padding": True, "batch_sizes": graph_sizes(batch)}
    if tp == MNNVL_TP and not attention_dp:
        found["allreduce_strategy"] = "MNNVL"
    if transfers:
        buffer = max(TRANSCEIVER_TOKENS, transfers)
        found["cache_transceiver_config"] = {"backend": "DEFAULT", "max_tokens_in_buffer": buffer}
    if mtp:
        found["speculative_config"] = {"decoding_type": "MTP", "num_nextn_predict_layers": mtp}
    return found


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("kind", choices=["agg", "disagg"])
    found.add_argument("--output", type=Path, required=True)
    found.add_argument("--isl", type=int, required=True, help="tokens of prompts")
    found.add_argument("--osl", type=int, required=True, help="tokens of answers")
    found.add_argument("--mtp", type=int, default=0, help="tokens that the model predicts ahead; 0 is off")
    found.add_argument("--eplb-slots", type=int, default=0, help="places of experts; 0 balances none")
    for role in ("", "prefill-", "decode-"):
        found.add_argument(f"--{role}replicas", type=int, default=1)
        found.add_argument(f"--{role}tp", type=int, default=1)
        found.add_argument(f"--{role}batch", type=int, default=32)
        found.add_argument(f"--{role}tokens", type=int, default=8192, help="max_num_tokens")
        found.add_argument(f"--{role}memory", type=float, default=0.8, help="free_gpu_memory_fraction")
        found.add_argument(f"--{role}attention-dp", action="store_true")
    return found


def main(argv: list[str] | None = None) -> int:
    options = vars(parser().parse_args(argv))
    folder: Path = options["output"]
    roles = ("agg",) if options["kind"] == "agg" else ("prefill", "decode")
    wanted: list[tuple[str, int]] = []
    files: dict[str, dict[str, Any]] = {}
    balancer = folder.resolve() / "eplb.yaml"
    if options["eplb_slots"]:
        files[balancer.name] = {"num_slots": options["eplb_slots"], "layer_updates_per_iter": 1}
    for role in roles:
        prefix = "" if role == "agg" else f"{role}_"
        own = {name: options[prefix + name] for name in ("tp", "batch", "tokens", "memory", "attention_dp")}
        wanted += [(role, own["tp"])] * options[f"{prefix}replicas"]
        files[f"{role}.yaml"] = arguments(
            **own,
            length=options["isl"] + options["osl"] + 64,  # a chat template's tokens
            mtp=options["mtp"],
            balancer=str(balancer) if options["eplb_slots"] else "",
            prefill=role == "prefill",
            transfers=0 if role == "agg" else options["isl"] + 64,
        )
    try:
        instances = list(placed(wanted, allocation()))
    except AllocationError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    first = int(os.environ.get("FIRST_PORT", FIRST_PORT))
    lines = [instance.line(first + index) for index, instance in enumerate(instances)]
    (folder / "instances.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
