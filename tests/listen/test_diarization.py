"""Clustering and labels of speakers from windows made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from myna.audio.files import Samples
from myna.listen import diarization
from myna.listen.diarization import (
    FRAME_SECONDS,
    POWERSET,
    LocalSpeakers,
    SegmentationNetwork,
    cluster_embeddings,
    find_local_speakers,
    frame_times,
    label_speakers,
)

FRAMES = 589
EAST, NORTH, UP = np.eye(3, dtype=np.float32)


def windows_of(*windows: dict[tuple[float, float], int], voices: dict[tuple[int, int], np.ndarray]) -> LocalSpeakers:
    """Make windows of 10 s every 5 s: the active speakers by time, and the embedding of each local speaker."""
    activity = np.zeros((len(windows), FRAMES, 3), np.bool_)
    for index, spans in enumerate(windows):
        for (start, end), local in spans.items():
            activity[index, round(start / FRAME_SECONDS) : round(end / FRAME_SECONDS), local] = True
    frames = int(np.ceil((5 * len(windows) + 5) / FRAME_SECONDS))
    keys = sorted(voices)
    solo = activity & (activity.sum(-1, keepdims=True) == 1)
    return LocalSpeakers(
        activity=activity,
        overlap=np.zeros(frames, np.float32),
        window=np.array([key[0] for key in keys], np.int64),
        local=np.array([key[1] for key in keys], np.int64),
        embeddings=np.array([voices[key] for key in keys], np.float32),
        solo_seconds=np.array([solo[key[0], :, key[1]].sum() * FRAME_SECONDS for key in keys], np.float32),
    )


def test_the_powerset_has_no_speaker_then_each_then_each_pair() -> None:
    assert POWERSET.tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]]


def test_local_speakers_of_two_windows_become_two_speakers_with_overlap() -> None:
    # One speaker has 0-6 s, the other 5-10 s; the second window numbers them the other way round.
    local = windows_of(
        {(0, 6): 0, (5, 10): 1},
        {(0, 1): 2, (0, 10): 0},
        voices={(0, 0): EAST, (0, 1): NORTH, (1, 0): NORTH, (1, 2): EAST},
    )
    turns = label_speakers(local)
    times = frame_times(len(turns.active))
    assert times[turns.active[:, 1]][[0, -1]] == pytest.approx((0, 6), abs=0.1)
    assert times[turns.active[:, 0]][[0, -1]] == pytest.approx((5, 15), abs=0.1)
    assert turns.speaker_shares(8, 12) == {0: 1.0}
    assert turns.speaker_shares(5, 6) == pytest.approx({0: 0.5, 1: 0.5}, abs=0.1)
    assert turns.embeddings == pytest.approx(np.stack([NORTH, EAST]))


def test_another_number_of_speakers_needs_no_listening() -> None:
    near = (EAST + 0.5 * NORTH) / np.linalg.norm(EAST + 0.5 * NORTH)
    local = windows_of({(0, 5): 0, (5, 10): 1}, voices={(0, 0): EAST, (0, 1): near})
    assert len(label_speakers(local).embeddings) == 1
    assert len(label_speakers(local, speakers=2).embeddings) == 2


def test_clusters_below_a_share_of_the_speech_are_dissolved() -> None:
    embeddings = np.stack([EAST, EAST, NORTH, UP])
    assert cluster_embeddings(embeddings, [60, 39, 1, 0]).tolist() == [0, 0, -1, 0]
    assert cluster_embeddings(embeddings, [60, 39, 3, 0]).tolist()[:3] == [0, 0, 1]
    assert cluster_embeddings(embeddings, [60, 39, 1, 0], speakers=2).tolist()[:3] == [0, 0, 1]
    assert cluster_embeddings(embeddings, [6000, 3900, 20, 0]).tolist()[:3] == [
        0,
        0,
        1,
    ]  # enough speech, whatever the share


def test_an_outlier_is_no_speaker_where_their_number_is_known() -> None:
    near = (EAST + 0.8 * NORTH) / np.linalg.norm(EAST + 0.8 * NORTH)
    embeddings = np.stack([EAST, EAST, near, near, UP])
    labels = cluster_embeddings(embeddings, [30, 30, 20, 19, 1], speakers=2).tolist()
    assert labels[0] == labels[1] != labels[2] == labels[3]
    assert labels[4] in (0, 1)


@pytest.mark.parametrize("speakers", [None, 4])
def test_many_embeddings_are_clustered_without_their_pairs(
    speakers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distances of all pairs of 60,000 embeddings took 14 GB."""
    rng = np.random.default_rng(0)
    people = rng.normal(size=(12, 32))
    for spread in (0.5, 1.0, 2.0):
        embeddings = (people[rng.integers(0, 12, 250)] + spread * rng.normal(size=(250, 32))).astype(np.float32)
        weights = rng.uniform(1, 9, 250)
        expected = cluster_embeddings(embeddings, weights, speakers=speakers)
        with monkeypatch.context() as patched:
            patched.setattr(diarization, "MAX_PAIRED", 10)
            patched.setattr("scipy.spatial.distance.pdist", None)
            found = cluster_embeddings(embeddings, weights, speakers=speakers)
        assert found.tolist() == expected.tolist() and len(set(found.tolist())) > 1


