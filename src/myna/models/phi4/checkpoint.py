"""Where weights come from, and whether every key fits.

The layout is transformers' (`model_type` phi4_multimodal). What looks at pictures is not loaded: nothing here looks,
and half a billion weights of it would lie in memory for nothing. The LoRA for speech that ships beside the released
weights, `speech-lora/`, is part of the model that people know: it is merged when the weights are loaded.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM, PreTrainedTokenizerFast

from myna.errors import CheckpointError, ModelError
from myna.models.files import check_belongs, listed, new_folder, opened, read_json, weight_files, write_json
from myna.models.phi4.codec import FILES
from myna.models.phi4.render import END, ROLES

_EXTEND = "model.embed_tokens_extend."
UNSEEN = (
    f"{_EXTEND}image_embed.",
    f"{_EXTEND}audio_embed.up_proj_for_vision_speech.",
    f"{_EXTEND}audio_embed.down_proj_for_vision_speech.",
)
"""What the names of tensors begin with that only a model with eyes needs."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SPEECH_ADAPTER = "speech-lora"
SHARD = "5GB"


class Stored(NamedTuple):
    file: Path
    shape: tuple[int, ...]


def read_config(folder: Path) -> Phi4MultimodalConfig:
    file = folder / "config.json"
    try:
        config = Phi4MultimodalConfig.from_dict(read_json(file))
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise ModelError(f"{file}: {error}", hint="correct that setting, or download the checkpoint again") from error
    audio = config.audio_config
    for name, id in (("audio_token_id", audio.audio_token_id), ("pad_token_id", config.pad_token_id)):
        if id is not None and id >= config.vocab_size:
            raise ModelError(
                f"{file}: {name} is {id}, but vocab_size is {config.vocab_size}",
                hint="correct the id; it must be the one of the tokenizer",
            )
    if config.sliding_window is not None:
        raise ModelError(
            f"{file}: sliding_window is {config.sliding_window}, and sequences are attended to as a whole here",
            hint="set it to null, as the released checkpoint has it",
        )
    return config


