"""A permutation of `range(n)` that is computed, not stored, and seeds made of seeds."""

import hashlib

import numpy as np

_ROUNDS = 6
_MIN_HALF_BITS = 3


def permute(index: int | np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return where the permutation of `range(n)` for (`seed`, `epoch`) sends each `index`.

    A Feistel network over the smallest domain of 4^k that holds n, with keys hashed from seed and
    epoch; what falls outside `range(n)` is sent on until it falls inside (cycle walking; at most
    3 more times on average, where n is above 16). No memory that grows with n, a fraction of a
    microsecond for each index of a large batch.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
    """
    index = np.asarray(index)
    if n < 1 or (index.size and not (index.min() >= 0 and index.max() < n)):
        raise IndexError(f"permute: expected 0 <= index < n, got n {n} and {index}")
    half = max(_MIN_HALF_BITS, ((n - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    out = _feistel(index.astype(np.uint64).reshape(-1), half, keys)
    outside = np.flatnonzero(out >= n)
    while len(outside):
        out[outside] = _feistel(out[outside], half, keys)
        outside = outside[out[outside] >= n]
    return out.astype(np.int64).reshape(index.shape)


def draw_below(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return a number below `n` for each `index`, int64, as if drawn for (`seed`, `epoch`)."""
    key = np.uint64(derived_seed(seed, "drawn", epoch))
    return (_mix(_mix(index.astype(np.uint64)) ^ key) % np.uint64(n)).astype(np.int64)


def _feistel(x: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every bit of the output depends on every bit of the input."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derived_seed(seed: int, *parts: object) -> int:
    """Return another seed, made of `seed` and `parts`: for the second of two orders of one run."""
    text = " ".join(map(str, (seed, *parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
