"""The typed tree: what it takes, what it refuses, and what it says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.recipe_reference import describe

from myna.core.config import (
    AdaptSettings,
    DataSettings,
    LossSettings,
    ModelSettings,
    Recipe,
    TrainSettings,
    dump_recipe,
    load_recipe,
    parse_recipe,
    shipped_recipes,
    valid_keys,
)
from myna.core.errors import ConfigError
from myna.core.setting_names import FOREIGN_NAMES
from myna.models import is_model_name
from myna.models.files import absolute_source

ROOT = Path(__file__).parents[2]
LEAST: dict[str, Any] = {"model": {"source": "somewhere"}, "data": {"train": "data/x"}, "train": {"steps": 10}}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(LEAST))
    return path


def refused(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, list(overrides))
    return caught.value


def refused_text(path: Path, text: str) -> ConfigError:
    path.write_text(text)
    return refused(path)


def test_a_recipe_needs_little(recipe: Path) -> None:
    found = load_recipe(recipe)
    assert found == Recipe(
        model=ModelSettings(source="somewhere"), data=DataSettings(train=Path("data/x")), train=TrainSettings(steps=10)
    )


# Unknown keys.


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("trian", {"steps": 1}, "`train`"),
        ("learning_rate", 1, "`train.learning_rate`"),
        ("train.lerning_rate", 1, "`train.learning_rate`"),
        ("adapt.learning_rate", 1, "`train.learning_rate`"),
        ("data.sceen", "x", "`data.scene`"),
        ("loss.qqq", 1, "loss.codebook_weights, loss.text_weight"),
        ("zzz", 1, "model.source"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(recipe: Path, key: str, value: object, nearest: str) -> None:
    tree = {**LEAST}
    group, _, leaf = key.rpartition(".")
    if group:
        tree[group] = tree.get(group, {}) | {leaf: value}
    else:
        tree[leaf] = value
    error = refused_text(recipe, yaml.safe_dump(tree))
    assert f"{recipe}: there is no setting `{key}`" in error.what
    assert nearest in error.hint


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.step=1", "`train.steps`"),
        ("steps=1", "`train.steps`"),
        ("adapt.rang=1", "`adapt.rank`"),
        ("train={steps: 1}", "train.steps"),
        ("train.steps.more=1", "train.steps"),
        ("name.x=1", "name"),
    ],
)
def test_unknown_settings_are_refused(recipe: Path, override: str, nearest: str) -> None:
    error = refused(recipe, override)
    assert f"--set {override}" in error.what
    assert nearest in error.hint


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("train.lr", "train.learning_rate=..."),
        ("train.bf16", "train.precision=bf16"),
        ("train.fp16", "train.precision=fp16"),
        ("train.gradient_accumulation_steps", "train.batch_size=..."),
        ("per_device_train_batch_size", "train.micro_batch_size=..."),
        ("lora_rank", "adapt.rank=..."),
        ("adapt.lora_alpha", "adapt.alpha=..."),
        ("num_train_epochs", "train.epochs=..."),
        ("max_steps", "train.steps=..."),
        ("train.warmup_ratio", "train.warmup=..."),
    ],
)
def test_names_of_other_trainers_are_answered_with_the_setting(recipe: Path, foreign: str, ours: str) -> None:
    assert f"--set {ours}" in refused(recipe, f"{foreign}=1").hint
    assert f"--set {ours}" in refused_text(recipe, yaml.safe_dump(LEAST | {foreign: 1})).hint


def test_every_setting_that_other_trainers_name_otherwise_exists() -> None:
    known = set(valid_keys())
    assert set(FOREIGN_NAMES) <= known
    names = [name for names in FOREIGN_NAMES.values() for name in names]
    assert len(names) == len(set(names)) and not set(names) & {key.rpartition(".")[2] for key in known}


@pytest.mark.parametrize(("epochs", "changes"), [(3, ["train.steps=12"]), (None, ["train.epochs=2.5"])])
def test_the_length_that_is_set_replaces_the_recipes_other_one(
    recipe: Path, epochs: int | None, changes: list[str]
) -> None:
    recipe.write_text(yaml.safe_dump(LEAST | {"train": {"epochs": epochs} if epochs else {"steps": 7}}))
    found = load_recipe(recipe, changes).train
    assert (found.steps, found.epochs) == ((12, None) if epochs else (None, 2.5))
    assert "either" in refused(recipe, "train.steps=12", "train.epochs=3").what, "of two that are set, neither wins"


@pytest.mark.parametrize(
    ("name", "meant"), [("paper_r64", "pronunciation_paper_r64"), ("vietnamese_tss", "vietnamese_tts")]
)
def test_a_part_of_a_recipes_name_or_a_typo_in_it_is_enough_to_suggest_it(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(Path(name))
    assert f"did you mean {meant}?" in caught.value.hint


@pytest.mark.parametrize("override", ["train.steps", "=1", ""])
def test_set_wants_a_key_and_a_value(recipe: Path, override: str) -> None:
    assert "KEY=VALUE" in refused(recipe, override).what


def test_set_refuses_broken_yaml(recipe: Path) -> None:
    assert "--set data.seconds=[1, 2" in refused(recipe, "data.seconds=[1, 2").what


# Values.


def test_set_reads_values_as_yaml(recipe: Path) -> None:
    found = load_recipe(
        recipe,
        [
            "train.learning_rate=1e-5",
            "train.steps=20",
            "data.pack=false",
            "data.seconds=[1, 2.5]",
            "data.evaluation=data/y",
            "data.scene=a = b",
            "loss.codebook_weights=[1, 0.5]",
            "adapt.train_modules=[audio_head]",
            "train.evaluate_every=null",
            "name=نطق",
        ],
    )
    assert found.train.learning_rate == 1e-5
    assert found.train.steps == 20
    assert found.data.pack is False
    assert found.data.seconds == (1.0, 2.5)
    assert found.data.evaluation == Path("data/y")
    assert found.data.scene == "a = b"
    assert found.loss.codebook_weights == (1.0, 0.5)
    assert found.adapt.train_modules == ("audio_head",)
    assert found.train.evaluate_every is None
    assert found.name == "نطق"


def test_a_later_set_wins_and_groups_may_be_absent_or_empty(recipe: Path) -> None:
    recipe.write_text("model: {source: x}\ndata: {train: y}\ntrain:\nadapt:\n")
    found = load_recipe(recipe, ["train.steps=1", "train.steps=2", "loss.supervise_references=true"])
    assert found.train.steps == 2
    assert found.loss.supervise_references


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.steps=many", "train.steps"),
        ("train.steps=0", "train.steps"),
        ("train.steps=1.5", "train.steps"),
        ("train.learning_rate=0", "train.learning_rate"),
        ("train.learning_rate=.inf", "train.learning_rate"),
        ("train.learning_rate=.nan", "train.learning_rate"),
        ("train.schedule=cosin", "train.schedule"),
        ("train.device=gpu", "train.device"),
        ("train.betas=[0.9, 1.0]", "train.betas"),
        ("adapt.dropout=1", "adapt.dropout"),
        ("adapt.train_modules=audio_head", "adapt.train_modules"),
        ("data.seconds=[1]", "data.seconds"),
        ("loss.codebook_weights=quadratic", "loss.codebook_weights"),
        ("loss.codebook_weights=[1, -1]", "loss.codebook_weights"),
        ("name=../elsewhere", "name"),
        ("name=..", "name"),
    ],
)
def test_a_wrong_value_is_refused_by_file_and_key(recipe: Path, override: str, key: str) -> None:
    error = refused(recipe, override)
    assert str(recipe) in error.what
    assert f"`{key}`" in error.what
    assert error.hint


def test_a_number_for_a_text_asks_for_quotes(recipe: Path) -> None:
    error = refused(recipe, "model.revision=1.10")
    assert "`model.revision` should be text (got 1.1)" in error.what
    assert "quotes" in error.hint
    assert load_recipe(recipe, ["model.revision='1.10'"]).model.revision == "1.10"


@pytest.mark.parametrize("key", ["model.source", "data.train"])
def test_a_missing_key_is_named(recipe: Path, key: str) -> None:
    group, leaf = key.split(".")
    tree = {**LEAST, group: {name: value for name, value in LEAST[group].items() if name != leaf}}
    error = refused_text(recipe, yaml.safe_dump(tree))
    assert error.what == f"{recipe}: `{key}` is missing"
    assert f"--set {key}=" in error.hint


def test_a_missing_item_is_named(recipe: Path) -> None:
    error = refused(recipe, "data.seconds=[1]")
    assert "`data.seconds`, item 2, is missing" in error.what
    assert "`data.seconds`" in error.hint


def test_a_missing_group_is_named(recipe: Path) -> None:
    assert "`model` is missing" in refused_text(recipe, "data: {train: x}\ntrain: {steps: 1}").what


def test_all_problems_are_reported_at_once(recipe: Path) -> None:
    error = refused_text(recipe, "model: {sauce: x}\ndata: {train: y}\ntrain: {steps: no}")
    assert "`model.source` is missing" in error.what
    assert "`model.sauce`" in error.what
    assert "`train.steps`" in error.what
    assert "`model.source`?" in error.hint


def test_keys_are_words_and_groups_are_groups(recipe: Path) -> None:
    error = refused_text(recipe, "model: x\ndata: {train: y}\ntrain: {1: 2, steps: 3}")
    assert "`model` is a group of settings (got 'x')" in error.what
    assert "model.source" in error.hint
    assert "there is no setting `train.1`" in error.what


# Files.


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a list", "just words"])
def test_a_file_without_settings_is_refused(recipe: Path, text: str) -> None:
    assert "holds no settings" in refused_text(recipe, text).what


def test_broken_yaml_is_refused_with_its_line(recipe: Path) -> None:
    error = refused_text(recipe, "model: {source: x\ndata: [")
    assert str(recipe) in error.what
    assert "line 2" in error.what


@pytest.mark.parametrize("text", ["train: {steps: 1}\ntrain: {clip: 2}", "train:\n  steps: 1\n  steps: 2"])
def test_a_key_that_comes_twice_is_refused(recipe: Path, text: str) -> None:
    assert "is set twice" in refused_text(recipe, text).what


def test_yaml_runs_no_code(recipe: Path) -> None:
    assert "not readable" in refused_text(recipe, "name: !!python/object/apply:os.getcwd []").what


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert "there is no recipe" in refused(tmp_path / "nowhere.yaml").what
    assert "cannot be read" in refused(tmp_path).what
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\xff")
    assert "not readable" in refused(tmp_path / "latin.yaml").what


# Sense.


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.epochs=1", "train.steps=5"], "either `train.epochs` or `train.steps`"),
        (["train.steps=null"], "either `train.epochs` or `train.steps`"),
        (["train.micro_batch_size=3"], "`train.batch_size` (8) is no multiple"),
        (["adapt.mode=custom"], "needs `adapt.targets`"),
        (["adapt.targets=[q_proj]"], "`adapt.targets` only counts"),
        (["adapt.freeze=[norms]"], "`adapt.freeze` only counts"),
        (["adapt.mode=full", "adapt.train_modules=[audio_head]"], "`adapt.train_modules` says nothing"),
        (["loss.codebook_weights=[0, 0]"], "`loss.codebook_weights` are all zero"),
        (["loss.codebook_weights=[]"], "`loss.codebook_weights` are all zero"),
        (["data.seconds=[3, 2]"], "`data.seconds` runs from 3.0 to 2.0"),
        (["data.reference_seconds=[3, 2]"], "`data.reference_seconds` runs"),
        (["data.reference=none", "data.require_reference=true"], "contradicts `data.reference: none`"),
        (["data.evaluation=./data/../data/x"], "`data.evaluation` is the training data"),
        (["speech_eval.limit=3"], "`speech_eval.limit` does nothing without `speech_eval.asr`"),
        (["speech_eval.asr=base"], "there are no sentences to speak"),
        (["speech_eval.asr=base", "speech_eval.data=./data/x"], "`speech_eval.data` is the training data"),
        (
            ["speech_eval.asr=base", "speech_eval.sentences=x.txt", "speech_eval.min_stop_rate=2"],
            "`speech_eval.min_stop_rate`",
        ),
        (
            ["speech_eval.asr=base", "data.evaluation=data/y", "train.early_stopping_patience=3"],
            "`train.early_stopping_patience` goes by the loss",
        ),
    ],
)
def test_nonsense_is_refused(recipe: Path, overrides: list[str], said: str) -> None:
    error = refused(recipe, *overrides)
    assert error.what.startswith(str(recipe))
    assert said in error.what


def test_epochs_may_be_a_fraction_and_replace_steps(recipe: Path) -> None:
    assert load_recipe(recipe, ["train.steps=null", "train.epochs=0.5"]).train.epochs == 0.5


def test_a_text_head_may_learn_from_text(recipe: Path) -> None:
    found = load_recipe(recipe, ["adapt.train_modules=[text_head]", "loss.text_weight=0.1"])
    assert found.adapt.train_modules == ("text_head",)


def test_a_wrong_value_is_explained_by_the_meaning_of_its_setting(recipe: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, ["train.learning_rate=fast"])
    assert caught.value.hint == "change `train.learning_rate`: Peak learning rate, after the warm-up."


def test_sentences_without_a_recogniser_are_samples(recipe: Path) -> None:
    """Settings that only scores need are refused then."""
    found = load_recipe(recipe, ["speech_eval.sentences=lines.txt", "speech_eval.limit=3"])
    assert found.speaks_samples and not found.evaluates_speech and not found.publishes_best
    assert not load_recipe(recipe).speaks_samples
    with pytest.raises(ConfigError, match=r"`speech_eval.min_mos` does nothing without"):
        load_recipe(recipe, ["speech_eval.sentences=lines.txt", "speech_eval.min_mos=3"])


def test_speech_is_evaluated_if_a_recogniser_is_named(recipe: Path, tmp_path: Path) -> None:
    assert not load_recipe(recipe).evaluates_speech
    assert not load_recipe(recipe, ["speech_eval.limit=3", "speech_eval.asr=null"]).evaluates_speech, (
        "for once it is switched off"
    )
    (tmp_path / "whisper").mkdir()
    asked = [
        "speech_eval.asr=whisper",
        "speech_eval.sentences=lines.txt",
        "speech_eval.forgetting_data=data/others",
        "speech_eval.min_mos=3",
    ]
    found = load_recipe(recipe, asked)
    assert found.evaluates_speech and found.absolute().speech_eval.asr == "whisper", (
        "a name, as long as no folder has it"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        speech_eval = found.absolute().speech_eval
    assert speech_eval.asr == str(tmp_path / "whisper")
    assert (speech_eval.sentences, speech_eval.forgetting_data) == (
        tmp_path / "lines.txt",
        tmp_path / "data" / "others",
    )


def test_a_shipped_name_is_no_folder_of_that_name(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is often called after its recipe, and work on a shipped model is done in a folder of its name."""
    monkeypatch.chdir(tmp_path)
    shipped = next(iter(shipped_recipes()))
    for name in ("fledgling", "higgs-v2", "mine", shipped):
        (tmp_path / name).mkdir()
    for name in ("fledgling", "higgs-v2"):
        found = load_recipe(recipe, [f"model.source={name}"])
        assert found.absolute(is_model_name).model.source == name == absolute_source(name)
    mine = load_recipe(recipe, ["model.source=mine"])
    assert mine.absolute(is_model_name).model.source == str(tmp_path / "mine") == absolute_source("mine")
    assert load_recipe(Path(shipped), ["data.train=data/x"]).name


