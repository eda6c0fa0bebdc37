"""Token shards and training sequences, against the documents they were made from."""

import dataclasses
import json

import datasets
import numpy as np
import pytest

from lightning_collider.data.packed import Schedule, Windows, schedule
from lightning_collider.data.prepare import prepare
from lightning_collider.data.shards import ShardWriter, TokenShards
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


def write_all(writer, some):
    for _ in writer.write((True, text) for text in some):
        pass


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
        writer._tokens = [np.array(i, np.uint16) for i in ids[first : first + 7]]
        writer._size = sum(map(len, writer._tokens))
        writer._close_shard()
    writer.manifest["complete"] = True
    writer._save_manifest()
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


def test_interrupted_tokenising_goes_on_to_equal_shards(tmp_path, made):
    _, tokenizer, _ = made
    many = texts(3000, seed=1)
    whole = ShardWriter(tmp_path / "whole", tokenizer, {"from": "test"}, 5000)
    write_all(whole, many)
    cut = ShardWriter(tmp_path / "cut", tokenizer, {"from": "test"}, 5000)
    steps = cut.write((True, text) for text in many)
    for _ in range(3):
        next(steps)
    del steps
    done = ShardWriter(tmp_path / "cut", tokenizer, {"from": "test"}, 5000)
    assert 0 < done.manifest["read"] < 3000 and not done.manifest["complete"]
    with pytest.raises(ValueError, match="is not complete"):
        TokenShards(tmp_path / "cut")
    write_all(done, many[done.manifest["read"] :])
    assert done.manifest == whole.manifest
    assert TokenShards(tmp_path / "cut").key == TokenShards(tmp_path / "whole").key


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
