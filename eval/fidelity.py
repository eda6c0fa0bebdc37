"""How near is the filtered gradient to the exact one? Cosines by layer and by kind of parameter.

    python -m lightning_collider.eval.fidelity RUN [--arm filtered] [--out DIR]

RUN is a finished comparison, such as runs/quickstart. One of its arms is trained once more, and at
some steps three gradients are taken on the run's held-out batches:

    filtered   mean loss of the kept rows, keys and values of dropped tokens held constant
    masked     mean loss of the kept rows, everything else as usual: what filtering approximates
    full       mean loss of all rows

The filtered one is by the oracle, in plain autograd. DIR gets fidelity.jsonl (dot products of the
three for each parameter), fidelity.csv (cosines) and fidelity.png.
"""

import argparse
import csv
import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from lightning_collider.filtering import selectors
from lightning_collider.filtering.reference import reference_losses
from lightning_collider.nn.causal_lm import token_losses
from lightning_collider.oracle import filtered_grads
from lightning_collider.report.record import AtSteps, append_row, read_rows
from lightning_collider.training.config import Recipe, load_comparison
from lightning_collider.training.corpus import Corpus, load_corpus
from lightning_collider.training.data import PackedRows
from lightning_collider.training.fit import Job, build_model, fit
from lightning_collider.training.module import LanguageModel
from lightning_collider.training.run import strategy_of

POINTS = (0.0, 0.1, 0.4, 1.0)  # parts of the run
MASKS = (("excess_loss", 0.6), ("random", 0.6), ("excess_loss", 0.4), ("excess_loss", 0.8))
GRADIENTS = ("filtered", "masked", "full")
PAIRS = (("filtered", "masked"), ("filtered", "full"), ("masked", "full"))
Grads = dict[str, Tensor]


def plain_grads(model: PreTrainedModel, ids: Tensor, keep: Tensor) -> Grads:
    """Gradient of the mean loss of the kept rows that have a target, with nothing held constant."""
    logits = model(input_ids=ids, use_cache=False).logits
    targets = selectors.shift_labels(ids).masked_fill(~keep, selectors.NO_TARGET)
    loss = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=selectors.NO_TARGET
    )
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def dots(grads: dict[str, Grads]) -> dict[str, dict[str, float]]:
    """Parameter -> products of its gradients by pairs of names, such as "filtered.masked"."""
    pairs = list(itertools.combinations_with_replacement(GRADIENTS, 2))
    return {
        name: {
            f"{a}.{b}": float((grads[a][name] * grads[b][name]).double().sum()) for a, b in pairs
        }
        for name in grads["full"]
    }


def cosines(products: Iterable[dict[str, float]]) -> dict[str, float]:
    """Cosines of the concatenation of some parameters, and the length of filtered over masked."""
    total: dict[str, float] = {}
    for one in products:
        for pair, value in one.items():
            total[pair] = total.get(pair, 0.0) + value
    lengths = {name: total[f"{name}.{name}"] ** 0.5 for name in GRADIENTS}
    found = {f"{a}_{b}": total[f"{a}.{b}"] / (lengths[a] * lengths[b] or 1.0) for a, b in PAIRS}
    return found | {"length_ratio": lengths["filtered"] / (lengths["masked"] or 1.0)}


def layer_of(parameter: str) -> str:
    """Number of a parameter's decoder layer, or "embedding", "norm" or "head"."""
    found = re.search(r"layers\.(\d+)\.", parameter)
    if found:
        return found[1]
    return next((n for n in ("embed", "norm", "head") if n in parameter), parameter)


def kind_of(parameter: str) -> str:
    """The module that a parameter belongs to, without its layer: q_proj, down_proj, norm, ..."""
    kind = parameter.split(".")[-2]
    return "norm" if "norm" in kind else kind