def test_enrolled_speakers_keep_their_numbers_and_strangers_follow() -> None:
    embeddings = np.stack([EAST, NORTH, UP])
    assert cluster_embeddings(embeddings, [1, 2, 3], enrolment=np.stack([NORTH, EAST])).tolist() == [1, 0, 2]


def test_zeros_and_empty_arrays_have_no_speaker() -> None:
    assert cluster_embeddings(np.zeros((2, 3), np.float32), [1, 1]).tolist() == [-1, -1]
    assert cluster_embeddings(np.empty((0, 3), np.float32), []).tolist() == []


def test_listening_finds_local_speakers_of_every_window() -> None:
    class Alternating(SegmentationNetwork):
        def segment(self, samples: Samples) -> np.ndarray:  # noqa: ARG002
            classes = np.zeros((3, FRAMES), np.int64)
            classes[:, :200], classes[:, 200:400], classes[:, 400:] = 1, 4, 2  # first, both, second
            return np.eye(7, dtype=np.float32)[classes]

    class Level:
        name = "level"

        def embed(self, samples: Samples, sample_rate: int) -> np.ndarray:  # noqa: ARG002
            assert len(samples) % 8000 == 0
            return np.array([1, samples.mean(), 0], np.float32)

    wave = np.ones(20 * 16_000, np.float32)
    local = find_local_speakers(wave, 16_000, Alternating(), Level())
    assert local.embeddings.shape == (6, 3)
    assert local.local.tolist() == [0, 1] * 3
    assert local.overlap.max() == pytest.approx(1, abs=1e-4)
    assert len(local.overlap) == int(np.ceil(20 / FRAME_SECONDS))


def test_silence_has_no_speakers() -> None:
    class Silent(SegmentationNetwork):
        def segment(self, samples: Samples) -> np.ndarray:  # noqa: ARG002
            return np.eye(7, dtype=np.float32)[np.zeros((2, FRAMES), np.int64)]

    class Unheard:
        name = "unheard"

        def embed(self, samples: Samples, sample_rate: int) -> np.ndarray:
            raise AssertionError((len(samples), sample_rate))

    turns = label_speakers(find_local_speakers(np.zeros(15 * 16_000, np.float32), 16_000, Silent(), Unheard()))
    assert not turns.active.any()
    assert turns.speaker_shares(0, 15) == {}
    assert turns.overlap_share(0, 15) == 0


def test_the_segmentation_network_has_589_frames_in_10_seconds() -> None:
    probabilities = SegmentationNetwork().eval().segment(np.zeros(12 * 16_000, np.float32))
    assert probabilities.shape == (2, FRAMES, 7)
    assert probabilities.sum(-1) == pytest.approx(1, abs=1e-4)
    assert frame_times(FRAMES)[-1] < 10
