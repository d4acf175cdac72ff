"""Conversion of messages into token ids and back: templates, tokenizer and detokenizer."""
