"""First pass over one part: voice activity, speakers, words, cuts, a second transcription and every raw measure.

`run_first_pass` is a pure function of the part's samples, the models and the settings. `CurationWorker` runs it in
processes and writes each result to a file: under a temporary name, flushed and renamed. A killed process loses only its
current part, and repeated work gives equal bytes.
"""

import hashlib
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from myna.audio.files import LISTENING_RATE, FloatArray, Samples
from myna.audio.signal_measures import noise_floor_db, speech_level_db
from myna.core.device import memory_limit, pick_device, release_free_memory
from myna.core.io import absolute_folder, atomic_write, fsync
from myna.curate import cutting, recordings
from myna.curate.cutting import CutClip, RecognisedWord, SpanMs, Stretch
from myna.curate.models import CurationModels, OpenModels, measure, models_folder
from myna.curate.recordings import CURATION_RATE, SAMPLES_PER_MS, DecodedRecording, Part, Pcm, as_samples
from myna.curate.settings import CurateSettings
from myna.curate.texts import measure_text
from myna.data.segments import SCHEMA, empty_row
from myna.listen.asr import TimedTranscript
from myna.listen.diarization import SpeakerTurns, find_local_speakers, label_speakers
from myna.listen.fingerprints import fingerprint
from myna.listen.speaker_encoders import unit_vectors
from myna.text.spoken_forms import normalise_spoken_text

EDGE_MS = 1500
"""Milliseconds at the start and at the end of a clip that are compared with its speaker."""
CHUNK_PAD_MS = 200
"""Milliseconds around the speech that is recognised at once."""
MAX_EDGE_GAP_MS = 500
"""Maximum silence beside a clip that its speech is compared with."""
MIN_MEASURED_GAP_MS = 1000
"""Minimum length of a gap that is tested for music."""
UNKNOWN_SPEAKER = ""
MIN_VOICE_MS = 1000
"""Minimum length of a stretch whose voice may overrule the speaker turns."""
SAME_VOICE_COSINES = (1.0, 2.5), (0.40, 0.60)
"""Seconds of the shorter of two stretches, and the cosine below which they are not joined. This separates one in six
neighbours of one speaker, which costs a cut, and three in four pairs of speakers that the speaker turns confused."""
MIN_OVERLAP_SECONDS = 0.1
"""Seconds of overlapped speech from which a stretch is not joined with others."""
CLEAR_COSINE_MARGIN = 0.1
"""Cosine margin by which another speaker must be closer to overrule the speaker turns."""


def segment_id(recording_hash: str, start_ms: int, end_ms: int) -> str:
    return hashlib.sha256(f"{recording_hash} {start_ms} {end_ms}".encode()).hexdigest()[:16]


def run_first_pass(part: Part, pcm: Pcm, models: CurationModels, settings: CurateSettings) -> pa.Table:
    """Return the clips and gaps that tile a part, without decision, name of the recording or linked speaker."""
    length = part.end_ms - part.start_ms
    speech, speakers = _find_speech(pcm, length, models, settings)
    chunks = _transcribe(pcm, speech, models, settings.listen.language)
    voices = list(models.embed(_cut(pcm, *span) for span in speech))
    stretches = _stretches(speech, chunks, voices, speakers)
    clips = cutting.cut_clips(stretches, length, settings.cut)
    sources = [
        [
            chunk.transcript
            for chunk in chunks
            if chunk.start_ms < clip.end_of_speech and clip.start_of_speech < chunk.end_ms
        ]
        for clip in clips
    ]
    languages = (source[0].language or None for source in sources)
    audio = (_cut(pcm, clip.start_ms, clip.end_ms) for clip in clips)
    checks = models.check(zip(audio, languages, strict=True))
    rows = [
        _clip_row(part, pcm, clip, source, check, models, speakers)
        for clip, source, check in zip(clips, sources, checks, strict=True)
    ]
    for row, voice in zip(rows, _clip_voices(clips, speech, voices), strict=True):
        row["embedding"] = voice
    _compare_ends(rows, pcm, part, models)
    edges = [0, *(time for clip in clips for time in (clip.start_ms, clip.end_ms)), length]
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        if end > start:
            rows.append(_segment(part, start, end, "gap"))
        if end - start >= MIN_MEASURED_GAP_MS and models.music is not None:
            rows[-1]["music_share"] = models.music.music_share(_cut(pcm, start, end), CURATION_RATE)
            release_free_memory()
    rows.sort(key=lambda row: row["start_ms"])
    return pa.Table.from_pylist([empty_row() | row for row in rows], SCHEMA)