def check_tokenizer(config: Phi4MultimodalConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Tokenizer and configuration must speak of the same ids, and the prompt's tokens must be single ones."""
    end = tokenizer.get_vocab().get(END)
    other_ids = [] if end in end_ids(config) else [f"eos_token_id is {config.eos_token_id}, but {END} is {end}"]
    check_belongs(tokenizer, config.vocab_size, (*ROLES, END), other_ids)


def end_ids(config: Phi4MultimodalConfig) -> tuple[int, ...]:
    ids = config.eos_token_id
    return tuple(ids) if isinstance(ids, list) else (ids,)


def meta_model(config: Phi4MultimodalConfig, *, dtype: torch.dtype | None = None) -> Any:
    """The model on the meta device, without its eyes: names and shapes, no memory."""
    with torch.device("meta"):
        model: Any = Phi4MultimodalForCausalLM._from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa"
        ).eval()
    extend = model.model.embed_tokens_extend
    extend.image_embed = None
    extend.audio_embed.up_proj_for_vision_speech = extend.audio_embed.down_proj_for_vision_speech = None
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def load_weights(
    folder: Path, config: Phi4MultimodalConfig, *, dtype: torch.dtype | None, device: torch.device | str
) -> Any:
    """The model with the weights of a folder, every key and shape checked before one is read. Device `meta` gives the
    model without weights, and reads nothing."""
    device = torch.device(device)
    model = meta_model(config, dtype=dtype)
    if device.type == "meta":
        return model
    stored = _fitting(folder, config, model)
    with ExitStack() as stack:
        held = {file: stack.enter_context(opened(file)) for file in {one.file for one in stored.values()}}
        # Copied, for a tensor of its own instead of a view of the file.
        state = {name: held[one.file].get_tensor(name).to(device, dtype, copy=True) for name, one in stored.items()}
    _merge_speech_adapter(state, folder)
    if config.tie_word_embeddings:
        state[HEAD] = state[EMBEDDING]
    model.load_state_dict(state, strict=True, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    # What is computed and never stored is still on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model


def check_weights(folder: Path, config: Phi4MultimodalConfig) -> str:
    """See that every tensor has its place, from headers alone; what was found, in words."""
    stored = _fitting(folder, config, meta_model(config))
    speech = "with" if (folder / SPEECH_ADAPTER).is_dir() else "without"
    return f"all {len(stored)} tensors have their place, {speech} an adapter for speech beside them"


def save(model: Any, folder: Path, tokenizer: PreTrainedTokenizerFast, source: Path) -> None:
    """Write a checkpoint that `from_pretrained` reads. What was not loaded is taken over from `source` as it is."""
    state: dict[str, torch.Tensor] = model.state_dict()
    if state.keys() != meta_model(model.config).state_dict().keys():
        raise ModelError(
            "the model is wrapped or carries an adapter, so it cannot be saved as a checkpoint",
            hint="merge the adapter and unwrap the model first",
        )
    if model.config.tie_word_embeddings:
        del state[HEAD]
    for file in weight_files(source):
        with opened(file) as tensors:
            state |= {name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith(UNSEEN)}  # noqa: SIM118
    with new_folder(folder) as made:
        save_torch_state_dict(state, made, max_shard_size=SHARD)
        model.config.save_pretrained(made)
        tokenizer.save_pretrained(made)
        for name in FILES:
            if (source / name).is_file():
                write_json(made / name, read_json(source / name))


def _fitting(folder: Path, config: Phi4MultimodalConfig, model: Any) -> dict[str, Stored]:
    """What is to be read, by name, once it is sure that it fits. Reads the headers and no tensor."""
    stored: dict[str, Stored] = {}
    for file in weight_files(folder):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors file is no dictionary
                if not name.startswith(UNSEEN):
                    stored[name] = Stored(file, tuple(tensors.get_slice(name).get_shape()))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        # One tensor under two names; some checkpoints hold it twice.
        stored.pop(HEAD, None)
        del expected[HEAD]
    problems = {
        "missing": [name for name in expected if name not in stored],
        "unexpected": [name for name in stored if name not in expected],
        "of another shape": [
            f"{name} {one.shape} instead of {expected[name]}"
            for name, one in stored.items()
            if one.shape != expected.get(name, one.shape)
        ],
    }
    if any(problems.values()):
        told = "".join(f"\n  {len(names)} {what}: {listed(names)}" for what, names in problems.items() if names)
        raise CheckpointError(
            f"the weights in {folder} do not fit its config.json{told}",
            hint="the configuration and the weights must come from one checkpoint; download it again if in doubt",
        )
    return stored


def _merge_speech_adapter(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Add the LoRA that ships with the weights, where one does."""
    home = folder / SPEECH_ADAPTER
    if not home.is_dir():
        return
    settings = read_json(home / "adapter_config.json")
    unknown = [key for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save") if settings.get(key)]
    if settings.get("peft_type") != "LORA" or unknown:
        raise CheckpointError(
            f"{home} is no plain LoRA: {', '.join(unknown) or settings.get('peft_type')}",
            hint=f"merge it elsewhere, save the whole model, and leave {SPEECH_ADAPTER} out",
        )
    rank = settings["r"]
    scale = settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank)
    [file] = weight_files(home, stem="adapter_model")
    with opened(file) as tensors:
        left = set(tensors.keys())
        for name in sorted(key for key in left if ".lora_A." in key):
            pair = name, name.replace(".lora_A.", ".lora_B.")
            target = f"{name.removeprefix('base_model.model.').partition('.lora_A.')[0]}.weight"
            if target not in state or pair[1] not in left:
                break
            down, up = (tensors.get_tensor(one).to(state[target].device, torch.float32) for one in pair)
            merged = state[target].float() + scale * (up @ down)
            state[target] = merged.to(state[target].dtype)
            left -= {*pair}
    if left:
        raise CheckpointError(
            f"{file} holds tensors that belong to no layer of the model: {listed(sorted(left))}",
            hint="download the checkpoint again",
        )
