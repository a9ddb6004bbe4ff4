"""Options that several commands have, and the types of their parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

from cyclopts import Parameter
from cyclopts.validators import Number

PathLike = str | os.PathLike[str]
SettingOverrides = Mapping[str, Any] | Sequence[str]
"""Recipe settings on top of a recipe: `{"train.steps": 60}`, or `["train.steps=60"]` as `--set` takes them."""


def option(
    help: str, *names: str, panel: str | None = None, least: float | None = None, most: float | None = None
) -> Parameter:
    """Describe an option: its help, further names such as `-o`, its panel in the help, and its range."""
    is_limited = least is not None or most is not None
    settings: dict[str, Any] = {"group": panel} if panel is not None else {}
    settings |= {"validator": Number(gte=least, lte=most)} if is_limited else {}
    return Parameter(help=help, alias=names, **settings)


Source = Annotated[PathLike, option("Folder, file or hub name of a dataset.")]
Out = Annotated[PathLike, option("Folder to write.", "-o")]
Model = Annotated[str, option("Hub name or folder of the model.", "-m")]
BaseModel = Annotated[
    str | None, option("Base model of a run or an adapter, if not the one that it names.", "-m", panel="Model")
]
Codec = Annotated[str | None, option("Hub name or folder of another codec than the model's.", panel="Model")]
Device = Annotated[str, option("auto, cpu, cuda or mps.", panel="Model")]
Strength = Annotated[
    float, option("Scale of the run's LoRA: less keeps more of the untuned model.", panel="Model", least=0)
]
StoredWeights = Annotated[
    Literal["none", "fp8", "int8", "nf4"],
    option("Store the weights smaller: fp8 or int8 in half, nf4 in a quarter.", panel="Model"),
]
Layout = Annotated[str | None, option("Layout of the source; detected if left out.")]
Language = Annotated[str, option("Language of utterances whose source names none.")]
ASR = Annotated[
    str | None, option("Name or folder of a Whisper (base, transformers:base), for word error rates.", panel="Scores")
]
SpeakerEncoder = Annotated[
    str, option("ecapa, ecapa:FILE.safetensors, resemblyzer, wavlm, or the folder of a WavLM.", panel="Scores")
]
Limit = Annotated[int | None, option("Use this many sentences; speakers take turns.", least=1)]
BatchSize = Annotated[int, option("Sentences or recordings processed at once.", least=1)]
Seed = Annotated[int, option("Same seed, same choice and same speech.", least=0)]
Settings = Annotated[
    SettingOverrides, Parameter(name="--set", help="Change a setting: KEY=VALUE, as train.steps=100; repeatable.")
]
Ray = Annotated[str | None, option("Address of a Ray cluster that shares the folders, or auto.")]
Workers = Annotated[int | None, option("Processes of this machine that share the work.", least=1)]
WeightsLayout = Annotated[str, option("transformers or original (boson).")]
Json = Annotated[bool, Parameter(name="--json", help="Print the result as JSON.")]
Force = Annotated[bool, option("Write over files that are there. Inputs never are.")]


class ModelOptions(TypedDict, total=False):
    """Options of commands that open a model to speak with: keyword arguments of `Voice.open`."""

    run: Annotated[
        PathLike | None,
        option("Run folder, one of its checkpoints, or a LoRA adapter: folder or hub name.", panel="Model"),
    ]
    model: Annotated[
        str | None, option("Hub name or folder of an untuned model; beside --run, its base model.", "-m", panel="Model")
    ]
    strength: Strength
    quantization: StoredWeights
    codec: Codec
    device: Device
