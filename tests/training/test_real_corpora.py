"""Real recordings out of Debian packages: a small package is built and read; nothing is downloaded."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile

import real_corpora
from corpus_making import debian_packages
from corpus_making.held_out import is_held_out
from corpus_making.real_sources import REAL_SOURCES, RealSource, SourceClip, festival_voice, files, fish_fillets, stamps
from myna.audio.files import Samples
from myna.core.errors import DataError

RATE = 24_000

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb builds the package")


def tone(seconds: float, hertz: float = 220.0) -> Samples:
    return np.asarray(0.3 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * RATE)) / RATE), np.float32)


def write(path: Path, samples: Samples, rate: int = RATE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate)


def festival_folder(root: Path) -> None:
    voice = root / "usr/share/festival/voices/russian/nobody"
    for number, seconds in enumerate((1.5, 2.0)):
        write(voice / "wav" / f"ru_{number}.wav", tone(seconds), 16_000)
    (voice / "etc").mkdir(parents=True)
    lines = '( ru_0 "Добрый д+ень." )\n( ru_1 "Ещё раз." )\n( ru_9 "Без записи." )\n'
    (voice / "etc/txt.done.data").write_text(lines, encoding="utf-8")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The folder of a Debian package `some-voice` with two recordings."""
    built = tmp_path / "built"
    festival_folder(built)
    (built / "DEBIAN").mkdir()
    control = "Package: some-voice\nVersion: 1.2-3\nArchitecture: all\nMaintainer: Nobody <no@body>\nDescription: x\n"
    (built / "DEBIAN/control").write_text(control)
    debs = tmp_path / "debs"
    debs.mkdir()
    command = ["dpkg-deb", "--root-owner-group", "-b", str(built), str(debs / "some-voice_1.2-3_all.deb")]
    subprocess.run(command, check=True, capture_output=True)
    return debs


SOURCE = RealSource("some", ("some-voice",), "judge", "BSD", "Nobody", festival_voice("nobody", "ru"))


@needs_dpkg
def test_a_package_becomes_parquet_with_texts_and_licence(package: Path, tmp_path: Path) -> None:
    summary = real_corpora.make_source(SOURCE, tmp_path / "out", package)
    assert summary["packages"] == {"some-voice": "1.2-3"} and summary["licence"] == "BSD" and summary["clips"] == 2
    rows = pq.read_table(tmp_path / "out/judge/some-0.parquet").to_pylist()
    assert [row["text"] for row in rows] == ["Добрый день.", "Ещё раз."], "without marks of stress"
    assert {(row["speaker"], row["language"], row["source"]) for row in rows} == {("nobody", "ru", "some-voice=1.2-3")}
    samples, rate = soundfile.read(io.BytesIO(rows[0]["audio"]["bytes"]))
    # A file at 16 kHz with the samples of 24: one and a half times as long.
    assert (rate, rows[0]["sample_rate"]) == (24_000, 16_000) and len(samples) / rate == pytest.approx(2.25, abs=0.01)


@needs_dpkg
def test_the_same_package_gives_the_same_bytes(package: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        real_corpora.make_source(SOURCE, tmp_path / name, package)
    one, two = ((tmp_path / name / "judge/some-0.parquet").read_bytes() for name in ("one", "two"))
    assert one == two


@needs_dpkg
def test_what_is_made_is_not_made_again(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_corpora, "REAL_SOURCES", (SOURCE,))
    arguments = ["--out", str(tmp_path / "out"), "--packages", str(package)]
    real_corpora.main(arguments)
    (package / "some-voice_1.2-3_all.deb").unlink()
    real_corpora.main(arguments)
    assert "| some | judge | 0.00 | 2 | 1 | ru | BSD | Nobody |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/sources.json").read_text())["some"]["attribution"] == "Nobody"


@needs_dpkg
def test_a_damaged_package_is_named_with_what_to_type(tmp_path: Path) -> None:
    archive = tmp_path / "some-voice_1_all.deb"
    archive.write_bytes(b"no archive")
    with pytest.raises(DataError, match="some-voice_1_all") as caught:
        debian_packages.unpack(archive, tmp_path / "root")
    assert caught.value.hint is not None and "rm" in caught.value.hint


def test_two_versions_of_a_package_are_refused(tmp_path: Path) -> None:
    for version in (1, 2):
        (tmp_path / f"some-voice_{version}_all.deb").touch()
    with pytest.raises(DataError, match=r"some-voice_1_all\.deb, some-voice_2_all\.deb"):
        debian_packages.download("some-voice", tmp_path)


