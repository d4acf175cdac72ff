"""What differs between the versions of TensorRT-LLM that this adapter runs on: 1.2.1, and main from 1.3 on.

A `PackageVersion` is chosen at start by the package's own version. Nothing else in the adapter asks for it.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class PackageVersion:
    """Facts of a version. Their sources are in `tests/contract/trtllm_behaviours.json`."""

    name: str
    """Of the package, as it states it."""
    handoff_logprobs: bool = False
    """A generation worker takes the first token's log-probabilities from the handoff (#11727)."""
    request_ids: bool = False
    """A context request needs a `disagg_request_id`, by which its blocks are found."""
    zero_logprobs: bool = False
    """0 asks for the sampled token's log-probability alone; before, it asks for none."""

    @property
    def least_logprobs(self) -> int:
        """Least number to ask for, if log-probabilities are wanted."""
        return 0 if self.zero_logprobs else 1


def version_of(name: str) -> PackageVersion:
    """Return the facts of the package version `name`; a version that cannot be read counts as 1.2.1."""
    numbers = re.match(r"(\d+)\.(\d+)", name)
    newest = numbers is not None and (int(numbers[1]), int(numbers[2])) >= (1, 3)
    return PackageVersion(name, handoff_logprobs=newest, request_ids=newest, zero_logprobs=newest)
