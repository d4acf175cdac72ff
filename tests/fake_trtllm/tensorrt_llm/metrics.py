"""`tensorrt_llm.metrics`, less its collector."""

from tensorrt_llm._contract import build_enum

__all__ = ["MetricNames"]

MetricNames = build_enum("tensorrt_llm.metrics.MetricNames", __name__)
