"""The Higgs codec: opened with no tensor left over, deterministic codes, and torchaudio's resampling without
torchaudio."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from myna.core.errors import CheckpointError, ModelError
from myna.data.dataset import DatasetInfo, PreparedDataset
from myna.data.encoding import encode_dataset
from myna.data.manifest import Utterance, write_manifest
from myna.models.higgs_v2 import codec as codec_module
from myna.models.higgs_v2.codec import HiggsCodec, codec_classes, sinc_resample
from myna.models.higgs_v2.tiny import save_tiny_codec
from tests.models.codec_contract import CodecContract, Tensors, edit, noise, tone

G = "semantic_model.encoder.pos_conv_embed.conv.parametrizations.weight.original0"
V = G.replace("original0", "original1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_codec(tmp_path_factory.mktemp("codec"))


@pytest.fixture(scope="module")
def codec(folder: Path) -> HiggsCodec:
    return HiggsCodec.open(folder)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copied")


# Encoding and decoding


class TestContract(CodecContract):
    """The contract for this codec."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_makes_the_codes_of_a_cpu(folder: Path, codec: HiggsCodec) -> None:
    clips = noise(4, 50)
    assert np.array_equal(HiggsCodec.open(folder, device="cuda").encode(clips), codec.encode(clips))


def test_different_sounds_have_different_codes(codec: HiggsCodec) -> None:
    low, high, hiss = codec.encode(np.stack([tone(220), tone(440), noise(1, 25)[0]]))
    for one, other in ((low, high), (low, hiss), (high, hiss)):
        assert (one == other).mean() < 0.3
    assert min(len(np.unique(hiss[:, book])) for book in range(8)) >= 8
    assert not np.allclose(codec.decode(low), codec.decode(hiss), atol=0.05)


def test_the_code_store_keeps_the_codes(codec: HiggsCodec, tmp_path: Path) -> None:
    clips = [tone(200, 0.5), tone(300, 0.7), tone(400, 0.5)]
    utterances = [Utterance(str(n), tmp_path / f"{n}.wav", "", "anna") for n in range(3)]
    for utterance, clip in zip(utterances, clips, strict=True):
        soundfile.write(utterance.audio, clip, 24_000, subtype="FLOAT")
    write_manifest(tmp_path / "manifest.jsonl", utterances)
    encode_dataset(utterances, codec, tmp_path)
    DatasetInfo.from_codec(codec).write(tmp_path)
    corpus = PreparedDataset.open(tmp_path)
    for utterance, clip in zip(corpus.utterances, clips, strict=True):
        whole = len(clip) // codec.hop * codec.hop
        assert np.array_equal(corpus.codes(utterance), codec.encode(clip[None, :whole])[0])


# Opening


def test_opening_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    HiggsCodec.open(folder)
    assert capfd.readouterr() == ("", "")


def test_the_revision_survives_saving_anew(folder: Path, codec: HiggsCodec, tmp_path: Path) -> None:
    assert HiggsCodec.open(folder).revision == codec.revision
    codec_classes()[1].from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="200KB")
    assert not (tmp_path / "model.safetensors").exists()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_version": "9", "_name_or_path": "/x"}))
    assert HiggsCodec.open(tmp_path).revision == codec.revision


def test_the_revision_changes_with_a_weight_and_with_a_setting(copied: Path, codec: HiggsCodec) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"semantic_sample_rate": 24_000}))
    resampled_otherwise = HiggsCodec.open(copied).revision
    (copied / "config.json").write_text(json.dumps(config))
    edit(copied, lambda tensors: tensors["fc.bias"][0].add_(1e-3))
    assert len({HiggsCodec.open(copied).revision, resampled_otherwise, codec.revision}) == 3


def test_weight_norm_loads_under_its_old_names_too(copied: Path, codec: HiggsCodec) -> None:
    def rename(tensors: Tensors) -> None:
        tensors[G] *= 2
        tensors[G.replace("parametrizations.weight.original0", "weight_g")] = tensors.pop(G)
        tensors[V.replace("parametrizations.weight.original1", "weight_v")] = tensors.pop(V)

    before = codec._model.semantic_model.encoder.pos_conv_embed.conv.weight
    after = HiggsCodec.open(edit(copied, rename))._model.semantic_model.encoder.pos_conv_embed.conv.weight
    torch.testing.assert_close(after, 2 * before)


def test_the_mask_of_hubert_may_be_left_over(copied: Path) -> None:
    HiggsCodec.open(edit(copied, lambda tensors: tensors.update({"semantic_model.masked_spec_embed": torch.ones(16)})))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("fc.weight"), r"1 missing: fc.weight"),
        (lambda tensors: tensors.pop(G), "missing: .*pos_conv_embed.conv"),
        (
            lambda tensors: tensors.pop("quantizer.quantizers.3.codebook.embed"),
            "missing: .*quantizers.3.codebook.embed",
        ),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), r"1 unexpected: extra"),
        (lambda tensors: tensors.update({"fc.bias": torch.zeros(5)}), r"1 of another shape: fc.bias \(5,\) .* \(32,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(copied: Path, change: Callable[[Tensors], Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        HiggsCodec.open(edit(copied, change))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "codec.pt"])
def test_a_pickle_is_refused(copied: Path, name: str) -> None:
    (copied / "model.safetensors").rename(copied / name)
    with pytest.raises(CheckpointError, match=rf"pickles \({name}\)") as caught:
        HiggsCodec.open(copied)
    assert "hf download" in caught.value.hint


def test_a_file_cut_short_is_named(copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=str(copied)):
        HiggsCodec.open(copied)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "no config.json"),
        ("{", "cannot be read"),
        ("{}", "layout"),
        ('{"model_type": "dac"}', "'dac'"),
        ('{"model_type": "higgs_audio_v2_tokenizer", "sample_rate": "fast"}', "sample_rate"),
    ],
)
def test_a_folder_without_a_codec_is_refused(copied: Path, config: str | None, said: str) -> None:
    (copied / "config.json").unlink()
    if config is not None:
        (copied / "config.json").write_text(config)
    with pytest.raises(ModelError, match=said):
        HiggsCodec.open(copied)


