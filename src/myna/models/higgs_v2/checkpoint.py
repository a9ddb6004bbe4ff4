"""Checkpoint reading and writing in both layouts, every key and shape checked.

The tensors have two sets of names: those of transformers (`model_type` higgs_audio_v2), which Myna works with, and
those of the original implementation (higgs_audio). One table renames both ways, in checkpoints and adapters.
"""

import copy
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from transformers import GenerationConfig, HiggsAudioV2Config, LlamaConfig, PreTrainedTokenizerFast
from transformers import HiggsAudioV2ForConditionalGeneration as HiggsModel

from myna.core.compat import model_from_config
from myna.core.errors import CheckpointError, ModelError
from myna.core.io import atomic_folder
from myna.models import files
from myna.models.base import Sampling
from myna.models.files import METADATA_FILE, is_adapter, load_tokenizer

Layout = Literal["transformers", "original"]

SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_window": "ras_win_len",
    "repetition_limit": "ras_win_max_num_repeat",
}
"""Myna's names of sampling settings -> names in `generation_config.json`."""
DEFAULT_SAMPLING = Sampling()

MODULE_RENAMES = (  # module names: original, transformers
    ("embed_tokens", "model.embed_tokens"),
    ("layers", "model.layers"),
    ("norm", "model.norm"),
    ("audio_codebook_embeddings", "model.embed_audio_tokens.embed_audio_tokens"),
    ("audio_decoder_proj.audio_lm_head", "audio_lm_head"),
    ("audio_decoder_proj.text_lm_head", "text_lm_head"),
)
SPLIT_TENSOR = re.compile(r"\.(?:embedding|linear)_(?:frozen|trainable)(?=\.)")
"""Names of a partly frozen embedding or head, which the original stores as two tensors, the frozen rows first."""
DERIVED_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.original_inv_freq", "audio_codebook_weights")
"""Tensors that are computed from the configuration; some checkpoints store them nevertheless."""
TEXT_HEAD_WEIGHT = "text_lm_head.weight"
PEFT_PREFIX = "base_model.model."
"""PEFT's prefix of module names."""
MAX_SHARD_SIZE = "5GB"

TEXT_SETTINGS = (  # settings in `text_config` of the original, and in the configuration itself of transformers
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache"),
    *("attention_bias", "attention_dropout", "mlp_bias", "bos_token_id"),
)
AUDIO_SETTINGS = (  # original, transformers, the original's default
    ("audio_num_codebooks", "num_codebooks", 12),
    ("audio_stream_bos_id", "audio_stream_bos_id", 1024),
    ("audio_stream_eos_id", "audio_stream_eos_id", 1025),
    ("audio_out_token_idx", "audio_token_id", 128016),
    ("audio_out_bos_token_id", "audio_bos_token_id", 128013),
    ("pad_token_id", "pad_token_id", 128001),
)
FIXED_SETTINGS = (  # original, its default, the only value that transformers can express
    ("audio_embed_avg", False, False),
    ("audio_decoder_proj_num_layers", 0, 0),
    ("skip_audio_tower", False, True),
    ("use_audio_out_embed_projector", False, False),
    ("use_audio_out_self_attention", False, False),
    ("use_delay_pattern", False, True),
    ("use_rq_transformer", False, False),
)

DELAY_TOKEN = "<|reserved_special_token_6|>"
SPECIAL_IDS = {
    "audio_token_id": "<|AUDIO_OUT|>",
    "audio_bos_token_id": "<|audio_out_bos|>",
    "audio_delay_token_id": DELAY_TOKEN,
    "pad_token_id": "<|end_of_text|>",
    "eos_token_id": "<|eot_id|>",
}
"""Settings of token ids, and their tokens. transformers' default of `bos_token_id` is wrong, and never read."""
PROMPT_TOKENS = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|audio_bos|>", "<|audio_eos|>", "<|audio_out_bos|>", "<|AUDIO_OUT|>", DELAY_TOKEN),
)


def read_sampling(folder: Path) -> Sampling:
    """Read the sampling settings of `generation_config.json`; what it leaves out has our defaults."""
    file = folder / "generation_config.json"
    stored = files.read_json(file) if file.is_file() else {}
    settings = {ours: stored[theirs] for ours, theirs in SAMPLING_KEYS.items() if stored.get(theirs) is not None}
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ModelError(
                f"{file}: {SAMPLING_KEYS[name]} is {value!r}, where a number of at least 0 is due",
                hint="correct it, or download the checkpoint again",
            )
    if stored.get("do_sample") is False:
        settings["temperature"] = 0.0
    return Sampling(**settings)


