"""An exported folder scores in lm-eval, without this package, what the run's own weights score."""

import json
import runpy
import subprocess
import sys

import torch

import lightning_collider as lc
from lightning_collider.training.checkpoint import STATE, checkpoint_path
from lightning_collider.training.models import build_model, load_tokenizer
from lightning_collider.training.pretrain import run_training
from tests.training.small_run import small_recipe, texts, write_inputs

TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/heldout.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""
# What another program does: lm-eval and transformers, and nothing of ours.
SCORE = """
import sys
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

def score(model, folder, **settings):
    model = HFLM(model, batch_size=1, device="cpu", add_bos_token=False, **settings)
    manager = TaskManager(include_path=folder, include_defaults=False)
    report = lm_eval.simple_evaluate(model, tasks=["words"], task_manager=manager)
    return report["results"]["words"]["bits_per_byte,none"]

if __name__ == "__main__":
    value = score(sys.argv[1], sys.argv[2], dtype="float32")
    assert "lightning_collider" not in sys.modules
    print(f"score={value!r}")
"""


def test_exported_folder_scores_what_the_run_scores(tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    write_inputs(tmp_path)
    recipe = small_recipe(tmp_path, "trainer.max_steps=6")
    run_training(recipe)
    heldout = (json.dumps({"text": text}) + "\n" for text in texts(20, seed=5))
    (tmp_path / "heldout.jsonl").write_text("".join(heldout))
    (tmp_path / "words.yaml").write_text(TASK.format(folder=tmp_path))
    (tmp_path / "score.py").write_text(SCORE)

    model = lc.convert(build_model(recipe), "oracle")
    before = model_score(model, recipe, tmp_path)
    state = torch.load(
        checkpoint_path(tmp_path / "run" / "checkpoints", 6) / STATE, weights_only=True
    )["state_dict"]
    model.load_state_dict({n.removeprefix("model."): w for n, w in state.items()})
    trained = model_score(model, recipe, tmp_path)
    command = [sys.executable, "score.py", "run/model", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    exported = float(done.stdout.partition("score=")[2])
    assert abs(exported - trained) < 1e-6 * trained
    assert before - trained > 0.1  # six steps have taught it something


def model_score(model, recipe, folder):
    score = runpy.run_path(str(folder / "score.py"))["score"]
    return score(model.eval(), str(folder), tokenizer=load_tokenizer(recipe.model))