def test_a_damaged_list_of_shards_is_named(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    (copied / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        HiggsCodec.open(copied)


def test_a_missing_codec_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent"):
        HiggsCodec.open(tmp_path / "absent")


# Without torchaudio

MODELING = "transformers.models.higgs_audio_v2_tokenizer.modeling_higgs_audio_v2_tokenizer"


def test_the_stand_in_is_gone_afterwards() -> None:
    script = (
        "import sys; from myna.models.higgs_v2.codec import codec_classes, sinc_resample; codec_classes();"
        f"module = sys.modules[{MODELING!r}];"
        "own = module.torchaudio.functional.resample is sinc_resample;"
        "print(own, 'torchaudio' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    # A machine with a working torchaudio uses that one.
    assert out.split() in (["True", "False"], ["False", "True"])


@pytest.mark.parametrize("error", [ImportError, OSError])
def test_a_torchaudio_that_does_not_load_is_replaced(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchaudio.py").write_text(f"raise {error.__name__}('libc10_cuda.so')")
    module = _import_anew(tmp_path, monkeypatch)
    assert module.torchaudio.functional.resample is sinc_resample
    assert "torchaudio" not in sys.modules


def test_a_torchaudio_that_loads_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchaudio.py").write_text("class functional:\n    resample = 'the real one'")
    module = _import_anew(tmp_path, monkeypatch)
    assert module.torchaudio.functional.resample == "the real one"
    assert sys.modules["torchaudio"] is module.torchaudio


def _import_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    codec_classes()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(
        sys.modules, "torchaudio", types.ModuleType("torchaudio")
    )  # the fixture restores what was there
    del sys.modules["torchaudio"]
    monkeypatch.delitem(sys.modules, MODELING)
    codec_module.codec_classes.__wrapped__()
    return sys.modules[MODELING]


GOLDEN = {  # made by torchaudio 2.11 from sin(n * n / 7), n = 0 ... 9
    (24_000, 16_000): [0.0154492, 0.2724349, 1.0448643, 0.0908843, -0.6382588, 0.5697471, -0.5850082],
    (16_000, 24_000): [
        *[-0.0001368, 0.0652471, 0.2531545, 0.5407432, 0.8522595, 0.9890654, 0.7581607, 0.0569497],
        *[-0.8382933, -0.9059102, 0.1385770, 0.8819568, 0.2772118, -0.7050929, -0.6598742],
    ],
    (44_100, 16_000): [0.0574015, 0.6628, -0.1045641, -0.1007326],
}


@pytest.mark.parametrize("rates", GOLDEN)
def test_resampling_equals_torchaudio(rates: tuple[int, int]) -> None:
    n = torch.arange(10, dtype=torch.float64)
    wave = torch.sin(n * n / 7).float()
    torch.testing.assert_close(sinc_resample(wave, *rates), torch.tensor(GOLDEN[rates]), atol=2e-6, rtol=0)
    batch = torch.stack([wave, -wave]).reshape(2, 1, 10)
    torch.testing.assert_close(sinc_resample(batch, *rates)[1, 0], -sinc_resample(wave, *rates))


@pytest.mark.parametrize("rates", [(24_000, 16_000), (44_100, 24_000), (16_000, 48_000)])
def test_a_tone_keeps_its_pitch_and_level(rates: tuple[int, int]) -> None:
    orig, new = rates
    wave = torch.sin(2 * torch.pi * 440 * torch.arange(orig) / orig)
    wanted = torch.sin(2 * torch.pi * 440 * torch.arange(new) / new)
    inner = slice(100, -100)  # the ends include the silence outside
    torch.testing.assert_close(sinc_resample(wave, orig, new)[inner], wanted[inner], atol=1e-2, rtol=0)


def test_frequencies_above_the_new_rate_are_filtered_out() -> None:
    wave = torch.sin(2 * torch.pi * 11_000 * torch.arange(24_000) / 24_000)
    assert sinc_resample(wave, 24_000, 16_000)[100:-100].abs().max() < 2e-2


@given(st.integers(1, 500), st.sampled_from([(24_000, 16_000), (16_000, 24_000), (22_050, 24_000), (8_000, 8_000)]))
def test_the_length_is_rounded_up(samples: int, rates: tuple[int, int]) -> None:
    orig, new = rates
    assert sinc_resample(torch.zeros(samples), orig, new).shape == (-(-samples * new // orig),)
