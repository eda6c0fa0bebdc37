"""The corpus: held-out problems stay out, sources are mixed as asked, packing is as defined."""

import itertools

import numpy as np
import pytest

from lightning_collider.data.text import documents as source_documents
from lightning_collider.eval.tasks.heldout import general_texts, noise_texts, questions
from lightning_collider.training import corpus as corpus_module
from lightning_collider.training.corpus import build_corpus, load_corpus, load_heldout
from lightning_collider.training.settings import SourceConfig
from lightning_collider.training.sources import (
    SOURCES,
    general_documents,
    generate_problems,
    library_documents,
    noise_documents,
    split_document,
)
from lightning_collider.training.tokens import END_OF_TEXT, encode, pack, train_tokenizer


@pytest.fixture(scope="module")
def built(tiny_in, tmp_path_factory):
    """A recipe with 65,536 tokens, and its corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    recipe = tiny_in(
        folder,
        "train.steps=128",
        "train.batch_size=8",
        "reference.steps=64",
        "corpus.heldout_problems=300",
    )
    build_corpus(recipe, folder)
    return recipe, load_corpus(folder)


def documents(corpus, rows):
    """Decoded documents of packed rows."""
    return corpus.tokenizer.decode(rows.reshape(-1)).split(END_OF_TEXT)


def test_heldout_problems_are_in_no_training_text(built):
    _, corpus = built
    heldout = load_heldout(corpus.folder)
    assert len({problem.question for problem in heldout}) == 300
    for rows in (corpus.train, corpus.reference):
        text = "".join(documents(corpus, rows))
        assert text.count("Question: ") > 50
        assert not [p.question for p in heldout if p.question in text]


def test_reference_and_training_problems_differ(built):
    _, corpus = built
    complete = [
        {d for d in documents(corpus, rows) if d.startswith("Question: ") and d.endswith("\n")}
        for rows in (corpus.train, corpus.reference)
    ]
    assert len(complete[0]) > 50 and len(complete[1]) > 10
    assert not complete[0] & complete[1]


def test_mixing_rates_and_source_ids(built):
    recipe, corpus = built
    assert corpus.train.shape == corpus.sources.shape == (1024, 64)
    for number, name in enumerate(SOURCES):
        rate = (corpus.sources == number).mean()
        assert rate == pytest.approx(recipe.corpus.weights[name], abs=0.02)
        assert corpus.manifest["tokens_by_source"][name] == (corpus.sources == number).sum()
    ids = corpus.train.reshape(-1)
    starts = np.flatnonzero(ids[:-1] == corpus.tokenizer.eos_token_id) + 1
    question = corpus.tokenizer("Question", add_special_tokens=False)["input_ids"]
    assert len(question) == 1
    is_problem = ids[starts] == question[0]
    assert is_problem.sum() > 50
    assert (corpus.sources.reshape(-1)[starts][is_problem] == SOURCES.index("target")).all()


def test_documents_are_shuffled(built):
    _, corpus = built
    halves = np.split(corpus.sources.reshape(-1) == SOURCES.index("target"), 2)
    assert abs(halves[0].mean() - halves[1].mean()) < 0.1


def test_same_seed_gives_the_same_files_and_another_seed_does_not(tiny, tmp_path):
    hashes = []
    for number, seed in enumerate((0, 0, 1)):
        build_corpus(tiny(f"seed={seed}"), tmp_path / str(number))
        hashes.append(load_corpus(tmp_path / str(number)).manifest["sha256"])
    assert hashes[0] == hashes[1]
    assert hashes[0]["train.npy"] != hashes[2]["train.npy"]


def test_changed_file_is_refused(tiny, tmp_path):
    build_corpus(tiny(), tmp_path)
    np.save(tmp_path / "train.npy", np.zeros((12, 64), np.uint16))
    with pytest.raises(ValueError, match=r"train\.npy is not the file"):
        load_corpus(tmp_path)


def test_too_little_text_names_source_and_keys(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "general_documents", lambda seed: ["import this\n"] * 50)
    recipe = tiny("train.steps=100")
    with pytest.raises(ValueError, match=r"source 'general' has .*corpus\.weights\.general"):
        build_corpus(recipe, tmp_path / "big")
    assert not (tmp_path / "big").exists()


def test_problems_are_distinct_and_right():
    problems = list(itertools.islice(generate_problems(0), 2000))
    assert len({problem.question for problem in problems}) == 2000
    legs = next(
        p for p in problems if "legs are there in total if you have 1 spider?" in p.question
    )
    assert legs.answer == 8
    assert legs.text == f"Question: {legs.question}\nAnswer: 8\n"


def builtin_text(name, count=None, skip=0):
    """Documents of a training recipe's source builtin:NAME with seed 0."""
    source = SourceConfig(path=f"builtin:{name}", max_documents=count)
    return list(source_documents(source, 0, skip))


