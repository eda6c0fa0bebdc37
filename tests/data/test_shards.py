"""Token shards and training sequences, against the documents they were made from."""

import dataclasses
import itertools
import json
import os

import datasets
import numpy as np
import pytest

from lightning_collider.data import prepare as prepare_module
from lightning_collider.data.packed import Schedule, Windows, schedule
from lightning_collider.data.prepare import PARTS, prepare
from lightning_collider.data.shards import ShardWriter, TokenShards, read_manifest
from lightning_collider.data.text import documents
from lightning_collider.training.models import load_tokenizer
from lightning_collider.training.settings import SourceConfig
from tests.training.small_run import small_recipe, texts, write_inputs


@pytest.fixture
def made(tmp_path):
    """Recipe, tokenizer and the shards of a small run."""
    write_inputs(tmp_path)
    recipe = small_recipe(tmp_path, "data.shard_tokens=200")
    tokenizer = load_tokenizer(recipe.model)
    return recipe, tokenizer, prepare(recipe, tokenizer, 300)


def encoded(tokenizer, some):
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in some]


def test_shards_hold_every_document_once(made):
    _, tokenizer, shards = made
    everything = sorted(encoded(tokenizer, texts()))
    found = []
    for part in (shards["train"][0], shards["validation"][0]):
        tokens = part.window(0, len(part)).tolist()
        while tokens:
            end = tokens.index(tokenizer.eos_token_id) + 1
            found.append(tokens[:end])
            tokens = tokens[end:]
    assert sorted(found) == everything
    assert 0 < len(shards["validation"][0].manifest["shards"])
    assert shards["validation"][0].manifest["documents"] < 20  # a tenth of 60, give or take


def test_windows_cross_shards_and_number_documents(tmp_path, made):
    _, tokenizer, _ = made
    ids = encoded(tokenizer, texts())
    writer = ShardWriter(tmp_path / "s", tokenizer, {}, shard_tokens=1)
    for first in range(0, 60, 7):  # a shard for each call's documents
        writer.add(texts()[first : first + 7], first + 7)
    writer.finish(60)
    shards = TokenShards(tmp_path / "s")
    flat = np.concatenate(ids)
    numbers = np.repeat(np.arange(60), [len(i) for i in ids])
    assert len(shards) == len(flat) and len(shards.manifest["shards"]) == 9
    for start, length in ((0, len(flat)), (3, 50), (len(flat) - 5, 5), (100, 200)):
        assert shards.window(start, length).tolist() == flat[start : start + length].tolist()
        assert (
            shards.document_ids(start, length).tolist() == numbers[start : start + length].tolist()
        )


def test_items_separate_documents(made):
    _, tokenizer, shards = made
    windows = Windows(shards["train"], 16, separate_documents=True)
    assert len(windows) == len(shards["train"][0]) // 16
    eos, restarts = tokenizer.eos_token_id, 0
    for row in range(len(windows)):
        item = {k: v.tolist() for k, v in windows[row].items()}
        expected_position = 0
        for place in range(16):
            if place and item["input_ids"][place - 1] == eos:
                expected_position, restarts = 0, restarts + 1
            assert item["position_ids"][place] == expected_position
            is_first = expected_position == 0
            assert item["labels"][place] == (-100 if is_first else item["input_ids"][place])
            expected_position += 1
    assert restarts > 20
    whole = Windows(shards["train"], 16, separate_documents=False)[0]
    assert whole["position_ids"].tolist() == list(range(16))
    assert whole["labels"].equal(whole["input_ids"])


def long_recipe(folder):
    """A source of 3,000 documents, some ten shards of train and two of validation."""
    folder.mkdir()
    write_inputs(folder)
    lines = (json.dumps({"text": text}) + "\n" for text in texts(3000, seed=1))
    (folder / "words.jsonl").write_text("".join(lines))
    return small_recipe(folder, "data.shard_tokens=5000")


def manifests(folder):
    return [read_manifest(folder / "data" / "words" / part) for part in PARTS]