def _find_speech(
    pcm: Pcm, length_ms: int, models: CurationModels, settings: CurateSettings
) -> tuple[list[SpanMs], SpeakerTurns | None]:
    """Find speech and speakers of the whole part at the rate of their models, which takes all samples as floats."""
    wave = recordings.resample_pcm(pcm, LISTENING_RATE)
    spans = models.find_speech(wave, LISTENING_RATE)
    found = [(round(1000 * start), round(1000 * end)) for start, end in spans]
    speech = cutting.merge_speech(found, length_ms, round(1000 * settings.cut.min_gap))
    speakers = None
    if models.segmentation is not None and models.speaker_encoder is not None:
        local = find_local_speakers(wave, LISTENING_RATE, models.segmentation, models.speaker_encoder)
        speakers = label_speakers(local)
    del wave
    release_free_memory()
    return speech, speakers


def _cut(pcm: Pcm, start_ms: int, end_ms: int) -> Samples:
    return as_samples(pcm[max(0, start_ms) * SAMPLES_PER_MS : end_ms * SAMPLES_PER_MS])


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Stretches that were recognised at once."""

    start_ms: int
    end_ms: int
    first: int
    after: int
    transcript: TimedTranscript


def _transcribe(pcm: Pcm, speech: list[SpanMs], models: CurationModels, language: str) -> list[_Chunk]:
    ranges = list(cutting.chunk_speech(speech))
    spans = []
    for first, after in ranges:
        before = speech[first - 1][1] if first else 0
        behind = speech[after][0] if after < len(speech) else len(pcm) // SAMPLES_PER_MS
        start = max(before, speech[first][0] - CHUNK_PAD_MS)
        spans.append((start, min(behind, speech[after - 1][1] + CHUNK_PAD_MS)))
    transcripts = models.transcribe((_cut(pcm, *span) for span in spans), language or None)
    chunks = [_Chunk(*span, *one, text) for span, one, text in zip(spans, ranges, transcripts, strict=True)]
    release_free_memory()
    return chunks


def _stretches(
    speech: list[SpanMs], chunks: list[_Chunk], voices: list[FloatArray], speakers: SpeakerTurns | None
) -> list[Stretch]:
    words: list[tuple[RecognisedWord, ...]] = []
    for chunk in chunks:
        offset = chunk.start_ms
        recognised = [
            RecognisedWord(word.text, offset + round(1000 * word.start), offset + round(1000 * word.end))
            for word in chunk.transcript.words
        ]
        words += cutting.assign_words(recognised, speech[chunk.first : chunk.after])
    new_voice = [False]
    for one, two, voice, other in zip(speech, speech[1:], voices, voices[1:], strict=False):
        shorter = min(one[1] - one[0], two[1] - two[0])
        same = float(np.interp(shorter / 1000, *SAME_VOICE_COSINES))
        new_voice.append(shorter >= MIN_VOICE_MS and cosine(voice, other) < same)
    overlapped = [
        speakers is not None
        and speakers.overlap_share(start / 1000, end / 1000) * (end - start) / 1000 >= MIN_OVERLAP_SECONDS
        for start, end in speech
    ]
    labels = _stretch_speakers(speech, voices, speakers)
    columns = zip(speech, labels, words, overlapped, new_voice, strict=False)
    return [Stretch(start, end, label, group, overlap, new) for (start, end), label, group, overlap, new in columns]


def _stretch_speakers(speech: list[SpanMs], voices: list[FloatArray], speakers: SpeakerTurns | None) -> list[str]:
    """Return the main speaker of each stretch by the speaker turns, unless the voice is clearly another speaker's."""
    if speakers is None:
        return [UNKNOWN_SPEAKER] * len(speech)
    labels = []
    for (start, end), voice in zip(speech, voices, strict=True):
        shares = speakers.speaker_shares(start / 1000, end / 1000)
        label = max(shares, key=lambda speaker: shares[speaker]) if shares else None
        if len(speakers.embeddings) and end - start >= MIN_VOICE_MS:
            cosines = [cosine(voice, mean) for mean in speakers.embeddings]
            nearest = int(np.argmax(cosines))
            if label is None or cosines[nearest] > cosines[label] + CLEAR_COSINE_MARGIN:
                label = nearest
        labels.append(UNKNOWN_SPEAKER if label is None else str(label))
    return labels


