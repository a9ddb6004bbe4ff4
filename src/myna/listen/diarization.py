"""Speaker diarization: speaker segmentation of 10 s windows, clustered by speaker embeddings.

The segmentation network is pyannote's segmentation-3.0 (PyanNet: SincNet, LSTM, linear) in plain torch. Module names
are those of the published checkpoint; its sinc filters are weights of a plain convolution here
(`myna setup curation`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from myna.audio.files import LISTENING_RATE, FloatArray, Samples, as_mono_16khz
from myna.core.errors import import_optional
from myna.listen.models import INSTALL, remake_hint
from myna.listen.speaker_encoders import SpeakerEncoder, embed_speakers, unit_vectors
from myna.models.files import load_network

WINDOW_SECONDS = 10.0
FRAME_SAMPLES, FRAME_STEP_SAMPLES = 991, 270
"""Samples of a frame's receptive field, and from one frame to the next."""
FRAME_SECONDS = FRAME_STEP_SAMPLES / LISTENING_RATE
STEP_SECONDS = 5.0
"""Seconds from the beginning of one window to the next."""
LOCAL_SPEAKERS = 3
BATCH_WINDOWS, GPU_BATCH_WINDOWS = 8, 64
"""Windows per batch. A CPU gains nothing from more, and every eight take 100 MB."""

_SETS = [one for size in (0, 1, 2) for one in combinations(range(LOCAL_SPEAKERS), size)]
POWERSET = np.array([[speaker in one for speaker in range(LOCAL_SPEAKERS)] for one in _SETS])
"""Speakers of a window that are active in each class (classes x speakers), at most two of them at once."""


def frame_times(frames: int) -> npt.NDArray[np.float64]:
    """Return the time of the centre of each frame in seconds."""
    return (np.arange(frames) * FRAME_STEP_SAMPLES + FRAME_SAMPLES / 2) / LISTENING_RATE


