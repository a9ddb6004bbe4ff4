"""The distance in Whisper's hidden states that the codec may be trained with."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder as TransformersEncoder

from codec_training.speech_features import SpeechFeatureDistance, WhisperEncoder
from export_speech_encoder import encoder_weights
from myna.models.mel_codec import mel_filters

SECONDS = 2


@pytest.fixture(scope="module")
def reference() -> TransformersEncoder:
    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=128, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=256, max_source_positions=50 * SECONDS
    )
    return TransformersEncoder(config).eval()


@pytest.fixture(scope="module")
def encoder(reference: TransformersEncoder) -> WhisperEncoder:
    weights = {name: tensor for name, tensor in reference.state_dict().items() if not name.endswith("k_proj.bias")}
    return WhisperEncoder(weights | {"mel_filters": mel_filters(16_000, 400, 80)})


def tone(rate: int) -> torch.Tensor:
    """Return a tone below 8 kHz, so that both rates hold all of it; it begins and ends in silence."""
    seconds = torch.arange(SECONDS * rate) / rate
    return 0.3 * torch.hann_window(SECONDS * rate) * torch.sin(2 * torch.pi * (300 + 900 * seconds) * seconds)


def test_log_mel_is_whispers_own_from_another_sample_rate(encoder: WhisperEncoder) -> None:
    extractor = WhisperFeatureExtractor(chunk_length=SECONDS)
    expected = extractor(tone(16_000).numpy(), sampling_rate=16_000, return_tensors="pt").input_features
    mel = encoder.log_mel(tone(24_000)[None])
    assert mel.shape == expected.shape
    loud = expected > expected.max() - 1.0  # fainter bins are rounding
    assert (mel - expected)[loud].abs().max() < 0.02


def test_hidden_states_are_those_of_transformers(encoder: WhisperEncoder, reference: TransformersEncoder) -> None:
    waves = tone(24_000)[None]
    with torch.no_grad():
        expected = reference(encoder.log_mel(waves), output_hidden_states=True)
        states = encoder(waves)
    assert len(states) == 2
    torch.testing.assert_close(states[0], expected.hidden_states[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states[-1], expected.last_hidden_state, atol=1e-4, rtol=1e-4)


def test_distance_is_zero_for_a_copy_and_grows_with_noise(encoder: WhisperEncoder) -> None:
    distance, clean = SpeechFeatureDistance(encoder), tone(24_000)[None]
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    assert distance(clean, clean) == 0
    assert 0 < distance(clean, clean + 0.001 * noise) < distance(clean, clean + 0.1 * noise)


def test_gradients_reach_the_decoded_audio_alone(encoder: WhisperEncoder) -> None:
    target, decoded = tone(24_000)[None].requires_grad_(), (0.5 * tone(24_000)[None]).requires_grad_()
    SpeechFeatureDistance(encoder)(target, decoded).backward()
    assert target.grad is None
    assert decoded.grad is not None and decoded.grad.isfinite().all() and decoded.grad.abs().max() > 0
    assert not list(encoder.parameters()), "nothing of the recogniser is trained"


def test_digital_silence_has_finite_gradients(encoder: WhisperEncoder) -> None:
    decoded = torch.zeros(1, 24_000, requires_grad=True)
    SpeechFeatureDistance(encoder)(torch.zeros(1, 24_000), decoded).backward()
    assert decoded.grad is not None and decoded.grad.isfinite().all()


def test_weights_in_eight_bits_are_found_by_their_nodes() -> None:
    arrays = {
        "layers.0.fc1.bias": np.ones(3, np.float32),
        "m_quantized": np.array([[0, 2], [4, 6], [8, 10]], np.uint8),
        "m_scale": np.float32(0.5),
        "m_zero_point": np.uint8(2),
    }
    node = SimpleNamespace(
        op_type="MatMulInteger", name="/layers.0/fc1/MatMul_quant", input=["x_quantized", "m_quantized"]
    )
    graph = SimpleNamespace(
        initializer=[SimpleNamespace(name=name, array=array) for name, array in arrays.items()], node=[node]
    )
    weights = encoder_weights(graph, lambda each: np.asarray(each.array))
    assert weights["layers.0.fc1.weight"].tolist() == [[-1, 1, 3], [0, 2, 4]]
    assert weights["layers.0.fc1.bias"].tolist() == [1, 1, 1]
