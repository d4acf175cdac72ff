"""A closed-loop client that loads a server: `trellis bench`, and the base of `benchmarks/`."""
