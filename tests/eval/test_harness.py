"""The local lm-eval tasks: their scores against direct computations with torch."""

import dataclasses
import json
import math
import random

import pytest
import torch
from lm_eval.tasks import TaskManager
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_collider.eval import harness
from lightning_collider.eval.harness import (
    SUITES,
    automatic_batch,
    evaluate,
    find_corpus,
    main_metric,
)
from lightning_collider.eval.tasks.heldout import (
    general_texts,
    line_questions,
    near_answers,
    next_lines,
    questions,
)
from lightning_collider.training.corpus import heldout_documents
from lightning_collider.training.sources import (
    general_documents,
    generate_problems,
    noise_documents,
)
from lightning_collider.training.tokens import train_tokenizer

ITEMS = 24
DOCUMENTS = 2  # of general text, and of noise


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run folder with held-out problems and an untrained model that is sure of what it says."""
    folder = tmp_path_factory.mktemp("run")
    stream = generate_problems(0)
    problems = [next(stream) for _ in range(ITEMS)]
    (folder / "corpus").mkdir()
    lines = [json.dumps(dataclasses.asdict(problem)) + "\n" for problem in problems]
    (folder / "corpus" / "heldout.jsonl").write_text("".join(lines))
    short = {name: texts[:DOCUMENTS] for name, texts in heldout_documents(0).items()}
    (folder / "corpus" / "heldout.json").write_text(json.dumps(short))
    tokenizer = train_tokenizer([problem.text for problem in problems], 400, 512)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            initializer_range=0.3,
        )
    ).eval()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder, problems, tokenizer, model


@pytest.fixture(scope="module")
def scores(run_folder):
    return evaluate(run_folder[0] / "model", batch_size=5)


@torch.no_grad()
def log_likelihood(model, ids, first):
    """Sum of log p(ids[i] | ids[:i]) over i >= first."""
    log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(log_p[i - 1, ids[i]].item() for i in range(first, len(ids)))


def test_bits_per_byte_equal_direct_computation(run_folder, scores):
    _, problems, tokenizer, model = run_folder
    nats = n_bytes = 0
    for problem in problems:
        ids = [tokenizer.eos_token_id, *tokenizer(problem.text)["input_ids"]]
        nats -= log_likelihood(model, ids, 1)
        n_bytes += len(problem.text.encode())
    assert scores["heldout_bits"]["metric"] == "bits_per_byte"
    assert scores["heldout_bits"]["items"] == ITEMS
    assert scores["heldout_bits"]["value"] == pytest.approx(nats / n_bytes / math.log(2), rel=1e-5)


def test_accuracy_equals_direct_computation(run_folder, scores):
    folder, _, tokenizer, model = run_folder
    right = 0
    for item in questions(folder / "corpus")["test"]:
        prompt = tokenizer(item["prompt"])["input_ids"]
        likelihoods = [
            log_likelihood(model, [*prompt, *tokenizer(f" {choice}")["input_ids"]], len(prompt))
            for choice in item["choices"]
        ]
        right += max(range(4), key=likelihoods.__getitem__) == item["label"]
    accuracy = right / ITEMS
    assert scores["heldout_choice"]["metric"] == "acc"
    assert scores["heldout_choice"]["value"] == pytest.approx(accuracy)
    expected = math.sqrt(accuracy * (1 - accuracy) / (ITEMS - 1))
    assert scores["heldout_choice"]["stderr"] == pytest.approx(expected)


def test_questions_have_the_answer_once_among_four(run_folder):
    folder, problems, _, _ = run_folder
    items = questions(folder / "corpus")["test"]
    assert items[:] == questions(folder / "corpus")["test"][:]  # the same each time
    for item, problem in zip(items, problems, strict=True):
        assert len(set(item["choices"])) == 4
        assert item["choices"][item["label"]] == f"{problem.answer}\n"
        assert f"{item['prompt']} {problem.answer}\n" == problem.text


def test_near_answers_are_near_and_their_order_is_even():
    places = [0, 0, 0, 0]
    for seed in range(2000):
        answer = seed % 100
        choices, label = near_answers(answer, random.Random(seed))
        numbers = [int(choice) for choice in choices]
        assert numbers[label] == answer and min(numbers) >= 0
        assert max(abs(number - answer) for number in numbers) <= max(3, answer // 3)
        places[label] += 1
    assert all(abs(count - 500) < 80 for count in places)


def bits_of(texts, tokenizer, model):
    """Bits per byte of texts, in windows of the model's length as lm-eval rolls over them."""
    nats = n_bytes = 0
    for text in texts:
        ids = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
        assert len(ids) <= model.config.max_position_embeddings + 1
        nats -= log_likelihood(model, ids, 1)
        n_bytes += len(text.encode())
    return nats / n_bytes / math.log(2)