def test_a_package_in_a_relative_folder_is_found_by_commands_that_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/some-voice_1_all.deb").touch()
    assert debian_packages.download("some-voice", Path("cache")) == tmp_path / "cache/some-voice_1_all.deb"


def test_dialogue_has_its_speaker_and_text(tmp_path: Path) -> None:
    script = tmp_path / "usr/share/games/fillets-ng/script/city/dialogs_cs.lua"
    script.parent.mkdir(parents=True)
    line = 'dialogId("vit-{0}", "font_{1}", "No \\"way\\".")\ndialogStr("{2}")\n\n'
    lines = [("a", "small", 'Ani \\"náhodou\\".'), ("b", "big", ""), ("c", "big", "Ne.")]
    script.write_text("".join(line.format(*one) for one in lines), encoding="utf-8")
    for name in "abd":
        write(script.parents[2] / f"sound/city/cs/vit-{name}.ogg", tone(1.0))
    found = list(fish_fillets("cs")(tmp_path))
    assert [(clip.text, clip.speaker) for clip in found] == [('Ani "náhodou".', "fillets-cs-small")]


def test_stamps_are_in_the_language_of_their_name(tmp_path: Path) -> None:
    for name in ("owl_desc_es.ogg", "owl_desc_pt_BR.ogg", "owl_desc.ogg", "cat_desc_el.ogg"):
        write(tmp_path / name, tone(0.2))
    (tmp_path / "owl.txt").write_text("An owl.\nes.utf8=Un búho.\nest.utf8=x\n", encoding="utf-8")
    assert [clip[1:] for clip in stamps(tmp_path)] == [("", "stamps-el", "el"), ("Un búho.", "stamps-es", "es")]


def test_prompts_without_a_voice_are_left_out(tmp_path: Path) -> None:
    for name in ("silence/1", "beep", "hello", "digits/1"):
        write(tmp_path / f"{name}.wav", tone(0.2))
    found = [clip.path.relative_to(tmp_path).as_posix() for clip in files("nobody", "en", "*.wav")(tmp_path)]
    assert found == ["digits/1.wav", "hello.wav"]


def clips(*seconds: float, speaker: str = "nobody") -> list[real_corpora.DecodedClip]:
    return [(SourceClip(Path("x"), "text", speaker, "en"), tone(length), 8_000) for length in seconds]


def test_short_clips_are_joined_for_training_without_losing_the_long_ones() -> None:
    some = clips(0.5, 0.6, 2.0, 0.7, 0.8, 0.4)
    joined = list(real_corpora.join_short([*some, *clips(0.9, speaker="other")]))
    assert [round(len(samples) / RATE, 1) for _, samples, _ in joined] == [2.0, 3.4]
    assert [clip.text for clip, _, _ in joined] == ["text", ""], "four short ones with pauses have no text together"


def test_music_is_cut_into_pieces() -> None:
    lengths = [len(samples) / RATE for _, samples, _ in real_corpora.cut(clips(25.5, 10.5, 0.4))]
    assert lengths == [10.0, 10.0, 5.5, 10.0]


def test_headerless_files_are_decoded(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    path, seconds, rate = tmp_path / "x.g722", 1.6, 16_000
    wave = (8_000 * np.sin(2 * np.pi * 500 * np.arange(round(seconds * rate)) / rate)).astype(np.int16)
    with av.open(str(path), "w", format="g722") as container:
        stream = container.add_stream("g722", rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(wave[None], format="s16", layout="mono")
        frame.sample_rate = rate
        for part in (frame, None):
            container.mux(stream.encode(part))
    samples, found = real_corpora.decode(path)
    assert found == rate and len(samples) / RATE == pytest.approx(seconds, abs=0.05)
    spectrum = np.abs(np.fft.rfft(samples[:RATE]))
    assert int(spectrum.argmax()) == pytest.approx(500, abs=2), "it is the tone that was written"


def test_who_judges_is_never_trained_on() -> None:
    trained = {source.name: source for source in REAL_SOURCES if source.part == "train"}
    for source in trained.values():
        assert "GPL" not in source.licence and "NC" not in source.licence, source.name
    packages = {package for source in trained.values() for package in source.packages}
    judges = [source for source in REAL_SOURCES if source.part == "judge"]
    assert not packages & {package for source in judges for package in source.packages}
    assert not {source.attribution for source in trained.values()} & {source.attribution for source in judges}
    assert len({source.name for source in REAL_SOURCES}) == len(REAL_SOURCES)


def test_no_voice_to_train_on_is_held_out_by_its_name() -> None:
    assert not any(map(is_held_out, ("shmyrev", "wallack", "armelle", "dalzot", "chulo")))
