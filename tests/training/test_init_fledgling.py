"""Fledgling at toy size from nothing to speech: egg, codes, training with a stop on the way, and the shipped folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import HiggsAudioV2ForConditionalGeneration

import export_fledgling
import myna
import myna.models
from corpus_making.corpus_folder import CorpusClip, CorpusFolder
from encode import assigned_clips, encode, open_codec_of
from init_fledgling import SIZE, Size, fledgling_config, fledgling_tokenizer, make
from mix_corpora import write_mix
from myna.commands.display import TrainingDisplay
from myna.core.config import load_recipe
from myna.core.errors import CheckpointError, ModelError
from myna.core.io import file_hash
from myna.data import encoding
from myna.data.codec import encode_equal_lengths
from myna.data.dataset import PreparedDataset
from myna.data.manifest import read_manifest
from myna.models import open_family
from myna.models.higgs_v2.checkpoint import check_tokenizer, meta_model
from myna.models.mel_codec import MelCodec, MelCodecConfig, MelCodecNetwork, save_mel_codec
from myna.models.ref import ModelRef
from myna.speak.loading import load_engine
from myna.speak.request import ReferenceRecording, SpeechRequest
from tests.command_line import run_command
from tests.tone_corpus import tone_speech
from train_codec import LARGE, TINY

RECIPES = Path(__file__).parents[2] / "training" / "fledgling"
TOY = Size(hidden=32, layers=2, ffn=32, heads=2, keys=1)
NATURAL, ESPEAK = ("spk001", "spk002", "spk025"), ("espeak0-00001", "espeak0-00000")
"""The last of each is held out."""


def test_the_tokenizer_reads_small_letters_of_any_language() -> None:
    tokenizer = fledgling_tokenizer()
    check_tokenizer(fledgling_config(), tokenizer)
    assert len(tokenizer) == 270

    def read(text: str) -> str:
        return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)))

    assert read("The “Bird’s” song — NOW…") == 'the "bird\'s" song - now...'
    assert read("Tiếng VIỆT, لكل إنسان") == "tiếng việt, لكل إنسان"
    assert tokenizer.encode("e\u0301", add_special_tokens=False) == tokenizer.encode("É", add_special_tokens=False)
    assert len(tokenizer.encode("Good morning.", add_special_tokens=False)) == len("Good morning.")


def test_it_fits_the_package_with_its_codec() -> None:
    model = meta_model(fledgling_config(SIZE), text_head=False)
    codec = MelCodecNetwork(LARGE)
    language_model, codec_size = (sum(t.numel() for t in one.state_dict().values()) for one in (model, codec))
    assert language_model == 21_755_520
    assert 2 * (language_model + codec_size) < 79_500_000, "80 MB, less what else is in the folder"


# The whole way


def record(folder: Path, speakers: tuple[str, ...], pitch: float) -> None:
    corpus = CorpusFolder(folder)
    for number, speaker in enumerate(speakers):
        lines = ("good morning", "what a fine day", "follow me", "yes")
        corpus.add(speaker, "en", [CorpusClip(line, tone_speech(line, pitch * (1 + number / 3))) for line in lines])
    corpus.finish()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpora of birds, an egg with an untrained codec, and codes."""
    home = tmp_path_factory.mktemp("fledgling")
    record(home / "natural", NATURAL, 150)
    record(home / "espeak", ESPEAK, 300)
    torch.manual_seed(0)
    save_mel_codec(MelCodecNetwork(TINY), home / "codec")
    make(home / "egg", home / "codec", size=TOY)
    write_mix(home / "natural", home / "espeak", 2, 0.1, home / "mixed")
    parts = {home / "mixed" / part: home / "prepared" / part for part in ("train", "held_out")}
    encode(parts, str(home / "egg"), home / "work", jobs=1, device="cpu")
    return home


