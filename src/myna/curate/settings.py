"""Settings of a curation: models, cuts, and what is kept.

`listen` and `cut` belong to the first pass: changing them means listening again. All others decide again in seconds.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from myna.core import config
from myna.core.config import Count, Positive, SettingOverrides, Settings, Share
from myna.core.errors import ConfigError
from myna.core.io import save_text
from myna.data.segments import SETTINGS_FILE

Cosine = Annotated[float, Field(ge=-1, le=1)]


class ListenSettings(Settings):
    """Models of the first pass."""

    asr: str = "base"
    """Name or folder of a Whisper for faster-whisper; `none` works without text, and then keeps no clip."""
    check_asr: str | None = None
    """Another Whisper for the second transcription of each clip; by default the first one."""
    models: str | None = None
    """Folder of the models of `myna setup curation`; by default in the user's cache folder."""
    language: str = ""
    """Language of the recordings, such as `en`; by default it is detected for each stretch of speech."""
    device: str = Field(default="cpu", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
    """Device of the models."""
    part_minutes: Positive = 30.0
    """Longest part of a recording that is worked on at once."""
    part_pause: Positive = 0.5
    """Seconds of pause at which a recording is cut into parts."""


class CutSettings(Settings):
    """Start and end of clips."""

    min_gap: Positive = 0.15
    """Seconds of silence that a cut needs; it lies in the middle of them."""
    edge_silence: Positive = 0.1
    """Seconds of silence kept at either end, or less if the silence is shorter."""
    seconds: tuple[Positive, Positive] = (3.0, 12.0)
    """Lengths that sentences are joined to."""
    hard_seconds: tuple[Positive, Positive] = (1.0, 20.0)
    """Shortest and longest clip that is made, as far as silences allow."""
    max_pause: Positive = 1.0
    """Longest silence within a clip, in seconds."""


class SpeakerSettings(Settings):
    """Speakers of the recordings."""

    number: Count | None = None
    """Number of speakers in all recordings together; by default found by `threshold`."""
    threshold: Cosine | None = None
    """Cosine from which two voices are one speaker; by default the speaker encoder's own."""
    enrolment: tuple[str, ...] = ()
    """Recordings of the speakers to keep, each as FILE or NAME=FILE; all others are dropped."""
    enrolment_threshold: Cosine = 0.45
    """Minimum cosine with an enrolment for a speaker to be the enrolled one."""
    min_share: Share = 0.02
    """Minimum share of speech that a speaker needs in one of the recordings, or 20 s of it; clips of others are `other
    speaker`."""


class KeepSettings(Settings):
    """Conditions for keeping a clip. A missing measure drops nothing."""

    seconds: tuple[Positive, Positive] = (1.0, 20.0)
    """Shortest and longest clip."""
    max_overlap_share: Share = 0.02
    """Share of the clip in which two people speak."""
    max_music_share: Share = 0.1
    """Share of the clip that is music."""
    min_snr_db: float = 15.0
    """Speech above everything else, in dB, unless the background is clean by `clean_dnsmos_bak`."""
    clean_dnsmos_bak: float = 3.5
    """Predicted quality of the background, from 1 to 5, from which it is clean: a low `snr_db` is then ignored, because
    its denoiser also removes parts of clean voices."""
    min_gap_snr_db: float = 20.0
    """Speech above the silences that the clip is cut in, in dB: they reveal music or noise that begins in a clip."""
    min_bandwidth_hz: float = 7000.0
    """Highest frequency in the clip: a telephone has 3,400."""
    max_clipped_share: Share = 0.001
    """Share of samples cut off at full scale."""
    min_dnsmos_ovrl: float = 3.0
    """Predicted quality, from 1 to 5, of a clip whose background is not clean by `clean_dnsmos_bak`."""
    min_clean_dnsmos_ovrl: float = 2.5
    """Predicted quality, from 1 to 5, of a clip whose background is clean. Clean home recordings score 2.5 to 3.0;
    clips with music or noise score lower."""
    min_speaker_similarity: Cosine = 0.25
    """Cosine of the clip, and of its first and last 1.5 s, with its speaker."""
    languages: tuple[str, ...] = ()
    """Languages to keep; by default the one of most of the speech."""
    min_language_probability: Share = 0.8
    """The recogniser's certainty of the language."""
    min_avg_log_prob: float = -1.0
    """The recogniser's certainty of the text, as a mean log probability."""
    max_compression_ratio: Positive = 2.4
    """Compression ratio of the letters of the text by zlib: more is a loop."""
    min_unique_word_share: Share = 0.4
    """Share of different words in texts of ten words and more: less is a loop."""
    max_cer: Annotated[float, Field(ge=0)] = 0.1
    """Character error rate between both transcriptions."""
    max_edge_cer: Annotated[float, Field(ge=0)] = 0.2
    """Character error rate of the first and the last 12 characters: more is a cut word."""
    characters_per_second: tuple[float, float] = (4.0, 25.0)
    """Slowest and fastest speech; a Chinese or Japanese character counts as 2.6."""
    pace_iqr: Positive | None = 3.0
    """Distance from the quartiles of the speaker's paces, in interquartile ranges, from which a pace is implausible."""
    duplicates: bool = False
    """Keep clips that repeat another one."""


class TextSettings(Settings):
    """Spoken form of the text, beside the recognised text."""

    diacritics: bool = False
    """Add vowel signs to the normalised text of kept Arabic clips, by text2tashkeel."""


class LoudnessSettings(Settings):
    """Loudness of the exported clips: one gain for each speaker and recording."""

    target_lufs: Annotated[float, Field(le=0)] | None = -23.0
    """Loudness by BS.1770; null leaves it unchanged."""
    max_peak_dbfs: Annotated[float, Field(le=0)] = -1.0
    """Maximum peak that a gain may lead to."""


class HoldOutSettings(Settings):
    """Clips to hold out, by the rules of `myna split`."""

    texts: Annotated[int, Field(ge=0)] = 10
    """Texts to hold out, but never more than a tenth of them."""
    speakers: Annotated[int, Field(ge=0)] = 0
    """Speakers to hold out."""
    seed: Annotated[int, Field(ge=0)] = 0


class CurateSettings(Settings):
    """Complete settings of a curation."""

    listen: ListenSettings = ListenSettings()
    cut: CutSettings = CutSettings()
    speakers: SpeakerSettings = SpeakerSettings()
    keep: KeepSettings = KeepSettings()
    text: TextSettings = TextSettings()
    loudness: LoudnessSettings = LoudnessSettings()
    split: HoldOutSettings = HoldOutSettings()

    def first_pass_hash(self, models: Sequence[str]) -> str:
        """Return the identity of everything that the rows of a part depend on, besides its audio."""
        listen = self.listen.model_dump(include={"language"})
        tree = {"listen": listen, "cut": self.cut.model_dump(mode="json"), "models": list(models)}
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        tree = self.model_dump(mode="json")
        save_text(folder / SETTINGS_FILE, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def load_curate_settings(
    folder: Path | None, overrides: Sequence[str] = (), file: Path | None = None
) -> CurateSettings:
    """Return the settings in `file`, else those the folder was made with, with `--set KEY=VALUE` applied."""
    path = file or (folder / SETTINGS_FILE if folder is not None else None)
    tree: dict[str, Any] = {}
    if path is not None and (file is not None or path.exists()):
        try:
            tree = config.read_settings_tree(
                path, CurateSettings, hint="write KEY: VALUE lines, or leave --settings away"
            )
        except FileNotFoundError:
            raise ConfigError(f"there is no file {path}", hint="check the path given with --settings") from None
    for setting in overrides:
        config.override(tree, setting, CurateSettings)
    return config.parse_settings(
        CurateSettings, tree, where=f"{path or 'settings'} with --set" if overrides else str(path)
    )


def split_enrolment(enrolment: str) -> tuple[str, Path]:
    """Return the name and the file of an enrolment, FILE or NAME=FILE."""
    name, separator, file = enrolment.partition("=")
    return (name, Path(file)) if separator else (Path(enrolment).stem, Path(enrolment))


def curation_settings(
    folder: Path | None,
    *,
    asr: str | None = None,
    language: str | None = None,
    speakers: int | None = None,
    enrol: Sequence[str] = (),
    settings_file: str | os.PathLike[str] | None = None,
    settings: SettingOverrides = (),
) -> CurateSettings:
    """Return the settings of a curation: the named ones are short for `listen.asr`, `listen.language`,
    `speakers.number` and `speakers.enrolment`."""
    named: dict[str, Any] = {"listen.asr": asr, "listen.language": language, "speakers.number": speakers}
    named["speakers.enrolment"] = list(enrol) or None
    shortcuts = {key: value for key, value in named.items() if value is not None}
    overrides = [*config.format_overrides(shortcuts), *config.format_overrides(settings)]
    return load_curate_settings(folder, overrides, Path(settings_file) if settings_file is not None else None)
