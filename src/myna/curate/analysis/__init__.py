"""Analysis of recordings: voice activity, speakers, noise, music, quality, duplicates, text."""

from myna.audio.signal_measures import SpeechSpan
from myna.curate.analysis.diarization import (
    LocalSpeakers,
    SpeakerTurn,
    SpeakerTurns,
    cluster_embeddings,
    find_local_speakers,
    label_speakers,
    link_speakers,
    speaker_turns,
)
from myna.curate.analysis.fingerprints import DuplicateMatch, bit_error, find_duplicates, find_retakes, fingerprint
from myna.curate.analysis.loudness import integrated_loudness
from myna.curate.analysis.measures import batches, embed_speaker, embed_speakers, map_batches, measure
from myna.curate.analysis.models import AnalysisModels, AnalysisSettings, Capability, capabilities, load_models
from myna.curate.analysis.spoken_text import normalise_spoken_text
from myna.curate.analysis.voice_activity import voice_activity

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
