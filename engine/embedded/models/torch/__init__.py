"""The torch model runner: transformers' model code with paged attention."""
