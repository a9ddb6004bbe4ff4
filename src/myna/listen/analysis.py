"""Analysis of recordings: voice activity, speakers, noise, music, quality, duplicates, text."""

from myna.audio.signal_measures import SpeechSpan
from myna.listen.diarization import (
    LocalSpeakers,
    SpeakerTurn,
    SpeakerTurns,
    cluster_embeddings,
    find_local_speakers,
    label_speakers,
    link_speakers,
    speaker_turns,
)
from myna.listen.fingerprints import DuplicateMatch, bit_error, find_duplicates, find_retakes, fingerprint
from myna.listen.loudness import integrated_loudness
from myna.listen.measures import batches, embed_speaker, embed_speakers, map_batches, measure
from myna.listen.models import AnalysisModels, AnalysisSettings, Capability, capabilities, load_models
from myna.listen.voice_activity import voice_activity
from myna.text.spoken_forms import normalise_spoken_text

__all__ = [
    "AnalysisModels",
    "AnalysisSettings",
    "Capability",
    "DuplicateMatch",
    "LocalSpeakers",
    "SpeakerTurn",
    "SpeakerTurns",
    "SpeechSpan",
    "batches",
    "bit_error",
    "capabilities",
    "cluster_embeddings",
    "embed_speaker",
    "embed_speakers",
    "find_duplicates",
    "find_local_speakers",
    "find_retakes",
    "fingerprint",
    "integrated_loudness",
    "label_speakers",
    "link_speakers",
    "load_models",
    "map_batches",
    "measure",
    "normalise_spoken_text",
    "speaker_turns",
    "voice_activity",
]
