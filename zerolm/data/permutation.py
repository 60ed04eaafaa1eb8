"""Pseudorandom permutations of [0, N), one per key, computed without storing anything.

A Feistel network on the smallest power of two that is at least N and at least 64. Its rounds
alternately change the high and the low bits. Results outside [0, N) pass through the network again
("cycle walking") until they fall inside, so the mapping remains a bijection. `Order` determines
what is permuted. Any change to the results would make existing runs irreproducible.

Sources: Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions"
(1988), for the network; Black and Rogaway, "Ciphers with arbitrary finite domains" (2002), for
cycle walking; Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), for
splitmix64, the round function.
"""

import numpy as np

# In theory, four rounds suffice on large domains. On tiny ones, fewer rounds or bits than these
# make distributions uneven by 20%. With these values, no unevenness was found at any size with
# 100,000 keys.
NUM_ROUNDS = 6
MIN_DOMAIN_BITS = 6
MASK_64 = (1 << 64) - 1

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_ROUND_CONSTANT = 0xD1B54A32D192ED03


def permute(index: np.ndarray, size: np.ndarray, bits: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Permute indices. For each size and key, this is a bijection on [0, size).

    Args:
        index: indices below `size`, (N,) uint64.
        size: number of elements in each permutation, (N,) uint64 or a scalar.
        bits: `domain_bits` of each size, (N,) uint64 or a scalar.
        key: (N,) uint64.

    Returns:
        (N,) uint64.
    """
    low_bits = bits >> np.uint64(1)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << (bits - low_bits)) - np.uint64(1)
    result = _feistel(index, low_bits, low_mask, high_mask, key)
    outside = np.flatnonzero(result >= size)
    if not outside.size:
        return result
    size, low_bits, low_mask, high_mask, key = np.broadcast_arrays(
        size, low_bits, low_mask, high_mask, key
    )
    # Cycle walking: if size is above 32, at most half of the values need another pass.
    while outside.size:
        walked = _feistel(
            result[outside],
            low_bits[outside],
            low_mask[outside],
            high_mask[outside],
            key[outside],
        )
        result[outside] = walked
        outside = outside[walked >= size[outside]]
    return result


def derive_key(key: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Derive new keys from keys and numbers, which are broadcast: (N,) uint64."""
    return _mix(key ^ _mix(part))


def domain_bits(size: int) -> int:
    """Return the number of bits in the network that permutes [0, size)."""
    return max(MIN_DOMAIN_BITS, (size - 1).bit_length()) if size > 1 else 0


def _feistel(
    values: np.ndarray,
    low_bits: np.ndarray,
    low_mask: np.ndarray,
    high_mask: np.ndarray,
    key: np.ndarray,
) -> np.ndarray:
    low, high = values & low_mask, values >> low_bits
    for number in range(NUM_ROUNDS):
        round_key = key + np.uint64(number * _ROUND_CONSTANT & MASK_64)
        if number % 2 == 0:
            high ^= _mix(low ^ round_key) & high_mask
        else:
            low ^= _mix(high ^ round_key) & low_mask
    return (high << low_bits) | low


def _mix(values: np.ndarray) -> np.ndarray:
    """Return the next splitmix64 output for each state, modulo 2^64: (N,) uint64."""
    mixed = np.atleast_1d(values) + _GOLDEN  # arrays wrap around silently; scalars would warn
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> np.uint64(31)
    return mixed
