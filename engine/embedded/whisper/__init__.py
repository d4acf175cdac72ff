"""Whisper: an encoder of speech, and the decoder that writes it down."""
