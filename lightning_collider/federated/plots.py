"""Curves of federated runs: the metric against time, and against updates."""

from pathlib import Path

from lightning_collider.federated.state import Journal

AXES = {"seconds": "seconds", "updates": "updates of clients"}
NOT_METRICS = ("event", "seconds", "version", "updates", "work", "correction_work")


def plot_curves(runs: dict[str, Journal], path: Path, target: float | None = None) -> None:
    """Draw the first metric of each run's evaluations into a PNG file.

    Args:
        runs: name in the legend -> its journal.
        path: of the file.
        target: drawn as a dashed line.
    """
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for name, journal in runs.items():
        rows = journal.of("evaluation")
        metric = next(key for key in rows[0] if key not in NOT_METRICS)
        for axis, (key, label) in zip(axes, AXES.items(), strict=True):
            axis.plot([r[key] for r in rows], [r[metric] for r in rows], label=name)
            axis.set_xlabel(label)
        axes[0].set_ylabel(metric)
    for axis in axes:
        axis.grid(alpha=0.3)
        if target is not None:
            axis.axhline(target, color="gray", linestyle="--")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
