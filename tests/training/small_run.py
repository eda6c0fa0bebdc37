"""A training recipe of seconds: a two-layer Llama on a small JSONL file, in plain autograd."""

import json
import random
from pathlib import Path

from lightning_collider.training.config import load_training
from lightning_collider.training.settings import TrainingRecipe
from lightning_collider.training.tokens import train_tokenizer

WORDS = [f"{a}{b}" for a in ("mo", "ta", "ri", "ke") for b in ("la", "nu", "so", "pi", "de")]
RECIPE = """
kind: training
name: small
out: {folder}/run
seed: 3
model:
  weights: null
  tokenizer: {folder}/tokenizer
  config:
    model_type: llama
    vocab_size: 300
    hidden_size: 16
    intermediate_size: 24
    num_hidden_layers: 2
    num_attention_heads: 2
    num_key_value_heads: 1
    max_position_embeddings: 64
data:
  folder: {folder}/data
  sources:
    words: {{path: "{folder}/words.jsonl"}}
  sequence_length: 16
  separate_documents: true
  validation_fraction: 0.1
  shard_tokens: 800
trainer:
  max_steps: 12
  batch_tokens: 128
  micro_batch_size: 2
  engine: oracle
  precision: 32-true
  log_every: 1
  checkpoint_every: 3
optimizer:
  learning_rate: 0.01
  final_learning_rate: 0.001
  warmup_fraction: 0.2
  weight_decay: 0.1
  clip_norm: 1.0
filter:
  selector: random
  keep: 0.6
"""


def texts(count: int = 60, seed: int = 0) -> list[str]:
    """Documents of 3 to 20 words, in a fixed order."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 20))) for _ in range(count)]


def write_inputs(folder: Path, documents: int = 60) -> None:
    """The tokenizer, the text and the recipe of a small run."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": text}) + "\n" for text in texts(documents))
    (folder / "words.jsonl").write_text("".join(lines))
    train_tokenizer(texts(), 300, 64).save_pretrained(folder / "tokenizer")
    (folder / "small.yaml").write_text(RECIPE.format(folder=folder))


def small_recipe(folder: Path, *overrides: str) -> TrainingRecipe:
    """The recipe of a folder in which write_inputs was called."""
    return load_training(str(folder / "small.yaml"), list(overrides))


def logged_by_step(folder: Path) -> dict[int, dict]:
    """Optimizer step -> all that a run's metrics.jsonl says of it."""
    found: dict[int, dict] = {}
    for line in (folder / "run" / "metrics.jsonl").open():
        row = json.loads(line)
        found.setdefault(row["step"], {}).update(row)
    return found


def rows_of(folder: Path) -> list[dict]:
    """What a run logged of each step, without what depends on time."""
    kept = ("step", "loss_kept", "loss_all", "gradient_norm", "learning_rate", "kept_share")
    kept += ("input_tokens", "positions", "tst/loss", "tst/floor")
    rows = [row for row in logged_by_step(folder).values() if "tokens_per_s" in row]
    return [{name: row[name] for name in kept if name in row} for row in rows]


def train_here(folder: Path, overrides: tuple[str, ...] = ()) -> None:
    """What a killed process runs: the small recipe, from wherever it stopped."""
    import torch

    from lightning_collider.training.pretrain import run_training

    torch.set_num_threads(1)
    run_training(small_recipe(folder, *overrides))
