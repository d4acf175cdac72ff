"""Registers and inner loops of the attention kernels, compiled for an H200 on a machine that needs no GPU:
`python -m benchmarks.gpu.instructions`; needs triton.

A kernel is bound by instructions if those of a tile, in all its warps, fill the slots that four schedulers of a
multiprocessor have while its share of the memory's bandwidth brings the tile: about 6,900 for 64 tokens of a head in
bfloat16, and 3,450 in eight bits. Registers bound how many programs run at a time.
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.embedded.models.cuda import decode_attention, group_attention

_HOPPER = GPUTarget("cuda", 90, 32)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_SHAPE: dict[str, object] = {"KV_HEADS": 8, "GROUP": 4, "DIM": 128, "BLOCK": 32, "STAGES": 3}
"""Llama 3.1 8B, and the number of tiles under way."""
_TYPES = {
    **dict.fromkeys(("query", "out"), "*bf16"),
    **dict.fromkeys(("partial", "state", "sums"), "*fp32"),
    **dict.fromkeys(("tables", "positions", "slots", "members", "work", "count", "shared", "counters"), "*i32"),
    **dict.fromkeys(("width", "block_stride", "few", "splits", "most"), "i32"),
    "scale": "fp32",
}
_ALIGNED = {"query", "keys", "values", "tables", "out", "partial", "state", "sums", "counters", "block_stride"}


def compiled(kernel: Any, fp8: bool, warps: int, **constants: object) -> Any:
    """Compile one of the kernels, as a graph would have it."""
    types = _TYPES | dict.fromkeys(("keys", "values"), "*fp8e4nv" if fp8 else "*bf16")
    constants = _SHAPE | {"FP8": fp8} | constants
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        constants,
        {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in _ALIGNED},
    )
    return triton.compile(source, target=_HOPPER, options={"num_warps": warps, "launch_pdl": True})


def report(label: str, kernel: Any) -> None:
    """Print what a compiled kernel takes, and the instructions of each innermost loop with tensor cores in it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        listing = _run("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    print(f"{label}: {registers[1] if registers else '?'} registers, {kernel.metadata.shared} bytes of shared memory")
    for loop in _loops(listing):
        most = ", ".join(f"{name} {count}" for name, count in Counter(loop).most_common(8))
        print(f"    {len(loop)} instructions: {most}")


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def _loops(listing: str) -> list[list[str]]:
    """Return the names of the instructions of each loop with tensor cores, from a listing by nvdisasm."""
    names: list[str] = []
    targets: dict[str, int] = {}
    found = []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            targets[label[1]] = len(names)
        elif instruction := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*?);", line):
            names.append(instruction[1])
            back = re.search(r"`\((\.L_x_\d+)\)", instruction[2]) if instruction[1].startswith("BRA") else None
            if back and back[1] in targets:
                body = names[targets[back[1]] :]
                found += [body] if any("MMA" in name for name in body) else []
    return found


def main() -> None:
    alone: dict[str, object] = {"PAD": 16, "SPLIT": False, "LONG_TILES": 16, "CASCADE": False, "COUNTED": False}
    for fp8, tile, warps in ((False, 32, 2), (False, 64, 4), (False, 64, 8), (True, 64, 2), (True, 128, 4)):
        kernel = compiled(decode_attention._attend, fp8, warps, TILE=tile, **alone)
        report(f"decodes, {'fp8' if fp8 else 'bf16'}, tiles of {tile}, {warps} warps", kernel)
    for fp8 in (False, True):
        tile = group_attention.TILE
        kernel = compiled(group_attention._attend_groups, fp8, 4, TILE=tile, PAD=64, PREFIX=False)
        report(f"groups, {'fp8' if fp8 else 'bf16'}, tiles of {tile}, 4 warps", kernel)


if __name__ == "__main__":
    main()
