"""The mel codec: exact lengths, codes that do not depend on the batch, and checked files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from myna.core.errors import CheckpointError, ModelError
from myna.models import mel_codec as codec_module
from myna.models import open_codec
from myna.models.higgs_v2.codec import HiggsCodec
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.tiny import save_tiny, save_tiny_codec
from myna.models.mel_codec import MelCodec, MelCodecConfig, MelCodecNetwork, inverse_stft, mel_filters, save_mel_codec
from tests.models.codec_contract import CodecContract, Tensors, edit, noise, tone
from tests.models.helpers import SMALL_MEL_CODEC, calibrated_network


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("codecs") / "small"
    save_mel_codec(calibrated_network(SMALL_MEL_CODEC), made)
    return made


@pytest.fixture(scope="module")
def codec(folder: Path) -> MelCodec:
    return MelCodec.open(folder)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copied")


# The network


def test_weights_fit_one_file_of_16_megabytes(tmp_path: Path) -> None:
    network = MelCodecNetwork(MelCodecConfig())
    assert sum(tensor.numel() for tensor in network.state_dict().values()) < 8_000_000
    save_mel_codec(network, tmp_path / "codec")
    (file,) = (tmp_path / "codec").glob("*.safetensors")
    assert file.stat().st_size < 16_000_000
    opened = MelCodec.open(tmp_path / "codec")
    assert (opened.sample_rate, opened.hop, opened.codebooks, opened.codebook_size) == (24_000, 960, 8, 1024)
    codes = opened.encode(noise(1, 3))
    assert codes.shape == (1, 3, 8) and opened.decode(codes[0]).shape == (2880,)


def test_inverse_stft_restores_a_sound() -> None:
    window, samples = torch.hann_window(960), torch.randn(2, 7 * 240)
    frames = torch.nn.functional.pad(samples, (360, 360)).unfold(1, 960, 240)
    spectra = torch.fft.rfft(frames * window, norm="ortho")
    torch.testing.assert_close(inverse_stft(spectra, window), samples, atol=1e-5, rtol=0)


def test_mel_filters_are_those_of_slaney() -> None:
    filters = mel_filters(24_000, 1024, 100)
    # Made by librosa 0.11: filters.mel(sr=24000, n_fft=1024, n_mels=100).
    golden = {
        **{(5, 3): 0.01396455, (6, 3): 0.02471436, (42, 28): 0.02477596},
        **{(310, 86): 0.00227263, (314, 86): 0.00372108, (494, 99): 0.00240738, (505, 99): 0.00099018},
    }
    for (line, bin), value in golden.items():
        assert float(filters[line, bin]) == pytest.approx(value, rel=1e-4)
    assert filters.shape == (513, 100) and bool((filters.sum(0) > 0).all())


def test_a_tone_excites_the_mel_bin_of_its_pitch() -> None:
    network = MelCodecNetwork(MelCodecConfig())
    heard = network.log_mel(torch.from_numpy(np.stack([tone(300), tone(3000)])))
    assert heard.shape == (2, 100, 100)
    filters = mel_filters(24_000, 1024, 100)
    for row, hertz in zip(heard, (300, 3000), strict=True):
        loudest = int(row[50].argmax())
        assert abs(float(filters[:, loudest].argmax()) * 24_000 / 1024 - hertz) < 60


def test_audio_a_second_away_changes_no_code() -> None:
    """Audio a second away changes nothing, so a longer clip begins with the same codes."""
    network, clip = calibrated_network(SMALL_MEL_CODEC), torch.from_numpy(noise(1, 80))
    with torch.no_grad():
        whole, part = network.encode(clip), network.encode(clip[:, : 60 * 960])
    assert torch.equal(whole[:, :30], part[:, :30])


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"hop": 0}, "hop must be a whole number"),
        ({"latent": 8.0}, "latent must be a whole number"),
        ({"codebooks": True}, "codebooks must be a whole number"),
        ({"hop": 961}, "multiple of 8"),
        ({"mel_window": 200}, "mel_window must be 240"),
        ({"kernel": 6}, "odd"),
        ({"codebook_size": 70_000}, "16 bits"),
    ],
)
def test_impossible_sizes_are_refused(settings_: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MelCodecConfig(**settings_)


# Encoding and decoding


class TestContract(CodecContract):
    """The contract for this codec."""


@settings(max_examples=25, deadline=None)
@given(frames=st.integers(1, 60), clips=st.integers(1, 3), seed=st.integers(0, 9))
def test_any_whole_number_of_frames_round_trips(codec: MelCodec, frames: int, clips: int, seed: int) -> None:
    waves = noise(clips, frames, seed)
    codes = codec.encode(waves)
    assert codes.shape == (clips, frames, 8) and codes.dtype == np.uint16 and codes.max() < 64
    samples = codec.decode(codes[0])
    assert samples.shape == waves[0].shape and samples.dtype == np.float32
    assert np.isfinite(samples).all() and np.abs(samples).max() <= 1
    assert np.array_equal(samples, codec.decode(codes[0]))


def test_clips_of_any_lengths_come_back_with_their_places(codec: MelCodec) -> None:
    clips = [noise(1, frames, frames)[0] for frames in (3, 9, 3, 1)]
    found = {
        place: codes
        for places, batch in codec.encode_batches(clips, 10.0, lambda _: None)
        for place, codes in zip(places, batch, strict=True)
    }
    for place, clip in enumerate(clips):
        assert np.array_equal(found[place], codec.encode(clip[None])[0])


@pytest.mark.gpu
def test_a_gpu_makes_the_codes_of_a_cpu(folder: Path, codec: MelCodec) -> None:
    clips, there = noise(4, 50), MelCodec.open(folder, device="cuda")
    codes = codec.encode(clips)
    assert (there.encode(clips) == codes).mean() > 0.99
    assert np.allclose(there.decode(codes[0]), codec.decode(codes[0]), atol=1e-4)


def test_on_a_cpu_no_clip_is_shared_out_among_threads_that_wait_for_one_another(
    codec: MelCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, encode = [], MelCodec.encode

    def watched(self: MelCodec, clips: Any) -> Any:
        threads.append(torch.get_num_threads())
        return encode(self, clips)

    clips = [noise(1, 9, seed)[0] for seed in range(6)]
    alone = [encode(codec, clip[None])[0] for clip in clips]
    monkeypatch.setattr(MelCodec, "encode", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = {
            place: one
            for places, some in codec.encode_batches(clips, 60.0, print)
            for place, one in zip(places, some, strict=True)
        }
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == [1] * 6
    assert all((found[place] == one).all() for place, one in enumerate(alone))


def test_different_sounds_have_different_codes(codec: MelCodec) -> None:
    low, high, hiss = codec.encode(np.stack([tone(220), tone(2000), noise(1, 25)[0]]))
    for one, other in ((low, high), (low, hiss), (high, hiss)):
        assert (one == other).all(1).mean() < 0.1
    assert not np.allclose(codec.decode(low), codec.decode(hiss), atol=1e-3)


def test_later_codebooks_encode_the_residual(codec: MelCodec) -> None:
    quantiser = codec._network.quantiser
    latent = quantiser.books.sum(0) + 0.01
    codes = quantiser.encode(latent)
    rest = latent
    for number, book in enumerate(quantiser.books):
        nearest = (rest[:, None] - book).square().sum(-1).argmin(1)
        assert torch.equal(codes[:, number], nearest)
        rest = rest - book[nearest]
    torch.testing.assert_close(quantiser.decode(codes), latent - rest)


# Files


def test_weights_are_stored_in_half_and_used_in_full_precision(folder: Path, codec: MelCodec) -> None:
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float16}
    assert {tensor.dtype for tensor in codec._network.state_dict().values()} == {torch.float32}


def test_a_codec_in_shards_is_the_same_codec(
    folder: Path, codec: MelCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_module, "MAX_SHARD_BYTES", 10_000)
    save_mel_codec(codec._network, tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    opened = MelCodec.open(tmp_path / "sharded")
    assert opened.revision == codec.revision == MelCodec.open(folder).revision
    assert np.array_equal(opened.encode(noise(1, 9)), codec.encode(noise(1, 9)))


def test_saving_replaces_the_codec_in_a_folder(copied: Path) -> None:
    (copied / "model-00001-of-00002.safetensors").write_bytes(b"left over")
    save_mel_codec(calibrated_network(MelCodecConfig()), copied)
    assert sorted(path.name for path in copied.iterdir()) == ["config.json", "model.safetensors"]
    assert MelCodec.open(copied).codebook_size == 1024
    assert [path.name for path in copied.parent.iterdir()] == ["copied"]


def test_the_revision_changes_with_a_weight_and_with_a_setting(copied: Path, codec: MelCodec) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"sample_rate": 48_000}))
    at_another_rate = MelCodec.open(copied).revision
    (copied / "config.json").write_text(json.dumps(config))
    edit(copied, lambda tensors: tensors["encoder.enter.bias"][0].add_(1e-2))
    assert len({MelCodec.open(copied).revision, at_another_rate, codec.revision}) == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("quantiser.books"), r"1 missing: quantiser.books"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), r"1 unexpected: extra"),
        (
            lambda tensors: tensors.update({"encoder.enter.bias": torch.zeros(5)}),
            r"1 of another shape: encoder.enter.bias \(5,\) instead of \(16,\)",
        ),
        (lambda tensors: tensors["encoder.enter.bias"][0].fill_(torch.nan), r"1 not finite: encoder.enter.bias"),
        (lambda tensors: tensors.update({"encoder.enter.bias": torch.zeros(16, dtype=torch.int8)}), "not finite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(copied: Path, change: Callable[[Tensors], Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        MelCodec.open(edit(copied, change))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "codec.pt"])
def test_a_pickle_is_refused(copied: Path, name: str) -> None:
    (copied / "model.safetensors").rename(copied / name)
    with pytest.raises(CheckpointError, match=rf"pickles \({name}\)"):
        MelCodec.open(copied)


def test_a_file_cut_short_is_named(copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        MelCodec.open(copied)


def test_a_list_of_shards_is_checked(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    index = copied / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        MelCodec.open(copied)
    index.write_text('{"weight_map": {"encoder.enter.bias": "../elsewhere.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"names files outside of its folder: \.\./elsewhere\.safetensors"):
        MelCodec.open(copied)
    index.write_text('{"weight_map": {"encoder.enter.bias": "elsewhere.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"copied lacks files that its index names: elsewhere\.safetensors"):
        MelCodec.open(copied)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "no config.json"),
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ("{}", "model_type"),
        ('{"model_type": "dac"}', "'dac'"),
        ('{"model_type": "myna_mel_codec", "hop": 960}', "missing or unknown: codebook_size"),
    ],
)
def test_a_folder_without_a_codec_is_refused(copied: Path, config: str | None, said: str) -> None:
    (copied / "config.json").unlink()
    if config is not None:
        (copied / "config.json").write_text(config)
    with pytest.raises(ModelError, match=said):
        MelCodec.open(copied)


def test_an_impossible_setting_is_named_with_its_file(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"kernel": 4, "colour": "red"}))
    with pytest.raises(ModelError, match=r"config\.json: settings missing or unknown: colour"):
        MelCodec.open(copied)
    (copied / "config.json").write_text(json.dumps(config | {"kernel": 4}))
    with pytest.raises(ModelError, match=r"config\.json: kernel must be odd"):
        MelCodec.open(copied)


# Which codec a folder holds


def test_the_codec_follows_from_the_folder(folder: Path, tmp_path: Path) -> None:
    assert isinstance(open_codec(folder), MelCodec)
    assert isinstance(open_codec(str(save_tiny_codec(tmp_path / "higgs"))), HiggsCodec)


def test_a_folder_with_neither_codec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_codec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json"):
        open_codec(tmp_path)


def test_a_model_speaks_through_the_codec_beside_it(folder: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    shutil.rmtree(model / "codec")
    shutil.copytree(folder, model / "codec")
    codec = HiggsV2.open(str(model), model).load_codec()
    assert isinstance(codec, MelCodec) and codec.codebook_size == 64
