"""From messages to token ids and back: templates, tokenizer and detokenizer."""
