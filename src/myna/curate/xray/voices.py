"""Speakers of a table by their embeddings: centroids, likeness, suspected twins and mixtures, and a map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from myna.curate.xray.source import XraySource

SHOWN_SPEAKERS = 24
MATRIX_SPEAKERS = 12
SAMPLED_CLIPS = 300
"""Clips of a speaker whose embeddings are compared one by one."""
MAP_POINTS = 400
EXAMPLES = 3
MIN_PART_SHARE = 0.1
"""Of a speaker's clips, that a second voice among them must have."""
SAME_VOICE_RATIO, DIFFERENT_VOICE_RATIO = 0.8, 0.65
"""Mean cosine of clips of two sets, as a share of that within each: from the first on they may be one person, below the
second two."""
MAX_ITERATIONS = 20
MIN_CLIPS = 6
"""Of a speaker, to look for a second voice."""

FloatArray = npt.NDArray[np.float32]


def speaker_summary(source: XraySource) -> dict[str, Any]:
    """Hours of each speaker, and what their embeddings say of them."""
    table = source.table
    is_kept = table["status"].to_numpy(zero_copy_only=False) == "kept"
    names_of = table["speaker"].to_numpy(zero_copy_only=False)
    ids = table["id"]
    lengths = table["end_ms"].to_numpy() - table["start_ms"].to_numpy()
    recordings = table["recording"].combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    named = np.flatnonzero((names_of != "") & (table["kind"].to_numpy(zero_copy_only=False) == "clip"))
    names, codes = np.unique(names_of[named].astype(str), return_inverse=True)
    row_code = np.full(len(table), -1)
    row_code[named] = codes
    kept_ms = np.bincount(row_code[is_kept & (row_code >= 0)], lengths[is_kept & (row_code >= 0)], len(names))
    order = np.argsort(-kept_ms, kind="stable")
    centroids, samples = _read_embeddings(source, row_code, is_kept, len(names))
    speakers = []
    for code in order[:SHOWN_SPEAKERS].tolist():
        rows = np.flatnonzero((row_code == code) & is_kept)
        entry: dict[str, Any] = {
            "speaker": str(names[code]),
            "kept_ms": int(kept_ms[code]),
            "clips": len(rows),
            "recordings": len(np.unique(recordings[rows])),
        }
        members, vectors = samples.get(code, (np.empty(0, np.int64), np.empty((0, 0), np.float32)))
        if len(members):
            likeness = vectors @ centroids[code]
            by_likeness = members[np.argsort(-likeness, kind="stable")]
            at = sorted({0, len(members) // 2, len(members) - 1})
            entry |= {
                "likeness": float(np.median(likeness)),
                "examples": [ids[int(by_likeness[n])].as_py() for n in at],
                "second_voice": second_voice(vectors),
            }
        else:
            middle = rows[np.linspace(0, len(rows) - 1, min(EXAMPLES, len(rows)), dtype=int)] if len(rows) else rows
            entry["examples"] = [ids[int(row)].as_py() for row in middle]
        speakers.append(entry)
    shown = [code for code in order[:MATRIX_SPEAKERS].tolist() if code in samples]
    matrix = [[round(float(centroids[a] @ centroids[b]), 3) for b in shown] for a in shown]
    return {
        "count": len(names),
        "kept_ms": int(kept_ms.sum()),
        "unnamed_kept_ms": int(lengths[is_kept & (row_code < 0)].sum()),
        "speakers": speakers,
        "matrix": {"speakers": [str(names[code]) for code in shown], "cosine": matrix},
        "twins": _twins([str(names[code]) for code in shown], [samples[code][1] for code in shown]),
        "map": _voice_map(samples, [str(name) for name in names], shown, ids),
    }


def _read_embeddings(
    source: XraySource, row_code: npt.NDArray[np.int64], is_kept: npt.NDArray[np.bool_], count: int
) -> tuple[FloatArray, dict[int, tuple[npt.NDArray[np.int64], FloatArray]]]:
    """The normalised mean of each speaker's kept clips, and some of them: the same number of each, evenly spread."""
    clips = np.bincount(row_code[is_kept & (row_code >= 0)], minlength=count)
    steps = np.maximum(1, np.ceil(clips / SAMPLED_CLIPS)).astype(int)
    seen = np.zeros(count, np.int64)
    sums: FloatArray = np.empty((0, 0), np.float32)
    rows_of: dict[int, list[npt.NDArray[np.int64]]] = {}
    vectors_of: dict[int, list[FloatArray]] = {}
    for rows, vectors in source.embeddings():
        wanted = is_kept[rows] & (row_code[rows] >= 0)
        rows, vectors = rows[wanted], vectors[wanted]
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = np.asarray(vectors / np.where(norms > 0, norms, 1), np.float32)
        sums = sums if sums.size else np.zeros((count, vectors.shape[1]), np.float32)
        codes = row_code[rows]
        for code in np.unique(codes).tolist():
            mine = np.flatnonzero(codes == code)
            sums[code] += vectors[mine].sum(axis=0)
            chosen = mine[(seen[code] + np.arange(len(mine))) % steps[code] == 0]
            seen[code] += len(mine)
            rows_of.setdefault(code, []).append(rows[chosen])
            vectors_of.setdefault(code, []).append(vectors[chosen])
    norms = np.linalg.norm(sums, axis=1, keepdims=True) if sums.size else sums
    centroids = np.asarray(sums / np.where(norms > 0, norms, 1), np.float32)
    samples = {code: (np.concatenate(rows_of[code]), np.concatenate(vectors_of[code])) for code in rows_of}
    return centroids, samples


def second_voice(vectors: FloatArray) -> dict[str, float] | None:
    """Two voices under one name, if the clips fall into two parts whose clips are much less alike than those of a part.

    By spherical 2-means, from the two most different clips.
    """
    if len(vectors) < MIN_CLIPS:
        return None
    cosines = vectors @ vectors.T
    first, second = np.unravel_index(int(cosines.argmin()), cosines.shape)
    part = cosines[second] > cosines[first]
    for _ in range(MAX_ITERATIONS):
        if not MIN_PART_SHARE <= part.mean() <= 1 - MIN_PART_SHARE:
            return None
        means = np.stack([vectors[part == n].mean(axis=0) for n in (False, True)])
        means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-9)
        moved = vectors @ means[1] > vectors @ means[0]
        if np.array_equal(moved, part):
            break
        part = moved
    parts = [vectors[~part], vectors[part]]
    across, within = mean_cosine(*parts), min(mean_cosine(one) for one in parts)
    if not across < DIFFERENT_VOICE_RATIO * within:
        return None
    share = min(float(part.mean()), 1 - float(part.mean()))
    return {"share": round(share, 3), "cosine": round(across, 3), "own": round(within, 3)}


def mean_cosine(vectors: FloatArray, others: FloatArray | None = None) -> float:
    """Mean cosine of two different clips, of one set or one of each; NaN where there is no such pair."""
    total = vectors.sum(axis=0, dtype=np.float64)
    if others is not None:
        return float(total @ others.sum(axis=0, dtype=np.float64) / (len(vectors) * len(others)))
    pairs = len(vectors) * (len(vectors) - 1)
    return float((total @ total - len(vectors)) / pairs) if pairs else math.nan


def _twins(names: Sequence[str], vectors: Sequence[FloatArray]) -> list[dict[str, Any]]:
    """Pairs of speakers whose clips are nearly as alike as clips of one of them."""
    twins = []
    own = [mean_cosine(one) for one in vectors]
    for a, first in enumerate(names):
        for b in range(a + 1, len(names)):
            across, within = mean_cosine(vectors[a], vectors[b]), min(own[a], own[b])
            if across >= SAME_VOICE_RATIO * within:
                twins.append({"speakers": [first, names[b]], "cosine": round(across, 3), "own": round(within, 3)})
    return sorted(twins, key=lambda twin: -float(twin["cosine"]))


def _voice_map(
    samples: dict[int, tuple[npt.NDArray[np.int64], FloatArray]], names: Sequence[str], shown: Sequence[int], ids: Any
) -> dict[str, Any]:
    """Clips on the first two principal components of their embeddings."""
    each = max(1, MAP_POINTS // max(1, len(shown)))
    rows, labels, parts = [], [], []
    for code in shown:
        members, vectors = samples[code]
        step = max(1, -(-len(members) // each))
        rows += members[::step].tolist()
        labels += [names[code]] * len(members[::step])
        parts.append(vectors[::step])
    if len(rows) < 3:
        return {"points": [], "explained": 0.0}
    centered = np.concatenate(parts)
    centered = centered - centered.mean(axis=0)
    _, singular, directions = np.linalg.svd(centered, full_matrices=False)
    places = centered @ directions[:2].T
    places = places / (np.abs(places).max() or 1)
    points = [
        {"id": ids[row].as_py(), "speaker": label, "x": round(float(x), 3), "y": round(float(y), 3)}
        for row, label, (x, y) in zip(rows, labels, places, strict=True)
    ]
    explained = float((singular[:2] ** 2).sum() / max((singular**2).sum(), 1e-12))
    return {"points": points, "explained": round(explained, 3)}
