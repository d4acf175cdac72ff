"""The fast model runner for CPUs: one C++ file compiled at first start."""
