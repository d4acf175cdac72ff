"""Measure the embedded engine on one GPU, over HTTP and in process, next to vLLM's figures; check it against float32.

    python -m benchmarks.gpu                          # everything, about five minutes on an H200
    python -m benchmarks.gpu --cells 1,64 --repeats 1 --no-in-process --max-num-tokens 16384

Unknown options are settings of the server. `cells` has the workloads and reference figures, `model` the model folders
(shapes without weights), `load` the client, `worker` the engine in a separate process, `check` the comparison with
float32, `report` the table. For machines without network access, see `wheels.sh`.
"""
