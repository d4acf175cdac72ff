"""`trellis convert`: change the kind or the sizes of a configuration."""

import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic_settings import SettingsError

from server.settings.flags import FlagParser
from server.sweep.conversion import read_values, resized, to_aggregated, to_disaggregated, write_values

_SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "ep": "moe_expert_parallel_size"}


def parser() -> FlagParser:
    found = FlagParser(
        prog="trellis convert",
        description="Change the kind or sizes of a values file of the Helm chart, and print it. Unknown keys stay.",
    )
    found.add_argument("file", type=Path, metavar="FILE", help="values of the chart")
    found.add_argument("--to", choices=["aggregated", "disaggregated"], help="one role, or prefill and decode")
    found.add_argument("--source", choices=["prefill", "decode"], default="decode", help="what becomes aggregated")
    found.add_argument("--prefill", type=int, default=1, metavar="INT", help="replicas of prefill (default: 1)")
    found.add_argument("--decode", type=int, default=1, metavar="INT", help="replicas of decode (default: 1)")
    found.add_argument("--role", metavar="ROLE", help="role of the sizes (default: all)")
    for name, argument in _SIZES.items():
        found.add_argument(f"--{name}", type=int, metavar="INT", help=argument)
    found.add_argument(
        "--set", type=_pair, action="append", default=[], metavar="NAME=VALUE", help="an argument of TensorRT-LLM"
    )
    return found


def main(arguments: Sequence[str]) -> int:
    """Run `trellis convert`. Raises SettingsError."""
    args = parser().parse(arguments)
    try:
        text = args.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{args.file} cannot be read: {error}") from error
    values = read_values(text, str(args.file))
    if args.to == "aggregated":
        values = to_aggregated(values, args.source)
    elif args.to == "disaggregated":
        values = to_disaggregated(values, args.prefill, args.decode)
    sizes = {argument: size for name, argument in _SIZES.items() if (size := getattr(args, name)) is not None}
    if sizes | dict(args.set):
        values = resized(values, args.role, sizes | dict(args.set))
    sys.stdout.write(write_values(values, text))
    return 0


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ArgumentTypeError("write NAME=VALUE, such as kv_cache_config.dtype=fp8")
    return name, yaml.safe_load(value)