def read_config(folder: Path) -> HiggsAudioV2Config:
    """Read and check the configuration of a checkpoint of either layout."""
    file = folder / "config.json"
    stored = files.read_json(file)
    kind = stored.get("model_type")
    try:
        if kind == "higgs_audio":
            config = _config_from_original(stored, load_tokenizer(folder), file)
        elif kind == "higgs_audio_v2":
            config = HiggsAudioV2Config.from_dict(stored)
        else:
            raise ModelError(
                f"{file}: model_type is {kind!r}, not higgs_audio_v2 (or higgs_audio, the original layout)",
                hint="give a Higgs Audio v2 checkpoint, such as bosonai/higgs-audio-v2-generation-3B-base",
            )
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ModelError(f"{file}: {error}", hint="correct that setting, or download the checkpoint again") from error
    last = max(config.audio_stream_bos_id, config.audio_stream_eos_id)
    if config.codebook_size <= last:
        raise ModelError(
            f"{file}: codebook_size is {config.codebook_size}, which leaves no room for the stream ids up to {last}",
            hint=f"set codebook_size to {last + 1}; transformers' default of 1024 is not the released model's",
        )
    for setting in SPECIAL_IDS:
        if max(_ids(config, setting), default=0) >= config.vocab_size:
            raise ModelError(
                f"{file}: {setting} is {getattr(config, setting)}, but vocab_size is {config.vocab_size}",
                hint="correct the id; it must be the one of the tokenizer",
            )
    return config


