"""The `collider` command: one function for the arguments of a sub-command, and one that runs it.

Each imports what it needs itself, so that one sub-command does not wait for another's libraries.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return the exit status: 0, or 2 after a mistake of the user's.

    A run that a signal stopped leaves by SystemExit with status 75: the same command goes on.
    """
    args = _parse(list(sys.argv[1:] if argv is None else argv))
    try:
        args.run(args)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if not _raised_by_us(error):
            raise
        print(f"collider: {error}", file=sys.stderr)
        return 2
    return 0


def _raised_by_us(error: Exception) -> bool:
    """Whether this package raised the error itself: then its message tells the user what to do.

    An error out of a library below is a defect here, and needs its traceback.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = frame.tb_frame.f_globals.get("__name__", "") if frame is not None else ""
    return module.split(".")[0] == __name__.split(".")[0]


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="collider", description="Token-filtered LLM training.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, add_arguments, run) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if words[:1] == [name]:
            add_arguments(sub)
    args, rest = parser.parse_known_args(words)
    # argparse ends a list of words at the first option; these are the overrides that follow one
    if hasattr(args, "overrides") and not any(word.startswith("-") for word in rest):
        args.overrides += rest
    elif rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    return args


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a name in recipes/, or the path of a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replace a recipe's key")


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    _recipe_arguments(parser)
    parser.add_argument("--print", action="store_true", help="show the resolved recipe and stop")


def _train(args: argparse.Namespace) -> None:
    from lightning_collider.training.config import Recipe, TrainingRecipe, load_recipe, to_yaml

    recipe = load_recipe(args.recipe, args.overrides)
    if args.print:
        print(to_yaml(recipe), end="")
        return
    if isinstance(recipe, TrainingRecipe):
        from lightning_collider.training.pretrain import run_training

        run_training(recipe)
        return
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{args.recipe!r} is a federated run: `collider federate {args.recipe}`")
    from lightning_collider.training.run import run_recipe

    run_recipe(recipe)


def _federate_arguments(parser: argparse.ArgumentParser) -> None:
    _train_arguments(parser)
    parser.add_argument(
        "--app", type=Path, metavar="DIR", help="write the Flower app for real sites, and stop"
    )


def _federate(args: argparse.Namespace) -> None:
    from lightning_collider.federated import require_flower
    from lightning_collider.training.config import load_federated, to_yaml

    recipe = load_federated(args.recipe, args.overrides)
    if args.print:
        print(to_yaml(recipe), end="")
    elif args.app is not None:
        from lightning_collider.federated.app import write_app

        print(write_app(recipe, args.app))
    else:
        require_flower()
        from lightning_collider.federated.run import run_federated

        run_federated(recipe)


def _explain(args: argparse.Namespace) -> None:
    from lightning_collider.training.config import FederatedRecipe, load_recipe
    from lightning_collider.training.explain import explain

    recipe = load_recipe(args.recipe, args.overrides)
    if isinstance(recipe, FederatedRecipe):
        raise ValueError(
            f"{args.recipe!r} is a federated run, which `collider explain` cannot read"
        )
    print(explain(recipe))


def _tokenize(args: argparse.Namespace) -> None:
    from lightning_collider.data.prepare import prepare
    from lightning_collider.training.config import load_training
    from lightning_collider.training.models import load_tokenizer, shape_of

    recipe = load_training(args.recipe, args.overrides)
    tokenizer = load_tokenizer(recipe.model)
    for part, sources in prepare(recipe, tokenizer, shape_of(recipe.model).vocab_size).items():
        for shards in sources:
            print(f"{part}: {len(shards):,} tokens in {shards.folder}")


def _score(args: argparse.Namespace) -> None:
    from lightning_collider.training.config import load_training
    from lightning_collider.training.ranks import ranks_of_job
    from lightning_collider.training.scoring import score

    print(score(load_training(args.recipe, args.overrides), world=ranks_of_job()))


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder of a run, or one of its checkpoints")
    parser.add_argument("dir", type=Path, help="receives the Hugging Face folder")


def _export(args: argparse.Namespace) -> None:
    from lightning_collider.training.export import export

    print(f"{args.dir} from {export(args.checkpoint, args.dir)}")


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    from lightning_collider.eval import compare

    compare.add_arguments(parser)


def _eval(args: argparse.Namespace) -> None:
    from lightning_collider.eval import compare

    compare.main(args)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html")
    parser.add_argument(
        "--bench",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="show what `collider bench --json` wrote",
    )
    parser.add_argument("--png", type=Path, metavar="DIR", help="write plots for a paper there")


def _report(args: argparse.Namespace) -> None:
    from lightning_collider.report.write import write_report

    print(write_report(args.runs, args.out, args.bench))
    if args.png is not None:
        from lightning_collider.report.plots import write_plots

        for path in write_plots(args.runs, args.png):
            print(path)


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-command takes no arguments."""


def _build(args: argparse.Namespace) -> None:
    from lightning_collider.ops import build

    print(build())


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from lightning_collider.eval import efficiency

    efficiency.add_arguments(parser)


def _bench(args: argparse.Namespace) -> None:
    from lightning_collider.eval import efficiency

    efficiency.main(args)


# name -> what --help says, the function that adds its arguments, the function that runs it
COMMANDS: dict[
    str,
    tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]],
] = {
    "train": ("run a recipe, or go on where it stopped", _train_arguments, _train),
    "explain": ("what is filtered in a recipe's model, and why not", _recipe_arguments, _explain),
    "tokenize": ("make the token shards of a recipe's data", _recipe_arguments, _tokenize),
    "score": ("store the reference model's losses of a recipe's data", _recipe_arguments, _score),
    "export": ("write a checkpoint as a Hugging Face folder", _export_arguments, _export),
    "eval": ("score checkpoints on lm-eval tasks, side by side", _eval_arguments, _eval),
    "report": ("one HTML page of a run, or of several", _report_arguments, _report),
    "federate": ("run a federated recipe on simulated clients", _federate_arguments, _federate),
    "build": ("compile the C++ extension ahead of time", _no_arguments, _build),
    "bench": ("time our backward against Hugging Face's", _bench_arguments, _bench),
}


if __name__ == "__main__":
    sys.exit(main())
