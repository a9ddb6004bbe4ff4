"""Checkpoint reading and writing, every key and shape checked.

The layout is transformers' (`model_type` phi4_multimodal). The vision encoder, half a billion weights, is not loaded.
`speech-lora/`, a LoRA beside the released weights, is part of the released model and is merged when the weights are
loaded.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM, PreTrainedTokenizerFast

from myna.core.compat import model_from_config
from myna.core.errors import CheckpointError, ModelError
from myna.core.io import atomic_folder
from myna.models import files
from myna.models.phi4.codec import SETTINGS_FILES
from myna.models.phi4.render import END, ROLES

_EXTEND = "model.embed_tokens_extend."
VISION_PREFIXES = (
    f"{_EXTEND}image_embed.",
    f"{_EXTEND}audio_embed.up_proj_for_vision_speech.",
    f"{_EXTEND}audio_embed.down_proj_for_vision_speech.",
)
"""Prefixes of tensor names of the vision encoder."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SPEECH_ADAPTER = "speech-lora"
MAX_SHARD_SIZE = "5GB"


def read_config(folder: Path) -> Phi4MultimodalConfig:
    file = folder / "config.json"
    try:
        config = Phi4MultimodalConfig.from_dict(files.read_json(file))
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise ModelError(f"{file}: {error}", hint="correct that setting, or download the checkpoint again") from error
    audio = config.audio_config
    for name, id in (("audio_token_id", audio.audio_token_id), ("pad_token_id", config.pad_token_id)):
        if id is not None and id >= config.vocab_size:
            raise ModelError(
                f"{file}: {name} is {id}, but vocab_size is {config.vocab_size}",
                hint="correct the id; it must be the one of the tokenizer",
            )
    if config.sliding_window is not None and config.sliding_window < config.max_position_embeddings:
        raise ModelError(
            f"{file}: sliding_window is {config.sliding_window}, shorter than max_position_embeddings, "
            f"{config.max_position_embeddings}; sequences are attended to as a whole here",
            hint="use a checkpoint of the released model, whose window of 262144 is longer than any sequence",
        )
    return config


def check_tokenizer(config: Phi4MultimodalConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Check the tokenizer, and add `<|end|>` to the ends, of which the released file has `<|endoftext|>` alone."""
    files.check_token_ids(tokenizer, config.vocab_size, (*ROLES, END), ())
    end = tokenizer.get_vocab()[END]
    if end not in eos_ids(config):
        config.eos_token_id = [*eos_ids(config), end]


def eos_ids(config: Phi4MultimodalConfig) -> tuple[int, ...]:
    ids = config.eos_token_id
    return tuple(ids) if isinstance(ids, list) else (ids,)


def meta_model(config: Phi4MultimodalConfig, *, dtype: torch.dtype | None = None) -> Any:
    """Build the model on the meta device without its vision encoder: names and shapes, no memory."""
    with torch.device("meta"):
        model: Any = model_from_config(
            Phi4MultimodalForCausalLM, copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa"
        ).eval()
    extend = model.model.embed_tokens_extend
    extend.image_embed = None
    extend.audio_embed.up_proj_for_vision_speech = extend.audio_embed.down_proj_for_vision_speech = None
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def load_weights(
    folder: Path, config: Phi4MultimodalConfig, *, dtype: torch.dtype | None, device: torch.device | str, **_: bool
) -> Any:
    """Load weights, always with the text head, every key and shape checked first. Device `meta` reads nothing."""
    device = torch.device(device)
    model = meta_model(config, dtype=dtype)
    if device.type == "meta":
        return model
    stored = _check_tensors(folder, config, model)
    state = {name: tensor.read().to(device, dtype, copy=True) for name, tensor in stored.items()}
    _merge_speech_adapter(state, folder)
    if config.tie_word_embeddings:
        state[HEAD] = state[EMBEDDING]
    model.load_state_dict(state, strict=True, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    # The rotary frequencies are computed, not stored, and are still on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model


def check_weights(folder: Path, config: Phi4MultimodalConfig) -> str:
    stored = _check_tensors(folder, config, meta_model(config))
    speech = "with" if (folder / SPEECH_ADAPTER).is_dir() else "without"
    return f"all {len(stored)} tensors have their place, {speech} an adapter for speech beside them"


def save(model: Any, folder: Path, tokenizer: PreTrainedTokenizerFast, source: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint that `from_pretrained` reads, with the vision encoder of `source`, and return its tensors. A
    head that was trained by itself is no longer tied to the embedding, and the configuration then says so."""
    state: dict[str, torch.Tensor] = model.state_dict()
    files.check_unwrapped(state, meta_model(model.config).state_dict())
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = config.tie_word_embeddings and torch.equal(state[HEAD], state[EMBEDDING])
    if config.tie_word_embeddings:
        del state[HEAD]
    state |= {t.name: t.read() for t in files.stored_tensors(source) if t.name.startswith(VISION_PREFIXES)}
    with atomic_folder(folder) as out:
        save_torch_state_dict(state, out, max_shard_size=MAX_SHARD_SIZE)
        config.save_pretrained(out)
        tokenizer.save_pretrained(out)
        for name in SETTINGS_FILES:
            if (source / name).is_file():
                files.write_json(out / name, files.read_json(source / name))
    return state


def _check_tensors(folder: Path, config: Phi4MultimodalConfig, model: Any) -> dict[str, files.StoredTensor]:
    """Return the tensors to load, by name, after a check of names and shapes from the headers."""
    stored = {t.name: t for t in files.stored_tensors(folder) if not t.name.startswith(VISION_PREFIXES)}
    expected = model.state_dict()
    if config.tie_word_embeddings:
        # The tied head and embedding are one tensor under two names; some checkpoints hold it twice.
        stored.pop(HEAD, None)
        del expected[HEAD]
    files.check_state_dict(expected, {name: tensor.shape for name, tensor in stored.items()}, folder)
    return stored


def _merge_speech_adapter(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Merge the LoRA in `speech-lora/`, if there is one."""
    adapter = folder / SPEECH_ADAPTER
    if not adapter.is_dir():
        return
    settings = files.read_json(adapter / "adapter_config.json")
    unknown = [key for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save") if settings.get(key)]
    if settings.get("peft_type") != "LORA" or unknown:
        raise CheckpointError(
            f"{adapter} is no plain LoRA: {', '.join(unknown) or settings.get('peft_type')}",
            hint=f"merge it elsewhere, save the whole model, and leave {SPEECH_ADAPTER} out",
        )
    rank = settings["r"]
    scale = settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank)
    stored = {tensor.name: tensor for tensor in files.stored_tensors(adapter, stem="adapter_model")}
    for name in sorted(key for key in stored if ".lora_A." in key):
        pair = name, name.replace(".lora_A.", ".lora_B.")
        target = f"{name.removeprefix('base_model.model.').partition('.lora_A.')[0]}.weight"
        if target not in state or pair[1] not in stored:
            break
        down, up = (stored.pop(key).read().to(state[target].device, torch.float32) for key in pair)
        merged = state[target].float() + scale * (up @ down)
        state[target] = merged.to(state[target].dtype)
    if stored:
        raise CheckpointError(
            f"{adapter} holds tensors that belong to no layer of the model: {files.format_names(sorted(stored))}",
            hint="download the checkpoint again",
        )