def settings(home: Path, **more: object) -> list[str]:
    chosen = {
        "model.source": home / "egg",
        "data.train": home / "prepared/train",
        "data.evaluation": home / "prepared/held_out",
        "data.row_tokens": 2048,
        "data.reference_seconds": [0.1, 15.0],
        "data.workers": 0,
        "train.steps": 6,
        "train.warmup": 2,
        "train.evaluate_every": 3,
        "train.batch_size": 1,
        "train.micro_batch_size": 1,
        "train.device": "cpu",
    } | more
    return [f"{key}={value}" for key, value in chosen.items()]


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    """Trained with a stop by SIGTERM after the second step, as the clock of a machine gives it."""
    out = home / "run"

    class Clock(TrainingDisplay):
        def on_metrics(self, row: dict[str, Any]) -> None:
            if row["step"] == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with Clock() as observer:
        stopped = myna.train(RECIPES / "language_model.yaml", out=out, settings=settings(home), observer=observer)
    assert not stopped.is_finished
    assert myna.resume(out).is_finished
    return out


def test_codes_are_those_of_prepare(home: Path, tmp_path: Path) -> None:
    words = ["prepare", home / "mixed" / "train", "-o", tmp_path / "plain", "-m", home / "egg", "--device", "cpu"]
    result = run_command([str(word) for word in words])
    assert result.exit_code == 0, result.output
    plain, ours = PreparedDataset.open(tmp_path / "plain"), PreparedDataset.open(home / "prepared" / "train")
    assert len(plain.utterances) == len(ours.utterances) == 2 * (2 * 4 + 4)
    same = [plain.codes(one) == ours.codes(ours.by_id(one.id, wanted_by="a test")) for one in plain.utterances]
    assert np.concatenate(same).mean() > 0.999, "but for rounding"