def test_general_bits_and_noise_bits_equal_direct_computation(run_folder, tmp_path):
    folder, _, tokenizer, model = run_folder
    short = {"general": ["x = 1\n", "def f():\n    pass\n"], "noise": ["00 ff\n"]}
    (tmp_path / "heldout.json").write_text(json.dumps(short))
    found = evaluate(folder / "model", ["general_bits", "noise_bits"], corpus_dir=tmp_path)
    for name, texts in short.items():
        expected = bits_of(texts, tokenizer, model)
        assert found[f"{name}_bits"]["value"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("said", "share"), [(" {}", 1.0), ("{}", 1.0), (" 1{}", 0.0), (" {}.", 0.0), ("", 0.0)]
)
def test_exact_answers_count_what_the_model_says(run_folder, monkeypatch, said, share):
    """With a blank before it and without: tokenizers decode the first word in two ways."""
    folder, problems, _, _ = run_folder

    def generate(self, requests, **_):
        prompts = [request.args[0] for request in requests]
        assert prompts == [problem.prompt for problem in problems]
        return [said.format(problem.answer) for problem in problems]

    monkeypatch.setattr("lm_eval.models.huggingface.HFLM.generate_until", generate)
    found = evaluate(folder / "model", ["heldout_exact"], batch_size=5)["heldout_exact"]
    assert found["value"] == share and found["items"] == ITEMS


def test_exact_answers_of_the_model_equal_greedy_decoding(run_folder, scores):
    _, problems, tokenizer, model = run_folder
    right = 0
    for problem in problems:
        ids = tokenizer(problem.prompt, return_tensors="pt")["input_ids"]
        said = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(said, skip_special_tokens=True).split("\n")[0].strip()
        right += text == str(problem.answer)
    assert scores["heldout_exact"]["value"] == right / ITEMS


def test_code_lines_equal_direct_computation(run_folder, scores):
    folder, _, tokenizer, model = run_folder
    right = 0
    items = next_lines(folder / "corpus")["test"]
    for item in items:
        prompt = tokenizer(item["prompt"])["input_ids"]
        scored = []
        for choice in item["choices"]:
            ids = tokenizer(item["prompt"] + choice)["input_ids"]
            scored.append(log_likelihood(model, ids, len(prompt)) / len(choice))
        right += max(range(4), key=scored.__getitem__) == item["label"]
    assert scores["code_line"]["metric"] == "acc_norm"
    assert scores["code_line"]["value"] == pytest.approx(right / len(items), abs=1 / len(items))


def test_line_questions_ask_for_the_line_that_follows():
    lines = [f"value_{number} = compute({number})\n" for number in range(30)]
    asked = line_questions("".join(lines), random.Random(0))
    assert len(asked) == 5
    for item in asked:
        context = item["prompt"].splitlines(keepends=True)
        following = lines[lines.index(context[-1]) + 1]
        assert item["choices"][item["label"]] == following
        assert len(set(item["choices"])) == 4 and not set(item["choices"]) & set(context)
    assert line_questions("a\nb\n", random.Random(0)) == []
    assert line_questions("the same line\n" * 20, random.Random(0)) == []