class SegmentationNetwork(nn.Module):
    """Network from mono windows at 16 kHz (batch, samples) to log probabilities of the classes (batch, frames, 7)."""

    def __init__(self) -> None:
        super().__init__()
        self.sincnet = _SincNet()
        self.lstm = nn.LSTM(60, 128, num_layers=4, bidirectional=True, batch_first=True)
        self.linear = nn.ModuleList([nn.Linear(256, 128), nn.Linear(128, 128)])
        self.classifier = nn.Linear(128, len(POWERSET))

    @classmethod
    def open(cls, file: Path, device: str = "cpu") -> Self:
        return load_network(cls(), file, device, hint=remake_hint(file))

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.sincnet(waves[:, None]).transpose(1, 2))
        for layer in self.linear:
            x = F.leaky_relu(layer(x))
        return F.log_softmax(self.classifier(x), -1)

    @torch.inference_mode()
    def segment(self, samples: Samples) -> FloatArray:
        """Return class probabilities (windows x frames x classes) of mono samples at 16 kHz."""
        size, step = round(WINDOW_SECONDS * LISTENING_RATE), round(STEP_SECONDS * LISTENING_RATE)
        count = 1 + max(0, -(-(len(samples) - size) // step))
        device = self.classifier.weight.device
        batch_size = BATCH_WINDOWS if device.type == "cpu" else GPU_BATCH_WINDOWS
        parts = []
        threads = torch.get_num_threads()
        # Steps of an LSTM are too short to share: on two busy cores, two threads took three times as long as one.
        torch.set_num_threads(1)
        try:
            for first in range(0, count, batch_size):
                batch = np.zeros((min(batch_size, count - first), size), np.float32)
                for row, window in enumerate(batch, first):
                    audio = samples[row * step : row * step + size]
                    window[: len(audio)] = audio
                parts.append(self(torch.from_numpy(batch).to(device)).exp().cpu().numpy())
        finally:
            torch.set_num_threads(threads)
        return np.concatenate(parts)


class _SincNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wav_norm1d = nn.InstanceNorm1d(1, affine=True)
        self.conv1d = nn.ModuleList(
            [nn.Conv1d(1, 80, 251, stride=10, bias=False), nn.Conv1d(80, 60, 5), nn.Conv1d(60, 60, 5)]
        )
        self.norm1d = nn.ModuleList(nn.InstanceNorm1d(width, affine=True) for width in (80, 60, 60))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1d[0](self.wav_norm1d(x)).abs()
        for index, norm in enumerate(self.norm1d):
            if index:
                x = self.conv1d[index](x)
            x = F.leaky_relu(norm(F.max_pool1d(x, 3)))
        return x


MIN_SOLO_SECONDS = 1.0
"""Seconds of solo speech below which a local speaker starts no cluster and joins the nearest one."""
MIN_EMBEDDED_SECONDS = 0.3
MAX_EMBEDDED_SECONDS = 5.0
"""Maximum seconds of a local speaker that are embedded."""
EMBEDDED_STEP_SECONDS = 0.5
"""Step in seconds to which clip lengths are rounded, because cuDNN and oneDNN plan a convolution anew for each
length."""
SAME_SPEAKER_COSINE = 0.45
"""Average cosine of ECAPA embeddings from which two clusters are one speaker. Chosen on nine planted podcasts, eight of
them of synthetic voices, which 0.30 merged. On the one of three real voices, 0.30 to 0.50 gave equal results."""
LINKED_SPEAKER_COSINE = 0.65
"""Cosine of mean embeddings from which speakers of two parts are one. Halves of 24 s of each of 30 real speakers had
0.67 to 0.93, two different speakers at most 0.66 (99 % below 0.54). Synthetic speakers had 0.78 to 0.93, and 5 % of
different pairs were above 0.65."""
ENROLMENT_COSINE = 0.45
MIN_SHARE = 0.02
"""Minimum share of all speech that a cluster needs to count as a speaker."""
ENOUGH_SECONDS = 20.0
"""Seconds of speech that make a cluster a speaker whatever its share: 2 % of three hours are more than three
minutes."""
MAX_PAIRED = 8000
"""Maximum number of embeddings whose distances are kept for all pairs, which takes 256 MB."""
JOINED_COSINE = -4.0
"""Value below all cosines."""
MAX_OUTLIERS = 50
"""Maximum number of additional clusters in which a known number of speakers is sought."""
MIN_SPLIT_DISTANCE = 0.2
"""Distance (1 - cosine) below which two clusters are certainly one voice."""
OVERLAP_PROBABILITY = 0.3
NOBODY = -1

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LocalSpeakers:
    """Local speakers of every window of a recording: the input of clustering."""

    activity: npt.NDArray[np.bool_]
    """Activity of each local speaker in each frame of each window (windows, frames, 3)."""
    overlap: FloatArray
    """Probability in each frame of the recording that two people speak."""
    window: IntArray
    """Window of each local speaker that has an embedding (n)."""
    local: IntArray
    """Number of the local speaker within its window, 0 to 2 (n)."""
    embeddings: FloatArray
    """Speaker embeddings (n, size)."""
    solo_seconds: FloatArray
    """Seconds in which the local speaker speaks alone (n)."""


@dataclass(frozen=True)
class SpeakerTurns:
    """Speaker turns of a recording. Speakers are numbered from 0 in order of decreasing speech."""

    active: npt.NDArray[np.bool_]
    """Activity (frames, speakers)."""
    overlap: FloatArray
    """Probability that two people speak (frames)."""
    embeddings: FloatArray
    """Normalised mean embedding of each speaker (speakers, size)."""

    def overlap_share(self, start: float, end: float) -> float:
        """Return the share of a span in which two people probably speak."""
        frames = self._frames(start, end)
        return float((self.overlap[frames] > OVERLAP_PROBABILITY).mean()) if frames.stop > frames.start else 0.0

    def speaker_shares(self, start: float, end: float) -> dict[int, float]:
        """Return the share of the speech in a span by speaker; empty without speech."""
        seconds = self.active[self._frames(start, end)].sum(0)
        return {index: float(count / seconds.sum()) for index, count in enumerate(seconds) if count}

    def _frames(self, start: float, end: float) -> slice:
        first, last = np.searchsorted(frame_times(len(self.overlap)), [start, end])
        return slice(int(first), int(last))


def find_local_speakers(
    samples: Samples, sample_rate: int, network: SegmentationNetwork, encoder: SpeakerEncoder
) -> LocalSpeakers:
    """Find the speakers of each window, and embed each from the frames in which no other speaks."""
    wave = as_mono_16khz(samples, sample_rate)
    probabilities = network.segment(wave)
    active = POWERSET[probabilities.argmax(-1)]
    frames = max(1, int(np.ceil(len(wave) / LISTENING_RATE / FRAME_SECONDS)))
    solo = active & (active.sum(-1, keepdims=True) == 1)
    window, local, seconds = [], [], []

    def solo_clips() -> Iterator[Samples]:
        for index, speaker in np.argwhere(solo.any(1)):
            clip = _solo_audio(wave, round(index * STEP_SECONDS * LISTENING_RATE), solo[index, :, speaker])
            if len(clip) >= MIN_EMBEDDED_SECONDS * LISTENING_RATE:
                window.append(index)
                local.append(speaker)
                seconds.append(solo[index, :, speaker].sum() * FRAME_SECONDS)
                step = round(EMBEDDED_STEP_SECONDS * LISTENING_RATE)
                yield clip[: len(clip) // step * step] if len(clip) >= step else np.resize(clip, step)

    embeddings = list(embed_speakers(solo_clips(), LISTENING_RATE, encoder))
    overlap = probabilities[..., POWERSET.sum(1) > 1].sum(-1)
    return LocalSpeakers(
        activity=active,
        overlap=_over_windows(overlap[..., None], frames)[:, 0],
        window=np.array(window, np.int64),
        local=np.array(local, np.int64),
        embeddings=np.stack(embeddings).astype(np.float32) if embeddings else np.empty((0, 0), np.float32),
        solo_seconds=np.array(seconds, np.float32),
    )


def label_speakers(local: LocalSpeakers, *, speakers: int | None = None) -> SpeakerTurns:
    """Cluster local speakers, and name the speakers of every frame. No network runs here."""
    weights = np.where(local.solo_seconds >= MIN_SOLO_SECONDS, local.solo_seconds, 0)
    weights = weights * np.float32(STEP_SECONDS / WINDOW_SECONDS)  # windows overlap
    clusters = cluster_embeddings(local.embeddings, weights, speakers=speakers)
    count = int(clusters.max(initial=NOBODY)) + 1
    windows, window_frames, _ = local.activity.shape
    activity = np.zeros((windows, window_frames, count), np.float32)
    for cluster, window, speaker in zip(clusters, local.window, local.local, strict=True):
        if cluster != NOBODY:
            activity[window, local.activity[window, :, speaker], cluster] = 1
    frames = len(local.overlap)
    heads = _over_windows(local.activity.sum(-1, keepdims=True).astype(np.float32), frames)
    scores = _over_windows(activity, frames)
    ranks = (-scores).argsort(1, kind="stable").argsort(1, kind="stable")
    active = (ranks < np.round(heads)) & (scores > 0)
    return SpeakerTurns(active, local.overlap, _centroids(local.embeddings, clusters, weights, count))


def cluster_embeddings(
    embeddings: FloatArray,
    weights: npt.ArrayLike,
    *,
    speakers: int | None = None,
    threshold: float = SAME_SPEAKER_COSINE,
    enrolment: FloatArray | None = None,
    enrolment_threshold: float = ENROLMENT_COSINE,
    min_share: float = MIN_SHARE,
) -> IntArray:
    """Return the speaker of each embedding by average-link clustering of cosines; -1 for no speaker.

    `weights` are seconds of speech: an embedding with none joins the nearest cluster afterwards. Clusters with less
    than `min_share` of the seconds and less than `ENOUGH_SECONDS` are dissolved. With `speakers`, that number of
    clusters of this size is sought, and everything else joins the nearest of them. With `enrolment`, a cluster is the
    nearest enrolled speaker if their cosine is at least `enrolment_threshold`.
    """
    vectors = unit_vectors(np.asarray(embeddings, np.float32))
    seconds = np.asarray(weights, np.float64)
    labels = np.full(len(vectors), NOBODY, np.int64)
    founding = np.flatnonzero((seconds > 0) & (np.abs(vectors).sum(1) > 0))
    if not len(founding):
        return labels
    labels[founding] = _average_link(vectors[founding], seconds[founding], speakers, threshold, min_share)
    totals = np.bincount(labels[founding], seconds[founding])
    order = sorted(range(len(totals)), key=lambda cluster: -totals[cluster])
    fewest = fewest_seconds(totals.sum(), min_share)
    order = order[:speakers] if speakers else [one for one in order if totals[one] >= fewest]
    centroids = _centroids(vectors, labels, seconds, len(totals))
    enrolled = np.empty((0, vectors.shape[1])) if enrolment is None else unit_vectors(np.asarray(enrolment, np.float32))
    numbers: dict[int, int] = {}
    unknown = len(enrolled)
    for cluster in order:
        cosines = enrolled @ centroids[cluster]
        if cosines.max(initial=-1.0) >= enrolment_threshold:
            numbers[cluster] = int(cosines.argmax())
        else:
            numbers[cluster] = unknown
            unknown += 1
    labels = np.array([numbers.get(label, NOBODY) for label in labels.tolist()], np.int64)
    if numbers:
        small = np.flatnonzero(((seconds <= 0) | bool(speakers)) & (labels == NOBODY) & (np.abs(vectors).sum(1) > 0))
        nearest = (vectors[small] @ centroids[order].T).argmax(1)
        labels[small] = [numbers[order[index]] for index in nearest]
    return labels


def fewest_seconds(total: float, min_share: float) -> float:
    """Return the minimum seconds of speech that make a speaker, given the total seconds of speech."""
    return min(min_share * total, ENOUGH_SECONDS)


def _average_link(
    vectors: FloatArray, seconds: npt.NDArray[np.float64], speakers: int | None, threshold: float, min_share: float
) -> IntArray:
    hierarchy = import_optional("scipy.cluster.hierarchy", INSTALL)
    distance = import_optional("scipy.spatial.distance", INSTALL)
    if len(vectors) == 1 or speakers == 1:
        return np.zeros(len(vectors), np.int64)
    if len(vectors) > MAX_PAIRED:
        tree = linkage_of_sums(vectors)
    else:
        tree = hierarchy.linkage(distance.pdist(vectors.astype(np.float64), "cosine").clip(0, 2), "average")
    if not speakers:
        return np.asarray(hierarchy.fcluster(tree, 1 - threshold, "distance"), np.int64) - 1
    fewest = np.asarray(hierarchy.fcluster(tree, speakers, "maxclust"), np.int64) - 1
    for count in range(speakers, min(len(vectors), MAX_OUTLIERS + speakers) + 1):
        if tree[len(vectors) - count, 2] < MIN_SPLIT_DISTANCE:
            break
        # A few outliers far from all clusters would otherwise count as speakers.
        labels = np.asarray(hierarchy.fcluster(tree, count, "maxclust"), np.int64) - 1
        if (np.bincount(labels, seconds) >= fewest_seconds(seconds.sum(), min_share)).sum() >= speakers:
            return labels
    return fewest


def linkage_of_sums(vectors: FloatArray) -> npt.NDArray[np.float64]:
    """Return scipy's tree of average linkage by cosines of unit vectors, in memory for the vectors alone.

    The mean cosine between two clusters is the product of their mean vectors, so no matrix of pairs is needed. Nearest
    neighbours are followed until two are each other's, which are joined.
    """
    # A last column makes clusters that were joined dissimilar from all others.
    means = np.pad(vectors.astype(np.float32), ((0, 0), (0, 1)))
    sizes, names = np.ones(len(vectors)), np.arange(len(vectors))
    joined: list[tuple[int, int, float]] = []
    chain: list[int] = []
    for remaining in range(len(vectors), 1, -1):
        if remaining < 0.8 * len(sizes):  # leave out what was joined, to search less
            alive = np.flatnonzero(sizes)
            chain = np.searchsorted(alive, chain).tolist()
            means, sizes, names = means[alive], sizes[alive], names[alive]
        chain = chain or [int(sizes.argmax())]
        while True:
            query = means[chain[-1]].copy()
            query[-1] = 1
            cosines = means @ query
            cosines[chain[-1]] = JOINED_COSINE
            nearest = int(cosines.argmax())
            if len(chain) > 1 and cosines[chain[-2]] >= cosines[nearest]:
                break
            chain.append(nearest)
        gone, left = chain.pop(), chain.pop()
        joined.append((int(names[gone]), int(names[left]), 1 - float(cosines[left])))
        total = sizes[gone] + sizes[left]
        means[left] = (sizes[gone] * means[gone] + sizes[left] * means[left]) / total
        sizes[left], sizes[gone], means[gone, -1] = total, 0, JOINED_COSINE
    # scipy wants joins in order of distance, each named by its number after those of the vectors.
    tree, number_of, size_of = np.empty((len(joined), 4)), list(range(len(vectors))), [1] * len(vectors)
    for row, (gone, left, distance) in enumerate(sorted(joined, key=lambda join: join[2])):
        size_of[left] += size_of[gone]
        tree[row] = (*sorted((number_of[gone], number_of[left])), max(0.0, distance), size_of[left])
        number_of[left] = len(vectors) + row
    return tree


def _centroids(vectors: FloatArray, labels: IntArray, weights: npt.ArrayLike, count: int) -> FloatArray:
    totals = np.zeros((count, vectors.shape[1] if vectors.ndim == 2 else 0), np.float32)
    named = labels != NOBODY
    np.add.at(totals, labels[named], vectors[named] * np.asarray(weights, np.float32)[named, None])
    return unit_vectors(totals)


def _over_windows(values: FloatArray, frames: int) -> FloatArray:
    """Average over the windows that hold a frame, weighting their middles most: (windows, frames, n) -> (frames, n)."""
    weight = np.hamming(values.shape[1]).astype(np.float32)[:, None]
    starts = [round(index * STEP_SECONDS * LISTENING_RATE / FRAME_STEP_SAMPLES) for index in range(len(values))]
    length = max(frames, starts[-1] + values.shape[1])
    total, weights = np.zeros((length, values.shape[2]), np.float32), np.full((length, 1), 1e-9, np.float32)
    for start, window in zip(starts, values, strict=True):
        total[start : start + len(window)] += window * weight
        weights[start : start + len(window)] += weight
    return np.asarray((total / weights)[:frames], np.float32)


def _solo_audio(wave: Samples, offset: int, solo: npt.NDArray[np.bool_]) -> Samples:
    """Return the samples of the frames in which one speaker is alone; a frame stands for the step around its centre."""
    centre = offset + (FRAME_SAMPLES - FRAME_STEP_SAMPLES) // 2
    edges = np.flatnonzero(np.diff(np.concatenate([[False], solo, [False]])))
    spans = [
        wave[centre + first * FRAME_STEP_SAMPLES : centre + after * FRAME_STEP_SAMPLES]
        for first, after in zip(edges[::2], edges[1::2], strict=True)
    ]
    spans.sort(key=len, reverse=True)
    return np.concatenate(spans)[: round(MAX_EMBEDDED_SECONDS * LISTENING_RATE)]
