"""Pseudo-random permutations that are computed instead of stored, and derived seeds."""

import hashlib

import numpy as np

_ROUNDS = 6
_MIN_HALF_BITS = 3


def permute(index: int | np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Apply a pseudo-random permutation of `range(n)`, different for each seed and epoch.

    The permutation is a Feistel network over the smallest domain of 4^k numbers that contains
    `range(n)`. Its keys are hashed from seed and epoch. A result outside of `range(n)` is permuted
    again until it is inside (cycle walking; at most 3 more times on average for n above 16). It
    takes a fraction of a microsecond per index of a large batch. Its memory does not grow with n.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.

    Args:
        index: integers from 0 to n - 1.
        n: size of the permutation.
        seed: seed of the order.
        epoch: number of the pass over the samples.

    Returns:
        The permuted indices, int64, of the shape of `index`.

    Raises:
        IndexError: `n` is below 1, or an index is outside of `range(n)`.
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
    """Draw a pseudo-random number in [0, n) for each index; int64, of the shape of `index`.

    The numbers depend only on index, seed and epoch. They may repeat.
    """
    key = np.uint64(derived_seed(seed, "drawn", epoch))
    return (_mix(_mix(index.astype(np.uint64)) ^ key) % np.uint64(n)).astype(np.int64)


def _feistel(x: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """Apply a Feistel network to numbers of 2 x `half` bits, with a round for each key."""
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    high, low = x >> shift, x & mask
    for key in keys:
        high, low = low, high ^ (_mix(low ^ key) & mask)
    return (high << shift) | low


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit numbers so that each output bit depends on all input bits.

    This is the finaliser of splitmix64.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derived_seed(seed: int, *parts: object) -> int:
    """Hash `seed` and `parts` into a new seed of at most 56 bits, for another random order."""
    text = " ".join(map(str, (seed, *parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
