"""Names of images: equal for equal files that are encoded in the same way, and for no others."""

from blake3 import blake3

from engine.encoder import Detail


def content_hash(data: bytes) -> bytes:
    """32 bytes that name a file's contents. It takes about a millisecond for a few MB: off the event loop for more."""
    return blake3(data).digest()


def image_key(data: bytes, fingerprint: str, detail: Detail) -> str:
    """64 hex digits that name what an encoder with `fingerprint` makes of a file. The caller hashes large files off the event loop."""
    return blake3(b"\0".join((content_hash(data), fingerprint.encode(), detail.encode()))).hexdigest()
