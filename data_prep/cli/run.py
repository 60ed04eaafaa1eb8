"""`run`: run a recipe, or print its plan with --check."""

import argparse
from pathlib import Path

from data_prep.cli.input_flags import add_workers_flag, print_notes
from data_prep.cli.problems import Problems

MAX_WORKERS = 1 << 20


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a JSON file")
    parser.add_argument(
        "--executor",
        default="local",
        metavar="local|slurm",
        help="where tasks run (default: local)",
    )
    add_workers_flag(parser)
    parser.add_argument("--check", action="store_true", help="print the plan and write nothing")


def run(options: argparse.Namespace) -> None:
    from data_prep.pipeline.plan import print_plan
    from data_prep.pipeline.recipe import read_recipe
    from data_prep.pipeline.run import prepare, run_recipe
    from data_prep.tasks.executors import make_executor

    problems = Problems()
    workers = problems.workers(options.workers, MAX_WORKERS)
    recipe = problems.collect(read_recipe, options.recipe)
    given = {} if recipe is None else recipe.executor
    executor = problems.collect(
        make_executor, options.executor, workers, given, f"{options.recipe}"
    )
    problems.refuse()
    for source in recipe.sources:
        print_notes(source.notes)
    if recipe.tokenizer is not None:
        print_notes(recipe.tokenizer.notices)
    pipelines, training = prepare(recipe, executor)
    if options.check:
        print_plan(recipe, options.executor, workers, pipelines, training)
    else:
        print(f"report: {run_recipe(recipe, pipelines, training)}")
