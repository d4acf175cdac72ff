"""A stand-in for TensorRT-LLM, generated from its API contract and driven by engines of this project.

It has the names, signatures and models of `tests/contract/trtllm_api.json` (1.2.1), or of these and
`tests/contract/trtllm_newest.json` (main), and behaves as the contract says; what the contract lacks does not exist
here. Put the folder above this package on `sys.path`. `_test` makes faults; environment
variables choose the engine:

FAKE_TRTLLM_VERSION  "1.2.1" (default) or the version of `trtllm_newest.json`
FAKE_TRTLLM_ENGINE   "fake" (default) or "embedded", which runs the model folder that `LLM` is given
FAKE_TRTLLM_CONFIG   JSON with fields of its configuration (`engine/config.py`), over those of the arguments of `LLM`
FAKE_TRTLLM_GPUS     GPUs of this machine (1)
FAKE_TRTLLM_DAEMON   "deaf" if the workers are to outlive the process that has started them
FAKE_TRTLLM_WORKERS  MPI workers of an LLM, processes that only live (none, as with TLLM_WORKER_USE_SINGLE_PROCESS=1)
FAKE_TRTLLM_FAULTS   JSON with faults of `_test.Faults`, for child processes
"""

from tensorrt_llm._contract import __version__
from tensorrt_llm._llm import LLM
from tensorrt_llm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