def test_clips_of_one_length_go_through_the_codec_together(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = open_codec_of(str(home / "egg"), "cpu")[1]
    clips = [tone_speech("follow me", pitch)[: 9600 - 960 * (pitch == 500)] for pitch in (200, 300, 400, 500)]
    together: list[int] = []
    network = codec._network  # type: ignore[attr-defined]
    encode_many = network.encode

    def counting(waves: torch.Tensor) -> torch.Tensor:
        together.append(len(waves))
        coded: torch.Tensor = encode_many(waves)
        return coded

    monkeypatch.setattr(network, "encode", counting)
    found = {
        place: codes
        for places, some in encode_equal_lengths(codec, clips, 60)
        for place, codes in zip(places, some, strict=True)
    }
    assert together == [3, 1]
    alone = MelCodec.open(home / "codec")
    assert alone.revision == codec.revision
    same = [found[place] == alone.encode(clip[None])[0] for place, clip in enumerate(clips)]
    assert np.concatenate(same).mean() > 0.99


def test_every_sound_is_one_process_s_own_by_length(home: Path) -> None:
    manifests = [home / "mixed" / part / "manifest.jsonl" for part in ("train", "held_out", "train")]
    lines = [one for manifest in manifests for one in read_manifest(manifest)]
    shares = [assigned_clips(manifests, number, 3) for number in range(3)]
    ours = [(one.audio, one.span) for share in shares for one in share]
    assert len(ours) == len(set(ours)) and set(ours) == {(one.audio, one.span) for one in lines}
    assert len(lines) > len(ours), "however often it is said"
    assert len({audio for audio, _ in ours}) < len(ours), "sounds that begin later are sounds of their own"
    for share in shares:
        sizes = [one.audio.stat().st_size for one in share]
        assert share and sizes == sorted(sizes)


def test_no_sound_is_read_again_for_the_index(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = []

    def hashing(path: Path) -> str:
        read.append(path)
        return file_hash(path)

    monkeypatch.setattr(encoding, "file_hash", hashing)
    parts = {home / "mixed" / part: tmp_path / part for part in ("train", "held_out")}
    encode(parts, str(home / "egg"), tmp_path / "work", jobs=1, device="cpu")
    sounds = {one.audio for source in parts for one in read_manifest(source / "manifest.jsonl")}
    assert sorted(path for path in read if path.suffix == ".wav") == sorted(sounds), "each of them once"
    for part, out in parts.items():
        assert [one.id for one in read_manifest(out / "manifest.jsonl")] == [
            one.id for one in read_manifest(part / "manifest.jsonl")
        ]


def test_encoding_goes_on_after_a_stop(home: Path) -> None:
    shards = sorted((home / "prepared" / "train" / "codes").glob("*/0*.arrow"))
    shards[0].unlink()
    parts = {home / "mixed" / "train": home / "prepared" / "train"}
    before = [path.stat().st_mtime_ns for path in (home / "work").glob("*/codes/*/0*.arrow")]
    encode(parts, str(home / "egg"), home / "work", jobs=1, device="cpu")
    assert [path.stat().st_mtime_ns for path in (home / "work").glob("*/codes/*/0*.arrow")] == before
    [made] = (home / "work").glob("*/codes/*/0*.arrow")
    assert shards[0].samefile(made), "linked again, and not encoded again"
    assert len(PreparedDataset.open(home / "prepared" / "train").utterances) == 24


def test_the_recipe_trains_it_in_full_and_goes_on_after_a_stop(home: Path, run: Path) -> None:
    recipe = load_recipe(RECIPES / "language_model.yaml")
    assert recipe.adapt.mode == "full" and not recipe.model.check_pretrained and recipe.train.ema_decay
    assert recipe.publishes_best, "what follows it is learned by heart"
    log = (run / "log.txt").read_text()
    assert "(100.00 %)" in log and "going on after step 2" in log
    egg = open_family(str(home / "egg")).load_model(dtype=torch.float32, device="cpu", text_head=False)
    grown = open_family(str(run / "model")).load_model(dtype=torch.float32, device="cpu", text_head=False)
    same = [name for name, tensor in egg.state_dict().items() if torch.equal(tensor, grown.state_dict()[name])]
    assert same == [], "every weight has learned"


# In the package


def test_it_ships_in_halves_and_opens_by_name(
    home: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_fledgling, "MAX_SHARD_BYTES", 20_000)
    said = export_fledgling.export(run / "model", home / "codec", tmp_path / "fledgling")
    assert "all 32 tensors have their place" in said
    shards = sorted((tmp_path / "fledgling").glob("model-*.safetensors"))
    assert len(shards) > 2, "several files, as of a large model"

    monkeypatch.setitem(myna.models.SHIPPED, "fledgling", tmp_path / "fledgling")
    family = open_family("fledgling")
    assert family.source == "fledgling" and family.codec_source == str(tmp_path / "fledgling" / "codec")
    ours = family.load_model(dtype=torch.float32, device="cpu", text_head=False).state_dict()
    theirs = HiggsAudioV2ForConditionalGeneration.from_pretrained(tmp_path / "fledgling", dtype=torch.float32)
    trained = open_family(str(run / "model")).load_model(dtype=torch.float32, device="cpu", text_head=False)
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(ours[name], tensor.half().float(), rtol=0, atol=0)
        torch.testing.assert_close(theirs.state_dict()[name], ours[name], rtol=0, atol=0)

    engine = load_engine(ModelRef.find_model("fledgling"), device="cpu")
    voice = engine.encode_reference(ReferenceRecording(home / "natural/held_out/sound/spk025/002.wav", "follow me"))
    [speech] = engine.speak([SpeechRequest("yes", (voice,), max_seconds=1)])
    assert len(speech.samples) == 960 * len(speech.codes) <= 25 * 960


def test_what_is_too_large_or_broken_is_not_shipped(
    home: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="bytes in all"):
        patch.setattr(export_fledgling, "MAX_PACKAGE_BYTES", 1000)
        export_fledgling.export(run / "model", home / "codec", tmp_path / "fledgling")
    broken = open_family(str(run / "model"))
    model = broken.load_model(dtype=torch.float32, device="cpu", text_head=False)
    with torch.no_grad():
        next(model.parameters()).fill_(1e6)
    broken.save_model(model, tmp_path / "broken")
    with pytest.raises(CheckpointError, match="does not fit half precision"):
        export_fledgling.export(tmp_path / "broken", home / "codec", tmp_path / "fledgling")
    assert not (tmp_path / "fledgling").exists()


def test_another_kind_of_codec_makes_no_egg(tmp_path: Path) -> None:
    fast = MelCodecConfig(**{name: getattr(TINY, name) for name in TINY.__dataclass_fields__} | {"hop": 480})
    save_mel_codec(MelCodecNetwork(fast), tmp_path / "codec")
    with pytest.raises(ModelError, match="50 frames"):
        make(tmp_path / "egg", tmp_path / "codec")
