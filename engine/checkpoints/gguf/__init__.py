"""GGUF files, as llama.cpp writes them: read, and converted to a Hugging Face folder."""
