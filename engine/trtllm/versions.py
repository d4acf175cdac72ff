"""Differences between the versions of TensorRT-LLM that this adapter runs on: 1.2.1, and main from 1.3 on.

A `PackageVersion` is chosen at start by the package's own version. Nothing else in the adapter asks for it.
"""

import re
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class PackageVersion:
    """Facts of a version. Their sources are in `tests/contract/trtllm_behaviours.json`."""

    name: str
    """Name of the version, as the package states it."""
    handoff_logprobs: bool = False
    """A generation worker takes the first token's log-probabilities from the handoff (#11727)."""
    max_encoded_images: int = 1
    """Images of a prompt that can be encoded elsewhere; 0 is any number. 1.2.1 makes one handle for all of them, and
    takes one for each."""
    prompt_logprobs: bool = False
    """Log-probabilities of a prompt have its own tokens, not the most likely ones alone (#11235)."""
    request_ids: bool = False
    """A context request needs a `disagg_request_id`, by which its blocks are found."""
    overlapped_context: bool = False
    """Context requests run under the overlap scheduler, too."""
    zero_logprobs: bool = False
    """0 asks for the sampled token's log-probability alone; before, it asks for none."""
    draft_target: str = "DraftTarget"
    """`decoding_type` of a draft model, as a key."""
    samples_more: bool = False
    """The TorchSampler honours penalties (#16485), seeds (#17172) and min_p (#16590): `engine/trtllm/support.py`."""

    @property
    def least_logprobs(self) -> int:
        """Least number to ask for, if log-probabilities are wanted."""
        return 0 if self.zero_logprobs else 1


def found() -> str | None:
    """Return the version of the installed package without importing it; None if it is not installed."""
    try:
        return metadata.version("tensorrt_llm")
    except metadata.PackageNotFoundError:
        return None


def lacks_visual() -> str:
    """Return why the installed package makes no pictures; empty if it does. `VisualGen` is exported from 1.3.0rc8 on
    (#11911), and has the arguments that this adapter gives it from the release after #14175 on.
    """
    name = found()
    if name is None:
        return "the package tensorrt_llm is not installed. Cure: run in NVIDIA's container, or ENGINE=embedded"
    numbers = re.match(r"(\d+)\.(\d+)", name)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < (1, 3):
        return (
            f"TensorRT-LLM {name} makes no pictures or videos: its VisualGen begins with 1.3. "
            "Cure: ENGINE=embedded, which runs folders of diffusers"
        )
    return ""


def version_of(name: str) -> PackageVersion:
    """Return the facts of the package version `name`; a version that cannot be read counts as 1.2.1."""
    numbers = re.match(r"(\d+)\.(\d+)", name)
    newest = numbers is not None and (int(numbers[1]), int(numbers[2])) >= (1, 3)
    return PackageVersion(
        name,
        handoff_logprobs=newest,
        max_encoded_images=0 if newest else 1,
        prompt_logprobs=newest,
        request_ids=newest,
        overlapped_context=newest,
        zero_logprobs=newest,
        draft_target="Draft_Target" if newest else "DraftTarget",
        samples_more=newest,
    )