def test_items_without_a_corpus_are_generated(monkeypatch):
    monkeypatch.setattr(harness, "find_corpus", lambda _: None)
    first = questions(None)["test"]
    assert len(first) == 500 and first[:3] == questions(None)["test"][:3]
    assert len(general_texts(None)["test"]) == 100


def test_held_out_documents_are_not_trained_on():
    held = heldout_documents(0)
    assert not set(held["general"]) & set(general_documents(0))
    stream = noise_documents(0)
    assert not set(held["noise"]) & {next(stream) for _ in range(3000)}


def test_automatic_batch_fits_the_memory(run_folder):
    config = run_folder[3].config  # 512 tokens, a vocabulary of at most 400
    text = 512 * config.vocab_size * 4 * harness.COPIES
    assert automatic_batch(config, 100 * text) == 25
    assert automatic_batch(config, 1e15) == harness.LARGEST_BATCH
    assert automatic_batch(config, 1.0) == 1


def test_metric_of_a_group_is_that_of_all_its_tasks():
    report = {
        "results": {
            "mmlu": {"acc,none": 0.3, "acc_stderr,none": 0.01, "alias": "mmlu"},
            "gsm8k": {"exact_match,strict-match": 0.1, "exact_match_stderr,strict-match": "N/A"},
            "arc_easy": {"acc,none": 0.5, "acc_norm,none": 0.6, "acc_norm_stderr,none": 0.02},
        },
        "n-samples": {n: {"effective": 10} for n in ("a", "b", "c", "gsm8k", "arc_easy")},
        "group_subtasks": {"mmlu": ["stem", "c"], "stem": ["a", "b"]},
    }
    assert main_metric(report, "mmlu") == {
        "metric": "acc",
        "value": 0.3,
        "stderr": 0.01,
        "items": 30,
    }
    assert main_metric(report, "gsm8k")["stderr"] is None
    assert main_metric(report, "arc_easy")["value"] == 0.6


@pytest.fixture
def no_defaults(monkeypatch):
    """Keep lm-eval from reading all its 15,000 files, whatever it is asked."""
    make = TaskManager.__init__
    monkeypatch.setattr(
        TaskManager, "__init__", lambda self, **s: make(self, **{**s, "include_defaults": False})
    )


def test_hub_that_cannot_be_reached_names_the_offline_suite(run_folder, monkeypatch, no_defaults):
    def fails(self, tasks):
        raise ConnectionError("Couldn't reach 'allenai/ai2_arc' on the Hub")

    monkeypatch.setattr(TaskManager, "load", fails)
    monkeypatch.setattr(TaskManager, "all_tasks", property(lambda self: list(SUITES["general"])))
    with pytest.raises(ConnectionError, match=r"arc_easy, .*`--suite offline` needs no network"):
        evaluate(run_folder[0] / "model", SUITES["general"])


def test_limit_scores_the_first_items(run_folder):
    scores = evaluate(run_folder[0] / "model", ["heldout_choice"], limit=3)
    assert scores.keys() == {"heldout_choice"}
    assert scores["heldout_choice"]["items"] == 3


def test_mistakes_are_named(run_folder, tmp_path, no_defaults):
    folder = run_folder[0]
    with pytest.raises(FileNotFoundError, match="is no checkpoint and has no checkpoints"):
        evaluate(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*give the folder of a run"):
        evaluate(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"unknown tasks \['mnlu'\]; there are ours \(code_line, "):
        evaluate(folder / "model", ["mnlu"])
    with pytest.raises(FileNotFoundError, match="is no corpus folder"):
        evaluate(folder / "model", corpus_dir=tmp_path)
    assert find_corpus(folder / "model") == folder / "corpus"
    assert find_corpus(tmp_path) is None
