"""Names for KV content: a chained hash for each full block of tokens.

The hash of a block covers its tokens and, by way of its parent's hash, all tokens before it, and whatever else the
content depends on (the root). Prefix reuse, offload, transfer between engines and routing all speak these hashes.
"""

import importlib
from array import array
from collections.abc import Callable
from hashlib import sha256
from types import ModuleType

from rayllm.errors import ConfigError

BlockHash = Callable[[bytes, list[int]], bytes]
"""The hash of a full block with these tokens after the parent with that hash."""
OPTION = "--prefix-caching-hash-algo"


def root_hash(cache_salt: str = "", adapter: str = "", embeds: bytes = b"") -> bytes:
    """The parent of a first block. Requests with different roots share nothing.

    `embeds` say what stands in place of tokens of a prompt, and where: only prompts of the very same share.
    """
    root = sha256(f"{len(cache_salt)}:{cache_salt}{adapter}".encode()).digest()
    return root if not embeds else sha256(b"embeds" + root + embeds).digest()


def block_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """SHA-256 of the parent's hash and the tokens as 32-bit integers."""
    return sha256(parent + array("i", token_ids).tobytes()).digest()


def hash_named(algorithm: str) -> BlockHash:
    """One of `sha256`, `xxhash` (XXH3, 128 bits, not cryptographic), and either with `_cbor`.

    Those hash the canonical CBOR (RFC 8949) of the array [parent, [token, ...]], which any language can write.

    Raises:
        ConfigError: a package is missing.
    """
    if algorithm == "sha256":
        return block_hash
    if algorithm == "sha256_cbor":
        encode = _package("cbor2").dumps
        return lambda parent, token_ids: sha256(encode([parent, token_ids], canonical=True)).digest()
    digest = _package("xxhash").xxh3_128_digest
    if algorithm == "xxhash":
        return lambda parent, token_ids: digest(parent + array("i", token_ids).tobytes())
    assert algorithm == "xxhash_cbor", algorithm
    encode = _package("cbor2").dumps
    return lambda parent, token_ids: digest(encode([parent, token_ids], canonical=True))


def extend_hashes(
    hashes: list[bytes], root: bytes, token_ids: list[int], block_size: int, count: int, hashed: BlockHash = block_hash
) -> None:
    """Append to `hashes` until it covers the first `count` blocks of `token_ids`."""
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), count):
        parent = hashed(parent, token_ids[index * block_size : (index + 1) * block_size])
        hashes.append(parent)


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(OPTION, f"needs the package {name}: {error}", f"install it with pip install {name}") from None