def _clip_voices(clips: list[CutClip], speech: list[SpanMs], voices: list[FloatArray]) -> list[FloatArray]:
    """Return the mean embedding of the stretches of each clip."""
    voice_of = dict(zip(speech, voices, strict=True))
    means = []
    for clip in clips:
        spans = [(one.start_ms, one.end_ms) for one in clip.stretches]
        weights = [end - start for start, end in spans]
        mean = np.average([voice_of[span] for span in spans], axis=0, weights=weights)
        means.append(unit_vectors(mean))
    return means


def _clip_row(
    part: Part,
    pcm: Pcm,
    clip: CutClip,
    sources: list[TimedTranscript],
    check_text: str,
    models: CurationModels,
    speakers: SpeakerTurns | None,
) -> dict[str, Any]:
    language, audio = sources[0].language, _cut(pcm, clip.start_ms, clip.end_ms)
    overlap = speakers.overlap_share(clip.start_ms / 1000, clip.end_ms / 1000) if speakers is not None else math.nan
    row = _segment(part, clip.start_ms, clip.end_ms, "clip") | measure(audio, CURATION_RATE, models)
    release_free_memory()  # after each clip: takes 10 ms, and otherwise 100 MB and more stay fragmented
    row |= {
        "local_speaker": clip.stretches[0].speaker,
        "text": clip.text,
        "text_source": "recognised" if clip.text else "",
        "normalised_text": normalise_spoken_text(clip.text, language) if clip.text else "",
        "check_text": check_text,
        "language": language,
        "language_probability": min(source.language_probability for source in sources),
        "avg_log_prob": min(source.avg_log_prob for source in sources),
        "compression_ratio": max(source.compression_ratio for source in sources),
        "overlap_share": overlap,
        "clipped_share": _clipped_share(part, row["start_ms"], row["end_ms"]),
        "start_gap_ms": clip.start_gap_ms,
        "end_gap_ms": clip.end_gap_ms,
        "gap_snr_db": _gap_snr_db(pcm, clip),
        "fingerprint": fingerprint(audio, CURATION_RATE),
    }
    return row | measure_text(clip.text, check_text, language, len(audio) / CURATION_RATE)


def _segment(part: Part, start_ms: int, end_ms: int, kind: str) -> dict[str, Any]:
    start, end = part.start_ms + start_ms, part.start_ms + end_ms
    return {
        "id": segment_id(part.recording_hash, start, end),
        "recording_hash": part.recording_hash,
        "part": part.id,
        "start_ms": start,
        "end_ms": end,
        "kind": kind,
        "audio": part.audio,
        "audio_start_ms": start_ms,
    }


