"""Speaker encoders by name and by folder: ECAPA under its published names, and a small WavLM of the real class."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from myna.audio.files import Samples
from myna.core.errors import CheckpointError, ModelError
from myna.core.io import ecapa_file
from myna.evaluate.scoring import Scorers
from myna.listen import models
from myna.listen.speaker_encoders import EcapaEncoder, EcapaNetwork, cosine_similarity, open_speaker_encoder
from tests.evaluate.tiny_scorers import save_wavlm

RATE = 16_000


def noise(seed: int, seconds: float = 0.5) -> Samples:
    return np.random.default_rng(seed).normal(0, 0.1, int(seconds * RATE)).astype(np.float32)


@pytest.fixture(scope="module")
def wavlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wavlm(tmp_path_factory.mktemp("wavlm"))


@pytest.fixture(scope="module")
def ecapa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ecapa")
    torch.manual_seed(0)
    save_file(EcapaNetwork().state_dict(), folder / "ecapa.safetensors")
    return folder


@pytest.fixture(params=["wavlm", "ecapa", "ecapa:file", "wavlm:folder"])
def which(request: pytest.FixtureRequest, wavlm: Path, ecapa: Path) -> str:
    """Name of an encoder: a folder alone, whose files tell the kind, or a kind with a place."""
    places = {"wavlm": wavlm, "ecapa": ecapa}
    if request.param in places:
        return str(places[request.param])
    file = ecapa / "ecapa.safetensors"
    return f"ecapa:{file}" if request.param == "ecapa:file" else f"wavlm:{wavlm}"


def test_a_voice_is_a_direction_and_the_same_for_the_same_sound(which: str) -> None:
    encoder = open_speaker_encoder(which)
    one, again, other = (encoder.embed(noise(seed), RATE) for seed in (0, 0, 1))
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5) and one.dtype == np.float32
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    assert encoder.name.split()[0] in ("wavlm", "ecapa")


def test_silence_and_clicks_have_no_voice(which: str) -> None:
    encoder = open_speaker_encoder(which)
    size = len(encoder.embed(noise(0), RATE))
    for nothing in (np.zeros(RATE, np.float32), np.zeros(0, np.float32), noise(0, 0.005)):
        embedding = encoder.embed(nothing, RATE)
        assert embedding.shape == (size,) and not embedding.any()


def test_every_length_has_a_voice_or_none_and_never_what_is_no_number(which: str) -> None:
    encoder = open_speaker_encoder(which)
    lengths = [np.linalg.norm(encoder.embed(noise(0, seconds), RATE)) for seconds in np.arange(0.01, 0.15, 0.004)]
    assert all(length == 0 or length == pytest.approx(1, abs=1e-5) for length in lengths)
    assert lengths == sorted(lengths) or np.isclose(sorted(lengths), lengths, atol=1e-5).all()
    assert lengths[0] == 0 and lengths[-1] > 0


def test_company_changes_nothing(which: str) -> None:
    encoder = open_speaker_encoder(which)
    clips = [noise(seed, 0.2 + 0.1 * seed) for seed in range(6)]
    alone = [encoder.embed(clip, RATE) for clip in clips]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda clip: encoder.embed(clip, RATE), clips))
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


def test_ecapa_takes_its_own_weights_and_no_others(ecapa: Path, tmp_path: Path) -> None:
    weights = load_file(ecapa / "ecapa.safetensors")
    save_file({**weights, "extra": torch.zeros(1)}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match="these differ: extra"):
        EcapaEncoder.open(tmp_path / "more.safetensors")
    save_file({**weights, "fc.conv.bias": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"these differ: fc\.conv\.bias"):
        EcapaEncoder.open(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="several safetensors"):
        open_speaker_encoder(f"ecapa:{tmp_path}")


def test_a_pickle_is_not_opened_and_how_to_convert_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "embedding_model.ckpt").write_bytes(b"not even a pickle")
    for place in (tmp_path, tmp_path / "embedding_model.ckpt"):
        with pytest.raises(CheckpointError, match="is a pickle") as caught:
            open_speaker_encoder(f"ecapa:{place}")
        assert "save_file" in caught.value.hint
    with pytest.raises(CheckpointError, match="holds no safetensors"):
        open_speaker_encoder(f"ecapa:{tmp_path.parent}")


def test_wavlm_is_refused_where_it_does_not_fit(wavlm: Path, tmp_path: Path) -> None:
    for file in wavlm.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith(("objective.", "classifier."))}
    save_file(kept, tmp_path / "model.safetensors")
    assert open_speaker_encoder(str(tmp_path)), "the classifier over its own speakers is not needed"
    save_file({name: value for name, value in kept.items() if "projector" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"projector\.weight"):
        open_speaker_encoder(str(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles") as caught:
        open_speaker_encoder(str(tmp_path))
    assert "save_pretrained" in caught.value.hint
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["WavLMModel"]}))
    with pytest.raises(ModelError, match="WavLMModel, which was not trained"):
        open_speaker_encoder(str(tmp_path))


def test_a_missing_encoder_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no route to the hub")

    monkeypatch.setattr(models, "snapshot_download", unreachable)
    missing = Scorers.open(None, "wavlm").missing["speaker_encoder"]
    assert "microsoft/wavlm-base-plus-sv" in missing and "no route to the hub" in missing
    assert "there is no speaker encoder" in Scorers.open(None, str(tmp_path / "nothing")).missing["speaker_encoder"]
    assert "there is no speaker encoder at resemblizer" in Scorers.open(None, "resemblizer").missing["speaker_encoder"]


def test_ears_are_named_by_their_weights(wavlm: Path, tmp_path: Path) -> None:
    other = save_wavlm(tmp_path / wavlm.name, seed=1)
    names = {Scorers.open(None, str(folder)).names["speaker_encoder"] for folder in (wavlm, other)}
    assert len(names) == 2
    one, two = (open_speaker_encoder(str(folder)).embed(noise(0), RATE) for folder in (wavlm, other))
    assert cosine_similarity(one, two) < 0.999


def test_a_batch_of_voices_is_each_of_them_alone(ecapa: Path) -> None:
    encoder = EcapaEncoder.open(ecapa)
    clips = [noise(1), noise(2, 1.0), 1e-3 * noise(3), np.zeros(RATE, np.float32), noise(4, 1.0)]
    together = encoder.embed_batch(clips, RATE)
    for clip, embedding in zip(clips, together, strict=True):
        assert embedding == pytest.approx(encoder.embed(clip, RATE), abs=1e-5)
    assert not together[3].any() and encoder.batch_size == 1


def test_the_default_encoder_comes_from_the_users_cache(
    ecapa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYNA_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="the speaker encoder is not here") as caught:
        open_speaker_encoder()
    assert caught.value.hint == "myna setup metrics"
    for folder in ("curation", "ecapa"):
        (tmp_path / folder).mkdir()
        shutil.copy(ecapa / "ecapa.safetensors", tmp_path / folder)
        assert ecapa_file() == tmp_path / folder / "ecapa.safetensors"
        assert open_speaker_encoder().name == EcapaEncoder.open(ecapa).name
