"""KV-cache events for routers: converted to the wire format of vLLM and Dynamo (`convert`), sent by ZMQ (`zmq_channel`) and NATS
(`nats_sink`), and the task that does it (`publisher`)."""
