"""Rows of a token budget, filled without cutting anything."""

from __future__ import annotations

from collections.abc import Sequence


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths` in rows of at most `budget`: the longest first, each into the first row with room."""
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if longest_first and lengths[longest_first[0]] > budget:
        raise ValueError(f"a sequence of {lengths[longest_first[0]]} does not fit a row of {budget}")
    # A tree whose leaves are the rows and whose nodes know the most room below them: the first row with room is found
    # on the way down. Rows that are not begun have all their room. No two rows can be half empty, so these are enough.
    leaves = 1
    while leaves < 2 * sum(lengths) // budget + 1:
        leaves *= 2
    room = [budget] * (2 * leaves)
    rows: list[list[int]] = []
    for index in longest_first:
        length, node = lengths[index], 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            one, other = room[node], room[node ^ 1]
            most = one if one > other else other
            node //= 2
            if room[node] == most:
                break
            room[node] = most
    return rows
