"""Parameter counts, compared with those of the released model."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from myna.core.config import AdaptSettings
from myna.core.errors import ConfigError
from myna.models import open_family
from myna.models.lora import count_model

TOTAL = 5_771_283_456
ALL_THREE = ("text_head", "audio_head", "audio_embedding")
AUDIO_FFN = ("audio_mlp.gate_proj", "audio_mlp.up_proj", "audio_mlp.down_proj")
ROOT = Path(__file__).parents[2]


def count(**settings: Any) -> dict[str, Any]:
    return count_model(open_family("higgs-v2"), AdaptSettings(**settings))


def test_comprehensive_with_all_three_train_modules() -> None:
    found = count(mode="comprehensive", rank=16, train_modules=ALL_THREE)
    assert found["selected_modules"] == 282
    assert found["lora_modules"] == 280
    assert found["lora"] == 39_452_672
    assert found["trainable"] == 483_885_056
    assert found["total"] == 6_255_168_512
    assert round(100 * found["trainable_share"], 2) == 7.74
    assert round(100 * found["lora_share"], 2) == 0.63
    assert found["trained_modules"] == ["text_lm_head", "audio_lm_head", "model.embed_audio_tokens.embed_audio_tokens"]


def test_comprehensive_for_an_audio_only_loss() -> None:
    found = count(mode="comprehensive", rank=16, train_modules=("audio_head", "audio_embedding"))
    assert found["trainable"] == 89_882_624


@pytest.mark.parametrize(
    ("mode", "rank", "modules", "lora"),
    [
        ("comprehensive", 8, 280, 19_726_336),
        ("comprehensive", 16, 280, 39_452_672),
        ("comprehensive", 32, 280, 78_905_344),
        ("comprehensive", 64, 280, 157_810_688),
        ("attention_only", 16, 112, 9_175_040),
    ],
)
def test_a_lora_alone(mode: str, rank: int, modules: int, lora: int) -> None:
    found = count(mode=mode, rank=rank)
    assert (found["lora_modules"], found["lora"], found["trainable"], found["total"]) == (
        modules,
        lora,
        lora,
        TOTAL + lora,
    )
    assert found["trained_modules"] == []


def test_attention_and_the_audio_ffn() -> None:
    found = count(mode="custom", targets=("q_proj", "k_proj", "v_proj", "o_proj", *AUDIO_FFN), rank=16)
    assert (found["lora_modules"], found["lora"]) == (196, 24_313_856)


def test_dora_adds_a_magnitude_per_output() -> None:
    plain, dora = count(mode="attention_only"), count(mode="attention_only", dora=True)
    assert dora["lora"] - plain["lora"] == 28 * (3072 + 1024 + 1024 + 3072)


def test_full_training_counts_what_is_not_frozen() -> None:
    found = count(mode="full")
    assert (found["total"], found["trainable"], found["lora"]) == (TOTAL, TOTAL, 0)
    found = count(mode="full", freeze=("text_embedding", "text_head"))
    assert found["trainable"] == TOTAL - 2 * 128256 * 3072
    assert "text_lm_head" not in found["trained_modules"]
    assert "audio_lm_head" in found["trained_modules"]


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="audio_head"):
        count(train_modules=("audio_heads",))


def measure() -> None:
    found = count(mode="comprehensive", rank=16, train_modules=ALL_THREE)
    print(json.dumps(found | {"peak_kib": _peak_kib()}))


def _peak_kib() -> int:
    """Return the peak since the program began; getrusage may report the parent's peak after a fork."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.slow
def test_nothing_is_allocated() -> None:
    command = [sys.executable, "-c", "from tests.models.test_count_model import measure; measure()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["total"] == 6_255_168_512
    assert found["peak_kib"] < 2 * 1024**2