# Round trip and reference.

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
recipes = st.builds(
    Recipe,
    name=st.sampled_from(["run", "1", "null", "a.b-c", "نطق"]),
    model=st.builds(ModelSettings, source=words.filter(bool), revision=st.none() | words, codec=st.none() | words),
    data=st.builds(
        DataSettings,
        train=st.just(Path("data/x")),
        evaluation=st.none() | st.just(Path("data/ý")),
        scene=words,
        seconds=st.tuples(st.floats(0.01, 1), st.floats(1, 100)),
    ),
    adapt=st.builds(AdaptSettings, rank=st.integers(1, 512), alpha=st.floats(1e-9, 1e9), dora=st.booleans()),
    loss=st.builds(
        LossSettings,
        codebook_weights=st.sampled_from(["uniform", "1/k"])
        | st.lists(st.floats(0.1, 1), min_size=1, max_size=8).map(tuple),
    ),
    train=st.builds(TrainSettings, steps=st.integers(1, 10**9), learning_rate=st.floats(1e-12, 1)),
)


@settings(max_examples=40, deadline=None)
@given(recipes)
def test_a_dumped_recipe_reads_back_the_same(recipe: Recipe) -> None:
    assert parse_recipe(yaml.safe_load(dump_recipe(recipe)), where="here") == recipe


def test_a_dumped_file_loads_the_same(recipe: Path, tmp_path: Path) -> None:
    found = load_recipe(recipe, ["adapt.targets=[a.b]", "adapt.mode=custom", "data.scene='yes: #1'"])
    again = tmp_path / "again.yaml"
    again.write_text(dump_recipe(found), encoding="utf-8")
    assert load_recipe(again) == found


def test_every_key_is_in_the_reference_and_says_something() -> None:
    rows = [line.strip("| ").split(" | ") for line in describe().splitlines() if line.startswith("| `")]
    assert [key for key, *_ in rows] == [f"`{key}`" for key in valid_keys()]
    assert all(meaning for _, _, meaning in rows)


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
    assert page == describe(), "python tools/recipe_reference.py > docs/reference/recipe.md"


def test_a_wrong_value_is_answered_with_what_the_setting_means(recipe: Path) -> None:
    """No file is named that an installed package does not have."""
    assert "change `train.schedule`: Decay of the learning rate" in refused(recipe, "train.schedule=cos").hint
    assert "docs/" not in refused(recipe, "data.seconds=[0, 1]").hint
