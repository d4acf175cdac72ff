"""Between the wire and token ids, plain text included."""
