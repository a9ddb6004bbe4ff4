"""Random numbers that follow from names alone, a whole array at a time.

They depend on no generator's state and on no library's version, so that a choice is the same on every rank, after a
resume, and years later.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Names = npt.NDArray[np.uint64]
"""Ids as numbers, one for each utterance."""


def hash_of(text: str) -> int:
    """A text as one of 2^64 numbers."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def random_bits(names: Names, occasion: str) -> npt.NDArray[np.uint64]:
    """A number of 64 random bits for each name, another one on every occasion (the last steps of splitmix64)."""
    bits = names + np.uint64(hash_of(occasion))
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def randint(thrown: npt.NDArray[np.uint64], limits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each throw as a whole number from 0 up to its limit, which is left out. Limits are below 2^32."""
    return (((thrown >> np.uint64(32)) * limits.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def shuffled(names: Names, occasion: str) -> npt.NDArray[np.int64]:
    """The places of all names in a random order."""
    return np.argsort(random_bits(names, occasion), kind="stable")
