"""The local lm-eval tasks: their scores against direct computations with torch."""

import dataclasses
import json
import math
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_collider.eval.harness import TASKS, evaluate, find_corpus
from lightning_collider.eval.tasks.heldout import near_answers, questions
from lightning_collider.training.sources import generate_problems
from lightning_collider.training.tokens import train_tokenizer

ITEMS = 24


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run folder with held-out problems and an untrained model that is sure of what it says."""
    folder = tmp_path_factory.mktemp("run")
    stream = generate_problems(0)
    problems = [next(stream) for _ in range(ITEMS)]
    (folder / "corpus").mkdir()
    lines = [json.dumps(dataclasses.asdict(problem)) + "\n" for problem in problems]
    (folder / "corpus" / "heldout.jsonl").write_text("".join(lines))
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


def test_limit_scores_the_first_items(run_folder):
    scores = evaluate(run_folder[0] / "model", ["heldout_choice"], limit=3)
    assert scores.keys() == {"heldout_choice"}
    assert scores["heldout_choice"]["items"] == 3


def test_mistakes_are_named(run_folder, tmp_path):
    folder = run_folder[0]
    with pytest.raises(FileNotFoundError, match=r"no Hugging Face checkpoint .*model/ folder"):
        evaluate(tmp_path)
    with pytest.raises(ValueError, match=rf"\['mmlu'\]; there are: {', '.join(TASKS)}"):
        evaluate(folder / "model", ["mmlu"])
    assert find_corpus(folder / "model") == folder / "corpus"
    with pytest.raises(FileNotFoundError, match="--corpus DIR"):
        find_corpus(tmp_path)
