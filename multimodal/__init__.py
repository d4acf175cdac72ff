"""Conversion between wire types and token ids, plain text included."""
