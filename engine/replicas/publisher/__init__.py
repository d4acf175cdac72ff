"""KV-cache events for routers: converted to the wire format of vLLM and Dynamo, and sent by ZMQ and other buses."""