def without_place(manifest):
    return {k: v for k, v in manifest.items() if k not in ("origin", "files")}


@pytest.mark.parametrize("documents_read", [600, 1700, 2900])
def test_interrupted_tokenising_goes_on_to_equal_shards(tmp_path, monkeypatch, documents_read):
    whole, cut = (long_recipe(tmp_path / name) for name in ("whole", "cut"))
    tokenizer = load_tokenizer(whole.model)
    prepare(whole, tokenizer, 300)

    def fails(source, seed, skip=0):
        yield from itertools.islice(documents(source, seed, skip), documents_read)
        raise KeyError("power cut")

    with monkeypatch.context() as patch, pytest.raises(KeyError, match="power cut"):
        patch.setattr(prepare_module, "documents", fails)
        prepare(cut, tokenizer, 300)
    if documents_read > 600:
        with pytest.raises(ValueError, match="is not complete"):
            TokenShards(tmp_path / "cut" / "data" / "words" / "train")
    prepare(cut, tokenizer, 300)
    pairs = list(zip(*(manifests(tmp_path / name) for name in ("whole", "cut")), strict=True))
    assert [len(m["shards"]) for m, _ in pairs] > [5, 1]
    for one, other in pairs:
        assert without_place(one) == without_place(other)


def test_both_parts_are_written_in_one_pass(tmp_path, monkeypatch):
    """A stream from the hub is downloaded once."""
    recipe, begun = long_recipe(tmp_path / "one"), []

    def counted(source, seed, skip=0):
        begun.append(skip)
        return documents(source, seed, skip)

    monkeypatch.setattr(prepare_module, "documents", counted)
    prepare(recipe, load_tokenizer(recipe.model), 300)
    prepare(recipe, load_tokenizer(recipe.model), 300)
    assert begun == [0]


def test_text_that_changed_since_is_noticed(made, tmp_path):
    recipe, tokenizer, _ = made
    path = tmp_path / "words.jsonl"
    content = path.read_text()
    os.utime(path)  # a copy: another time, the same content
    prepare(recipe, tokenizer, 300)
    path.write_text(content.replace("mo", "ta", 1))
    with pytest.raises(ValueError, match=r"words.jsonl has changed since .*words/train was token"):
        prepare(recipe, tokenizer, 300)
    path.write_text(content + content)
    with pytest.raises(ValueError, match=r"words.jsonl has changed since"):
        prepare(recipe, tokenizer, 300)
    path.unlink()  # shards are enough
    assert len(prepare(recipe, tokenizer, 300)["train"][0]) > 0


def test_a_pattern_that_matches_other_files_is_noticed(tmp_path):
    recipe = long_recipe(tmp_path / "one")
    recipe.data.sources["words"].path = f"{tmp_path}/one/*.jsonl"
    tokenizer = load_tokenizer(recipe.model)
    prepare(recipe, tokenizer, 300)
    extra = tmp_path / "one" / "more.jsonl"
    extra.write_text('{"text": "mola"}\n')
    with pytest.raises(ValueError, match=r"more.jsonl is new since"):
        prepare(recipe, tokenizer, 300)
    (tmp_path / "one" / "words.jsonl").rename(tmp_path / "words.jsonl")
    extra.rename(tmp_path / "one" / "zzz.jsonl")
    with pytest.raises(ValueError, match=r"words.jsonl is gone since"):
        prepare(recipe, tokenizer, 300)


def test_shards_of_another_run_are_a_source(made, tmp_path):
    recipe, tokenizer, shards = made
    source = SourceConfig(path=f"{recipe.data.folder}/words")
    data = dataclasses.replace(recipe.data, folder=f"{tmp_path}/new", sources={"again": source})
    again = prepare(dataclasses.replace(recipe, data=data), tokenizer, 300)
    for part in PARTS:
        assert again[part][0].key == shards[part][0].key
    assert not (tmp_path / "new" / "again").exists()