def check_tokenizer(config: HiggsAudioV2Config, tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary, other_ids = tokenizer.get_vocab(), []
    for setting, token in SPECIAL_IDS.items():
        # Padding is never read, and transformers' converter sets the tokenizer's to its end.
        if setting != "pad_token_id" and token in vocabulary and vocabulary[token] not in _ids(config, setting):
            other_ids.append(f"{setting} is {getattr(config, setting)}, but {token} is {vocabulary[token]}")
    files.check_token_ids(tokenizer, config.vocab_size, PROMPT_TOKENS, other_ids)


def meta_model(config: HiggsAudioV2Config, *, text_head: bool, dtype: torch.dtype | None = None) -> HiggsModel:
    """Build the model on the meta device: names and shapes, no memory."""
    with torch.device("meta"):
        settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa", "use_text_head": text_head}
        model: HiggsModel = model_from_config(HiggsModel, copy.deepcopy(config), **settings)
    return model.eval()


def load_weights(
    folder: Path, config: HiggsAudioV2Config, *, dtype: torch.dtype | None, device: torch.device | str, text_head: bool
) -> HiggsModel:
    """Load weights of either layout, all names and shapes checked first. Device `meta` reads nothing."""
    device = torch.device(device)
    model = meta_model(config, text_head=text_head, dtype=dtype)
    if device.type == "meta":
        return model
    stored = _tensor_parts(folder)
    if not text_head:
        stored.pop(TEXT_HEAD_WEIGHT, None)
    elif TEXT_HEAD_WEIGHT not in stored:
        raise CheckpointError(
            f"{folder} has no text head ({TEXT_HEAD_WEIGHT})",
            hint="train without a text loss (text weight 0), or use a checkpoint that was saved with its text head",
        )
    files.check_state_dict(model.state_dict(), {name: _shape(parts) for name, parts in stored.items()}, folder)

    def read(name: str) -> torch.Tensor:
        parts: list[torch.Tensor] = [part.read().to(device, dtype, copy=True) for part in stored[name]]
        if _is_split(stored[name]):
            return torch.cat(parts)
        if any(not torch.equal(parts[0], other) for other in parts[1:]):
            keys = [part.name for part in stored[name]]
            raise CheckpointError(
                f"{folder} holds {name} more than once, with different values: {files.format_names(keys)}",
                hint="download the checkpoint again, or save it from one source",
            )
        return parts[0]

    model.load_state_dict({name: read(name) for name in stored}, strict=True, assign=True)
    # Computed buffers are not stored, and are still on the meta device.
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(model.config).to(device)
    offsets = torch.arange(config.num_codebooks, device=device) * config.codebook_size
    inner.embed_audio_tokens.audio_tokens_offsets = offsets
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model


def check_weights(folder: Path, config: HiggsAudioV2Config) -> str:
    stored = _tensor_parts(folder)
    text_head = TEXT_HEAD_WEIGHT in stored
    model = meta_model(config, text_head=text_head)
    files.check_state_dict(model.state_dict(), {name: _shape(parts) for name, parts in stored.items()}, folder)
    return f"all {len(stored)} tensors have their place, {'with' if text_head else 'without'} a text head"


def save_checkpoint(
    model: HiggsModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    sampling: Sampling = DEFAULT_SAMPLING,
    layout: Layout = "transformers",
    codec: Path | None = None,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint; in the transformers layout it is ready for `from_pretrained` and `generate`. The original
    layout always has a text head. A `codec` folder is copied beside it. Returns the tensors by the names they are
    written under."""
    state: dict[str, torch.Tensor] = model.state_dict()
    text_head = TEXT_HEAD_WEIGHT in state
    files.check_unwrapped(state, meta_model(model.config, text_head=text_head).state_dict())
    if layout == "original" and not text_head:
        raise ModelError(
            f"the original layout always has a text head, and this model has no {TEXT_HEAD_WEIGHT}",
            hint="load the checkpoint with its text head, or save in the transformers layout",
        )
    with atomic_folder(folder) as written:
        tokenizer.save_pretrained(written)
        if layout == "transformers":
            model.save_pretrained(written, max_shard_size=MAX_SHARD_SIZE)
            # Greedy sampling has no temperature in transformers.
            drawn = sampling.temperature > 0
            names = {name: key for name, key in SAMPLING_KEYS.items() if drawn or key.startswith("ras_")}
            GenerationConfig(
                bos_token_id=_token_id(tokenizer, "<|begin_of_text|>"),
                **{name: getattr(model.config, name) for name in ("eos_token_id", "pad_token_id")},
                **{key: getattr(sampling, name) for name, key in names.items()},
                do_sample=drawn,
            ).save_pretrained(written)
        else:
            state = {_rename(name, "original"): tensor for name, tensor in state.items()}
            save_torch_state_dict(state, written, max_shard_size=MAX_SHARD_SIZE)
            files.write_json(written / "config.json", _config_to_original(model.config, tokenizer, model.dtype))
            # transformers 4.46, which the original needs, knows the tokenizer's class by its old name.
            file = written / "tokenizer_config.json"
            files.write_json(file, files.read_json(file) | {"tokenizer_class": "PreTrainedTokenizerFast"})
        if codec is not None:
            shutil.copytree(codec, written / "codec")
    return state


def parse_layout(name: str) -> Layout:
    if name not in get_args(Layout):
        raise ModelError(f"there is no layout {name}", hint=f"choose one of: {', '.join(get_args(Layout))}")
    return name  # type: ignore[return-value]


def has_text_head(folder: Path) -> bool:
    return TEXT_HEAD_WEIGHT in _tensor_parts(folder)


def convert_layout(source: Path, out: Path, layout: str) -> None:
    """Rewrite a checkpoint or a LoRA adapter, of either layout, in the given one."""
    layout = parse_layout(layout)
    with atomic_folder(out) as written:
        if is_adapter(source):
            _convert_adapter(source, written, layout)
        else:
            config, tokenizer = read_config(source), load_tokenizer(source)
            check_tokenizer(config, tokenizer)
            model = load_weights(source, config, dtype=None, device="cpu", text_head=has_text_head(source))
            codec = source / "codec" if (source / "codec").is_dir() else None
            save_checkpoint(model, written, tokenizer, read_sampling(source), layout, codec)
        if (source / METADATA_FILE).is_file():
            shutil.copy(source / METADATA_FILE, written)


def _rename(name: str, layout: Layout) -> str:
    """Return the name of a module or tensor in `layout`. A name of that layout, or an unknown one, stays."""
    for original, transformers in MODULE_RENAMES:
        old, new = (original, transformers) if layout == "transformers" else (transformers, original)
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def _convert_adapter(source: Path, out: Path, layout: Layout) -> None:
    """Rename an adapter's tensors, and list its modules by name, since patterns in its settings may not carry over."""
    config = files.read_json(source / "adapter_config.json")
    for setting in ("trainable_token_indices", "target_parameters", "layer_replication"):
        if config.get(setting):
            raise ModelError(
                f"{source}/adapter_config.json: {setting} cannot be carried over to another layout",
                hint="merge the adapter into its checkpoint and convert that",
            )
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"{source}/adapter_config.json: peft_type is {config.get('peft_type')}, and only LORA can be converted",
            hint="merge the adapter into its checkpoint and convert that",
        )
    prefixes = tuple(f"{names[layout == 'transformers']}." for names in MODULE_RENAMES)
    tensors: dict[str, torch.Tensor] = {}
    adapted, fully_trained, unknown = set(), set(), []
    for stored in files.stored_tensors(source, stem="adapter_model"):
        name = _rename(stored.name.removeprefix(PEFT_PREFIX), layout)
        if not stored.name.startswith(PEFT_PREFIX) or not name.startswith(prefixes):
            unknown.append(stored.name)
            continue
        tensors[PEFT_PREFIX + name] = stored.read()
        module, lora, _ = name.partition(".lora_")
        if lora:
            adapted.add(module)
        elif ".base_layer." not in name:
            fully_trained.add(name.rpartition(".")[0])
    if unknown:
        raise CheckpointError(
            f"{source}: tensors of no module of Higgs Audio v2: {files.format_names(sorted(unknown))}",
            hint="give an adapter that was trained on Higgs Audio v2 with PEFT",
        )
    config |= dict.fromkeys(("task_type", "auto_mapping", "exclude_modules", "layers_to_transform", "layers_pattern"))
    config |= {"target_modules": sorted(adapted), "modules_to_save": sorted(fully_trained) or None}
    for setting in ("rank_pattern", "alpha_pattern"):
        config[setting] = {_rename(name, layout): value for name, value in (config.get(setting) or {}).items()}
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    files.write_json(out / "adapter_config.json", config)


def _config_from_original(
    stored: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, file: Path
) -> HiggsAudioV2Config:
    def require(setting: str, value: object, needed: object) -> None:
        if value != needed:
            raise ModelError(
                f"{file}: {setting} is {value!r}; transformers' Higgs Audio v2 can only express {needed!r}",
                hint="use a checkpoint of the released architecture, bosonai/higgs-audio-v2-generation-3B-base",
            )

    stored_text = stored.get("text_config") or {}
    require("text_config.model_type", stored_text.get("model_type", "llama"), "llama")
    text = LlamaConfig.from_dict(stored_text)
    for setting, default, needed in FIXED_SETTINGS:
        require(setting, stored.get(setting, default) or False, needed)
    adapter = stored.get("audio_adapter_type", "stack")
    if adapter != "dual_ffn_fast_forward":  # equal to dual_ffn when all layers are dual
        require("audio_adapter_type", adapter, "dual_ffn")
    layers = sorted(stored.get("audio_dual_ffn_layers") or [])
    require("audio_dual_ffn_layers", layers, list(range(text.num_hidden_layers)))
    return HiggsAudioV2Config(
        **{setting: getattr(text, setting) for setting in TEXT_SETTINGS},
        **{ours: stored.get(theirs, default) for theirs, ours, default in AUDIO_SETTINGS},
        codebook_size=stored.get("audio_codebook_size", 1024) + 2,
        rope_parameters=text.rope_parameters,
        audio_delay_token_id=_token_id(tokenizer, DELAY_TOKEN),
        eos_token_id=_token_id(tokenizer, SPECIAL_IDS["eos_token_id"]),
    )


def _config_to_original(
    config: HiggsAudioV2Config, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype
) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    text = {setting: getattr(config, setting) for setting in TEXT_SETTINGS} | {
        "model_type": "llama",
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "bos_token_id": _token_id(tokenizer, "<|begin_of_text|>"),
        "eos_token_id": _token_id(tokenizer, "<|end_of_text|>"),
    }
    return {
        "model_type": "higgs_audio",
        "architectures": ["HiggsAudioModel"],
        "torch_dtype": str(dtype).removeprefix("torch."),
        "hidden_size": config.hidden_size,
        "text_config": text,
        **{setting: needed for setting, _, needed in FIXED_SETTINGS},
        **{theirs: getattr(config, ours) for theirs, ours, _ in AUDIO_SETTINGS},
        "audio_codebook_size": config.codebook_size - 2,
        "audio_adapter_type": "dual_ffn_fast_forward",
        "audio_dual_ffn_layers": list(range(config.num_hidden_layers)),
        "audio_ffn_hidden_size": config.hidden_size,
        "audio_ffn_intermediate_size": config.intermediate_size,
        "encode_whisper_embed": False,
        "encode_audio_in_tokens": True,
        "audio_in_token_idx": _token_id(tokenizer, "<|AUDIO|>"),
        "audio_eos_token_id": _token_id(tokenizer, "<|audio_eos|>"),
    }


def _ids(config: HiggsAudioV2Config, setting: str) -> list[int]:
    value = getattr(config, setting)
    return value if isinstance(value, list) else [] if value is None else [value]


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    number: int | None = tokenizer.get_vocab().get(token)
    if number is None:
        raise ModelError(
            f"the tokenizer has no token {token}", hint="use the tokenizer files that came with the checkpoint"
        )
    return number


def _tensor_parts(folder: Path) -> dict[str, list[files.StoredTensor]]:
    """Return the tensors of a folder by transformers' names; more than one for a tensor that is stored in parts."""
    stored: defaultdict[str, list[files.StoredTensor]] = defaultdict(list)
    for part in files.stored_tensors(folder):
        name = _rename(SPLIT_TENSOR.sub("", part.name), "transformers")
        if not name.endswith(DERIVED_BUFFERS):
            stored[name].append(part)
    return {name: sorted(parts, key=lambda part: part.name) for name, parts in stored.items()}


def _is_split(parts: Iterable[files.StoredTensor]) -> bool:
    return any(SPLIT_TENSOR.search(part.name) for part in parts)


def _shape(parts: list[files.StoredTensor]) -> tuple[int, ...]:
    shape = parts[0].shape
    return (sum(part.shape[0] for part in parts), *shape[1:]) if _is_split(parts) else shape
