"""Counter-based random numbers from hashed names, a whole array at a time.

They depend on no generator's state and on no library's version: the same choice on every rank, after a resume, and
years later.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

IdHashes = npt.NDArray[np.uint64]
"""64-bit hashes of utterance ids."""


def string_hash(text: str) -> int:
    """64-bit blake2b hash of a string."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def random_bits(ids: IdHashes, stream: str) -> npt.NDArray[np.uint64]:
    """64 random bits for each id, independent between purposes (the finalizer of splitmix64)."""
    bits = ids + np.uint64(string_hash(stream))
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def randint(bits: npt.NDArray[np.uint64], limits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Random bits as integers in [0, limit). Limits are below 2^32."""
    return (((bits >> np.uint64(32)) * limits.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def permutation(ids: IdHashes, stream: str) -> npt.NDArray[np.int64]:
    """A random order of all ids, as their positions."""
    return np.argsort(random_bits(ids, stream), kind="stable")