def _clipped_share(part: Part, first: int, last: int) -> float:
    """Return the clipped share of a span of the recording from the shares of the seconds that it touches."""
    seconds = range(first // 1000, (last - 1) // 1000 + 1)
    covered = [min(last, 1000 * (second + 1)) - max(first, 1000 * second) for second in seconds]
    shares = [part.clipped.get(str(second), 0.0) for second in seconds]
    return sum(share * span for share, span in zip(shares, covered, strict=True)) / (last - first)


def _gap_snr_db(pcm: Pcm, clip: CutClip) -> float:
    """Return the level of the speech above the louder of the silences at its ends, each at its quietest."""
    start, end = clip.start_of_speech, clip.end_of_speech
    before = _cut(pcm, start - min(clip.start_gap_ms, MAX_EDGE_GAP_MS), start)
    behind = _cut(pcm, end, end + min(clip.end_gap_ms, MAX_EDGE_GAP_MS))
    floor = max(noise_floor_db(before, CURATION_RATE), noise_floor_db(behind, CURATION_RATE))
    return speech_level_db(_cut(pcm, start, end), CURATION_RATE) - floor


def _compare_ends(rows: list[dict[str, Any]], pcm: Pcm, part: Part, models: CurationModels) -> None:
    """Set the cosines of the first and last 1.5 s of each clip with the mean embedding of its speaker in the part."""
    by_speaker: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if len(row["embedding"]):
            by_speaker.setdefault(row["local_speaker"], []).append(row)
    pieces: list[tuple[dict[str, Any], str, SpanMs, FloatArray]] = []
    for group in by_speaker.values():
        weights = [row["end_ms"] - row["start_ms"] for row in group]
        centroid = np.average([row["embedding"] for row in group], axis=0, weights=weights)
        for row in group:
            start = row["start_ms"] - part.start_ms
            end = row["end_ms"] - part.start_ms
            pieces.append((row, "start", (start, min(end, start + EDGE_MS)), centroid))
            pieces.append((row, "end", (max(start, end - EDGE_MS), end), centroid))
    embeddings = models.embed(_cut(pcm, *span) for _, _, span, _ in pieces)
    for (row, edge, _, centroid), embedding in zip(pieces, embeddings, strict=True):
        row[f"{edge}_speaker_similarity"] = cosine(embedding, centroid)


def cosine(one: npt.ArrayLike, other: npt.ArrayLike) -> float:
    """Return the cosine of two embeddings; NaN if one is zero."""
    first, second = np.asarray(one, np.float64), np.asarray(other, np.float64)
    norm = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / norm if norm else math.nan


WORKER_BYTES = 2 << 30
"""Maximum memory of a worker."""
GPU_WORKER_BYTES = 8 << 30
"""GPU memory of a worker: eight with whisper-base had at most 51.2 GiB of an H200, 6.4 each."""


def with_absolute_paths(settings: CurateSettings) -> CurateSettings:
    """Return settings for workers, which may have another working directory."""
    listen = settings.listen
    absolute = {
        "asr": absolute_folder(listen.asr),
        "check_asr": listen.check_asr and absolute_folder(listen.check_asr),
        "models": str(models_folder(listen).absolute()),
    }
    return settings.model_copy(update={"listen": listen.model_copy(update=absolute)})


def default_workers(device: str) -> int:
    """Return one process per core, as far as main memory and free GPU memory allow; one thread each wastes least."""
    fitting = memory_limit() // WORKER_BYTES
    if (target := pick_device(device)).type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(target)
        fitting = min(fitting, free // GPU_WORKER_BYTES)
    return max(1, min(os.cpu_count() or 1, fitting))


def findings_path(folder: Path, part: Part) -> Path:
    return folder / recordings.PARTS_FOLDER / f"{part.id}.parquet"


class CurationWorker:
    """Worker that decodes recordings and runs the first pass with models opened at first use."""

    def __init__(self, folder: Path, settings: CurateSettings, open_models: OpenModels) -> None:
        self._folder, self._settings, self._open_models = folder, settings, open_models

    @cached_property
    def models(self) -> CurationModels:
        import torch

        torch.set_num_threads(1)
        return self._open_models(self._settings.listen, 1)

    def model_names(self) -> list[str]:
        return self.models.names

    def decode(self, path: Path) -> DecodedRecording:
        return recordings.decode_recording(path, self._folder, self._settings.listen, self.models.find_speech)

    def run_first_pass(self, part: Part) -> str:
        """Run the first pass over a part, write the result, and return the part's id."""
        pcm, _ = soundfile.read(self._folder / part.audio, dtype="int16")
        table = run_first_pass(part, np.asarray(pcm, np.int16), self.models, self._settings)
        path = findings_path(self._folder, part)
        with atomic_write(path) as temporary:
            pq.write_table(table, temporary, compression="zstd")
            fsync(temporary)
        fsync(path.parent)
        return part.id