def test_training_recipes_have_no_item_that_a_model_without_a_corpus_is_asked():
    """Of the same seed's text before these are left out, some of each kind is among them."""
    general, noise = (set(kind(None)["test"]["text"]) for kind in (general_texts, noise_texts))
    prompts = set(questions(None)["test"]["prompt"])
    trained = builtin_text("target", 6000)
    assert len(trained) == 6000
    assert prompts.isdisjoint(text[: text.index("Answer:") + len("Answer:")] for text in trained)
    assert prompts & {p.prompt for p in itertools.islice(generate_problems(0), 6000)}
    assert general.isdisjoint(builtin_text("general")) and general & set(general_documents(0))
    assert noise.isdisjoint(builtin_text("noise", 3000))
    assert noise & set(itertools.islice(noise_documents(0), 3000))
    assert builtin_text("general", 30, skip=20) == builtin_text("general", 30)[20:]


def test_noise_is_seeded_and_endless():
    first, again = (list(itertools.islice(noise_documents(5), 40)) for _ in range(2))
    assert first == again
    assert sum(len(document) for document in first) > 10_000


def test_only_tables_of_codecs_are_noise_and_prose_beside_a_generators_name_is_not():
    general = "".join(library_documents())
    assert (
        "Lambda expressions (sometimes called lambda forms)" in general
    )  # pydoc's help, generated
    assert "def literal_eval(" in general  # ast.py names a generator in its first lines
    assert "charmap_encode(input,errors,encoding_table)" not in general
    noise = "".join(itertools.islice(noise_documents(0), 0, 400, 2))
    assert noise.count("LATIN SMALL LETTER") > 1000 and "lambda forms" not in noise


def test_split_document_by_hand():
    assert split_document("aa\nbb\ncc\n", 6) == ["aa\nbb\n", "cc\n"]
    assert split_document("a long line\nb\n", 4) == ["a long line\n", "b\n"]
    assert split_document("\n\n", 4) == []


def test_pack_by_hand():
    tokens, sources = pack([(0, [5, 6, 0]), (2, [7, 0]), (1, [8, 9, 0])], 3, 2)
    assert tokens.tolist() == [[5, 6, 0], [7, 0, 8]]
    assert sources.tolist() == [[0, 0, 0], [2, 2, 1]]
    assert (tokens.dtype, sources.dtype) == (np.uint16, np.uint8)
    assert pack([(0, [70_000])], 1, 1)[0].dtype == np.int32
    with pytest.raises(ValueError, match="2 tokens do not fill 1 sequences of 3"):
        pack([(0, [1, 2])], 3, 1)


def test_tokenizer_restores_any_text_and_splits_digits():
    tokenizer = train_tokenizer(["the cat 12 sat\n"] * 20, 300, 64)
    for text in ("the cat 12 sat\n", "  Übung, 猫\t1234 \n", "a  b   c"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = encode(tokenizer, ["123"])[0]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.convert_ids_to_tokens(ids[:-1]) == ["1", "2", "3"]
