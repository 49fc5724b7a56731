"""Names for KV content: a chained hash for each full block of tokens.

The hash of a block covers its tokens and, by way of its parent's hash, all tokens before it, and whatever else the
content depends on (the root). Prefix reuse, offload, transfer between engines and routing all speak these hashes.
"""

from array import array
from hashlib import sha256


def root_hash(cache_salt: str = "", adapter: str = "") -> bytes:
    """The parent of a first block. Requests with different roots share nothing."""
    return sha256(f"{len(cache_salt)}:{cache_salt}{adapter}".encode()).digest()


def block_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """The hash (SHA-256, 32 bytes) of a full block with these tokens after `parent`."""
    return sha256(parent + array("i", token_ids).tobytes()).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: list[int], block_size: int, count: int) -> None:
    """Append to `hashes` until it covers the first `count` blocks of `token_ids`."""
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), count):
        parent = block_hash(parent, token_ids[index * block_size : (index + 1) * block_size])
        hashes.append(parent)
