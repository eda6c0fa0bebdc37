"""Documents of the lm-eval tasks that read published data from local files.

The harness gives the folder of the files as the metadata's `data_dir`.
"""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

GSM8K = "Question: {question}\nAnswer: {answer}\n"  # a problem as text, for training and scoring
PAIRS_A_SET = 200


def gsm8k_texts(data_dir: Path, **_: Any) -> dict[str, Dataset]:
    """Each problem of GSM8K's test part with its answer as one `text`."""
    rows = _rows(data_dir / "gsm8k_test.jsonl")
    return {"test": Dataset.from_list([{"text": GSM8K.format(**row)} for row in rows])}


def blimp_pairs(data_dir: Path, **_: Any) -> dict[str, Dataset]:
    """Pairs of BLiMP's sets in blimp/ in turn: `sentence_good` and `sentence_bad`."""
    files = sorted((data_dir / "blimp").glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no sets of pairs {data_dir / 'blimp'}/*.jsonl")
    sets = [_rows(path)[:PAIRS_A_SET] for path in files]
    keys = ("sentence_good", "sentence_bad")
    pairs = [{key: row[key] for key in keys} for rows in zip(*sets, strict=True) for row in rows]
    return {"test": Dataset.from_list(pairs)}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
