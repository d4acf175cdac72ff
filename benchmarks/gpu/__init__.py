"""The embedded engine on one GPU, over HTTP and in process, beside vLLM's figures; and held against float32.

    python -m benchmarks.gpu                          # all of it, about five minutes on an H200
    python -m benchmarks.gpu --cells 1,64 --repeats 1 --no-in-process --max-num-tokens 16384

Options that this program does not know are settings of the server. `cells` has the workloads and the anchors, `model` the model folders
(shapes without weights), `load` the client, `worker` the engine in a process of its own, `check` the comparison with float32, `report`
the table. On a machine without network, `wheels.sh` says what to bring along.
"""
