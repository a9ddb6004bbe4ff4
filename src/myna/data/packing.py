"""Sequence packing: rows of a token budget, filled without truncating any sequence."""

from __future__ import annotations

from collections.abc import Sequence


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit-decreasing bin packing: rows of indices into `lengths`, each row at most `budget` long."""
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if longest_first and lengths[longest_first[0]] > budget:
        raise ValueError(f"a sequence of {lengths[longest_first[0]]} does not fit a row of {budget}")
    # A segment tree: leaves are rows, a node holds the largest free space below it, so the first row with enough space
    # is found on the way down. Empty rows count as free. No two rows can be half empty, so these leaves are enough.
    leaves = 1
    while leaves < 2 * sum(lengths) // budget + 1:
        leaves *= 2
    free = [budget] * (2 * leaves)
    rows: list[list[int]] = []
    for index in longest_first:
        length, node = lengths[index], 1
        while node < leaves:
            node *= 2
            if free[node] < length:
                node += 1
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(index)
        free[node] -= length
        while node > 1:
            left, right = free[node], free[node ^ 1]
            largest = left if left > right else right
            node //= 2
            if free[node] == largest:
                break
            free[node] = largest
    return rows