def test_a_hub_data_set_is_streamed_by_its_name(monkeypatch):
    """What `datasets` is asked for; its answer is what the hub would stream."""
    asked = []

    def load_dataset(path, name, **options):
        asked.append((path, name, options))
        return datasets.Dataset.from_dict({"text": ["a", "b", "c"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = SourceConfig("some-lab/maths", subset="en", split="all", max_documents=2)
    assert list(documents(source, 0, skip=1)) == ["b"]
    assert asked == [("some-lab/maths", "en", {"split": "all", "streaming": True})]


def test_a_hub_out_of_reach_is_told(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach 'some-lab/maths' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(OSError, match=r"some-lab/maths.*is no local.*local files"):
        list(documents(SourceConfig("some-lab/maths"), 0))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_local_files_of_each_kind_are_read_in_order(tmp_path, kind):
    some = [text + "\nsecond line" for text in texts(7)]
    for number, part in enumerate((some[:3], some[3:])):
        path = tmp_path / f"part-{number}.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps({"text": t}) + "\n" for t in part))
        elif kind == "parquet":
            datasets.Dataset.from_dict({"text": part}).to_parquet(path)
        else:
            for inner, text in enumerate(part):
                (tmp_path / f"part-{number}-{inner}.txt").write_text(text)
    for path in (f"{tmp_path}/part-*.{kind}", str(tmp_path)):
        assert list(documents(SourceConfig(path), 0)) == some
        assert list(documents(SourceConfig(path, max_documents=5), 0, skip=2)) == some[2:5]


def test_templates_join_columns_and_name_missing_ones(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "1+1", "a": 2}\n')
    source = SourceConfig(str(tmp_path / "a.jsonl"), template="{q} = {a}")
    assert list(documents(source, 0)) == ["1+1 = 2"]
    source.template = "{question}"
    with pytest.raises(ValueError, match=r"a.jsonl has no column 'question'.*\['a', 'q'\]"):
        list(documents(source, 0))


def test_schedule_mixes_by_weight_in_epochs():
    counts, weights = [10, 1000], [0.25, 0.75]
    rows = schedule(counts, weights, seed=5, n=4000)
    small = rows[rows < 10]
    assert len(small) / 4000 == pytest.approx(0.25, abs=0.03)
    for epoch in range(len(small) // 10):
        assert sorted(small[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert len({tuple(small[10 * e : 10 * e + 10]) for e in range(5)}) == 5  # shuffled anew
    large = rows[rows >= 10]
    assert sorted(large[:1000]) == list(range(10, 1010))
    assert (schedule(counts, weights, 5, 700) == rows[:700]).all()
    assert (schedule(counts, weights, 6, 700) != rows[:700]).any()


def test_ranks_share_the_schedule_in_equal_parts():
    rows = np.arange(22)
    ranks = [list(Schedule(rows, 3, rank, 2)) for rank in range(2)]
    assert [len(r) for r in ranks] == [3, 3]
    assert [a + b for a, b in zip(*ranks, strict=True)] == np.arange(18).reshape(3, 6).tolist()
    assert list(Schedule(rows, 3, 1, 2, done=2)) == ranks[1][2:]


def test_shards_that_do_not_fit_are_named(tmp_path, made):
    recipe, tokenizer, shards = made
    folder = shards["train"][0].folder
    with pytest.raises(ValueError, match=f"{folder} has a vocabulary of 300.*model one of 200"):
        prepare(recipe, tokenizer, 200)
    tokenizer.add_tokens(["xyz"])
    with pytest.raises(ValueError, match=f"{folder} holds shards with another tokenizer"):
        prepare(recipe, tokenizer, 400)
    with pytest.raises(ValueError, match="tokenised with another tokenizer"):
        shards["train"][0].check(tokenizer, 400)
    other = dataclasses.replace(recipe.data.sources["words"], max_documents=5)
    recipe.data.sources = {"words": other}
    with pytest.raises(ValueError, match="holds shards with another"):
        prepare(recipe, load_tokenizer(recipe.model), 300)
