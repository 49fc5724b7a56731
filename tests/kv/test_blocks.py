import random
import sys
from hashlib import sha256

import pytest
import xxhash

from rayllm.errors import ConfigError
from rayllm.kv.blocks import BlockPool, PoolStats
from rayllm.kv.prefix import BlockHash, block_hash, extend_hashes, hash_named, root_hash


def test_take_prefers_empty_blocks_then_the_oldest_cached() -> None:
    pool = BlockPool(4)
    first = pool.take(2)
    pool.publish(first[0], b"a")
    pool.publish(first[1], b"b")
    pool.give_back(first)
    assert pool.stats() == PoolStats(empty=2, cached=2, held=0)
    pool.take(2)
    assert pool.find(b"a") is not None
    assert pool.find(b"b") is not None
    pool.take(1)
    assert pool.find(b"b") is None, "the tail of a prefix goes first"
    assert pool.find(b"a") is not None
    pool.check()


def test_take_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.take(4) is None
    assert pool.stats() == PoolStats(empty=3, cached=0, held=0)


def test_shared_blocks_stay_until_the_last_gives_them_back() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.publish(blocks[0], b"a")
    pool.share(blocks)
    pool.give_back(blocks)
    assert pool.stats().held == 1
    pool.give_back(blocks)
    assert pool.stats() == PoolStats(empty=1, cached=1, held=0)
    pool.share(blocks)
    assert pool.stats().held == 1
    pool.check()


def test_drop_cache_forgets_everything() -> None:
    pool = BlockPool(3)
    held, freed = pool.take(1), pool.take(1)
    pool.publish(held[0], b"h")
    pool.publish(freed[0], b"f")
    pool.give_back(freed)
    pool.drop_cache()
    assert pool.find(b"h") is None
    assert pool.find(b"f") is None
    pool.give_back(held)
    pool.check()
    assert pool.stats() == PoolStats(empty=3, cached=0, held=0)


def test_random_use_keeps_the_invariants() -> None:
    rng = random.Random(0)
    pool = BlockPool(16)
    held: list[list[int]] = []
    for step in range(2000):
        action = rng.random()
        if action < 0.4:
            blocks = pool.take(rng.randint(1, 5))
            if blocks:
                held.append(blocks)
                for block in blocks:
                    if rng.random() < 0.7:
                        pool.publish(block, str(rng.randint(0, 40)).encode())
        elif action < 0.6:
            found = pool.find(str(rng.randint(0, 40)).encode())
            if found is not None:
                pool.share([found])
                held.append([found])
        elif held:
            pool.give_back(held.pop(rng.randrange(len(held))))
        if step % 50 == 0:
            pool.check()
    for blocks in held:
        pool.give_back(blocks)
    pool.check()
    assert pool.stats().held == 0


def test_hashes_cover_tokens_parents_and_roots() -> None:
    a, b = root_hash("salt"), root_hash("")
    assert a != b
    assert root_hash("a", "b") != root_hash("ab")
    assert block_hash(a, [1, 2]) != block_hash(a, [2, 1])
    assert block_hash(a, [1, 2]) != block_hash(b, [1, 2])
    hashes: list[bytes] = []
    extend_hashes(hashes, a, [1, 2, 3, 4, 5], 2, 2)
    assert hashes == [block_hash(a, [1, 2]), block_hash(block_hash(a, [1, 2]), [3, 4])]


ROOT = root_hash("salt")
CBOR = b"\x82\x58\x20" + ROOT + b"\x83\x01\x18\x18\x19\x03\xe8"  # RFC 8949: [32 bytes, [1, 24, 1000]]


@pytest.mark.option("prefix-caching-hash-algo")
@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        ("sha256", sha256(ROOT + b"\x01\0\0\0\x18\0\0\0\xe8\x03\0\0").digest()),
        ("sha256_cbor", sha256(CBOR).digest()),
        ("xxhash", xxhash.xxh3_128_digest(ROOT + b"\x01\0\0\0\x18\0\0\0\xe8\x03\0\0")),
        ("xxhash_cbor", xxhash.xxh3_128_digest(CBOR)),
    ],
)
def test_hashes_are_the_same_at_every_start_and_in_every_language(algorithm: str, wanted: bytes) -> None:
    assert hash_named(algorithm)(ROOT, [1, 24, 1000]) == wanted


def test_each_algorithm_tells_prefixes_apart() -> None:
    def names(hashed: BlockHash) -> set[bytes]:
        return {hashed(parent, tokens) for parent in (ROOT, root_hash()) for tokens in ([1, 2], [2, 1], [1], [258])}

    assert all(len(names(hash_named(a))) == 8 for a in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"))


@pytest.mark.option("prefix-caching-hash-algo")
@pytest.mark.parametrize(
    ("algorithm", "package"), [("sha256_cbor", "cbor2"), ("xxhash", "xxhash"), ("xxhash_cbor", "cbor2")]
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, algorithm: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"--prefix-caching-hash-algo: needs the package {package}"):
        hash_named(algorithm)