class Fidelity(AtSteps):
    """Appends the dot products at some steps to a JSON-lines file.

    Args:
        batches: token ids, int64 (B, T) each; their gradients are added up.
        reference: the reference model's losses of each batch.
        copy: makes an unconverted model of the run's shape.
    """

    def __init__(
        self,
        path: Path,
        batches: list[Tensor],
        reference: list[Tensor],
        copy: Callable[[], PreTrainedModel],
    ) -> None:
        super().__init__(POINTS)
        self.path, self.batches, self.reference, self.copy = path, batches, reference, copy

    def record(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        model = self.copy()
        model.load_state_dict(module.model.state_dict())
        found: dict[tuple[str, float], list[dict[str, Grads]]] = {mask: [] for mask in MASKS}
        for ids, reference in zip(self.batches, self.reference, strict=True):
            full = plain_grads(model, ids, torch.ones_like(ids, dtype=torch.bool))
            with torch.no_grad():
                losses = token_losses(model, ids, ids)
            for mask, seen in found.items():
                keep = keep_rows(mask, losses, reference, ids)
                filtered, masked = (
                    filtered_grads(model, ids, ids, keep),
                    plain_grads(model, ids, keep),
                )
                seen.append({"filtered": filtered, "masked": masked, "full": full})
        masks = [
            {
                "selector": selector,
                "keep": keep,
                "together": dots(summed(seen)),
                "each": [cosines(dots(grads).values()) for grads in seen],
            }
            for (selector, keep), seen in found.items()
        ]
        append_row(self.path, {"step": step, "masks": masks})


def keep_rows(mask: tuple[str, float], losses: Tensor, reference: Tensor, ids: Tensor) -> Tensor:
    """The rows bool (B, T) that one of MASKS keeps."""
    selector, keep = mask
    if selector == "random":
        return selectors.random(ids, keep, "batch", torch.Generator().manual_seed(0))
    return selectors.select(losses, reference, ids, keep)


def summed(each: list[dict[str, Grads]]) -> dict[str, Grads]:
    """The gradients of several batches added up."""
    return {
        kind: {name: sum_of([grads[kind][name] for grads in each]) for name in each[0][kind]}
        for kind in GRADIENTS
    }


def sum_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def measure(run: Path, arm: str, out: Path) -> Path:
    """Train an arm of a finished comparison again and measure on the way; return the file.

    Goes on where an earlier call stopped. Raises ValueError for an unknown arm, FileNotFoundError
    for a run without a reference model.
    """
    recipe = load_comparison(str(run / "recipe.yaml"))
    if arm not in recipe.arms:
        raise ValueError(f"{run} has no arm {arm!r}; it has: {', '.join(recipe.arms)}")
    if not (run / "reference" / "model").is_dir():
        raise FileNotFoundError(
            f"{run} has no reference model: train an arm with excess_loss first"
        )
    corpus, path = load_corpus(run / "corpus"), out / "fidelity.jsonl"
    callback = _callback(recipe, corpus, run, path)
    strategy = strategy_of(recipe, recipe.arms[arm], run / "reference")
    job = Job(out / "fit", PackedRows(corpus.train), recipe.train.steps, strategy, (callback,))
    fit(recipe, job, corpus.tokenizer)
    return path


def _callback(recipe: Recipe, corpus: Corpus, run: Path, path: Path) -> Fidelity:
    size = recipe.train.batch_size
    reference = reference_losses(run / "reference" / "model", corpus.heldout, size)
    batches = torch.from_numpy(corpus.heldout.astype(np.int64)).split(size)
    return Fidelity(
        path,
        list(batches),
        list(reference.split(size)),
        lambda: build_model(recipe, corpus.tokenizer),
    )


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cosines as one flat table: by step, mask and part, a part being all, a layer or a kind."""
    lines = []
    for step, mask in ((row["step"], mask) for row in rows for mask in row["masks"]):
        parts: dict[tuple[str, str], list[dict[str, float]]] = {}
        for name, products in mask["together"].items():
            for place in (("all", "all"), ("layer", layer_of(name)), ("kind", kind_of(name))):
                parts.setdefault(place, []).append(products)
        for (by, part), group in parts.items():
            known = {"step": step, "selector": mask["selector"], "keep": mask["keep"]}
            lines.append({**known, "by": by, "part": part, **cosines(group)})
    return lines


def write_csv(lines: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        for line in lines:
            writer.writerow(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}
            )


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Three panels: all parameters along training, by layer along training, by kind at the end."""
    figure = Figure((10.5, 3.1), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    for selector, keep in MASKS:
        label = f"{selector.replace('_', ' ')}, keep {keep}"
        _line(left, _pick(lines, "all", selector, keep), "all", label)
    main = [line for line in lines if (line["selector"], line["keep"]) == MASKS[0]]
    for part in dict.fromkeys(line["part"] for line in main if line["by"] == "layer"):
        label = f"layer {part}" if part.isdigit() else part
        _line(middle, [line for line in main if line["by"] == "layer"], part, label)
    last = max(line["step"] for line in main)
    kinds = [line for line in main if line["by"] == "kind" and line["step"] == last]
    right.barh([line["part"] for line in kinds], [line["filtered_masked"] for line in kinds])
    left.set_title("filtered against masked, all parameters", fontsize=9)
    middle.set_title("by layer, excess loss, keep 0.6", fontsize=9)
    right.set_title(f"by kind of parameter, step {last}", fontsize=9)
    right.set_xlim(min(line["filtered_masked"] for line in kinds) - 0.02, 1.0)
    for axes in (left, middle):
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel("cosine", fontsize=8)
        axes.legend(fontsize=7, frameon=False)
    for axes in (left, middle, right):
        axes.tick_params(labelsize=7)
        axes.grid(color="#dddddd", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=200)


def _pick(lines: list[dict[str, Any]], by: str, selector: str, keep: float) -> list[dict[str, Any]]:
    wanted = (by, selector, keep)
    return [line for line in lines if (line["by"], line["selector"], line["keep"]) == wanted]


def _line(axes: Any, lines: list[dict[str, Any]], part: str, label: str) -> None:
    found = [line for line in lines if line["part"] == part]
    steps, values = [line["step"] for line in found], [line["filtered_masked"] for line in found]
    axes.plot(steps, values, marker="o", markersize=3, linewidth=1.2, label=label)


def main() -> None:
    """Measure, and print the cosines of all parameters together."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a finished comparison")
    parser.add_argument("--arm", default="filtered", help="which of its arms is trained again")
    parser.add_argument("--out", type=Path, help="default: RUN/fidelity")
    args = parser.parse_args()
    out = args.out or args.run / "fidelity"
    lines = table(read_rows(measure(args.run, args.arm, out)))
    write_csv(lines, out / "fidelity.csv")
    plot(lines, out / "fidelity.png")
    print(f"{'step':>6} {'selector':12} {'keep':>5} " + " ".join(f"{a}.{b}" for a, b in PAIRS))
    for line in (line for line in lines if line["by"] == "all"):
        shown = " ".join(f"{line[f'{a}_{b}']:{len(a + b) + 1}.3f}" for a, b in PAIRS)
        print(f"{line['step']:6d} {line['selector']:12} {line['keep']:5.2f} {shown}")
    print(f"{out}/fidelity.csv, fidelity.png")


if __name__ == "__main__":
    main()
