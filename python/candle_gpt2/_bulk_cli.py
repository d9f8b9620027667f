"""Command-line program `gpt2-ray` for bulk jobs on Ray."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import Any

from ._native import _number_options

EXIT_FAILURE, EXIT_USAGE = 1, 2

DESCRIPTION = """\
Generates from or scores every row of JSONL, Parquet or text files, on one machine or on a Ray cluster. Every row of the output has
a result or an `error`. Ids and all other columns are preserved."""

EXAMPLES = """\
examples:
  gpt2-ray generate prompts.jsonl texts.jsonl --model gpt2 --max-new-tokens 50 --checkpoint texts.checkpoint
  gpt2-ray generate prompts/ texts/ --address 10.0.0.1:6379 --actors 8 --threads 16 --temperature 0.8 --seed 7
  gpt2-ray score reviews.parquet scores.parquet --model gpt2 --prompt-column review

After an interruption, the same command with the same --checkpoint resumes the job. Exit codes: 0 success; 1 the job failed, or rows
have errors; 2 usage error."""

# Options for the job, and for `Model.from_pretrained`.
JOB = (
    "checkpoint", "address", "actors", "threads", "gpus_per_actor", "rows_per_block", "output_format", "overwrite",
)  # fmt: skip
MODEL = ("dtype", "kv_dtype", "device", "tokenizer", "revision", "offline")
# Generation options with flags of the same name: name, type, description.
GENERATION: list[tuple[str, type, str]] = [
    *((name, int if is_integer else float, text) for name, is_integer, text in _number_options() if name != "seed"),
    ("keep_last", int, "keep the last N tokens of a prompt longer than the context"),
    ("batch_size", int, "sequences per batch in each actor"),
]


def parser() -> argparse.ArgumentParser:
    """Creates the argument parser for both commands."""
    root = argparse.ArgumentParser(
        "gpt2-ray",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = root.add_subparsers(dest="task", required=True, metavar="COMMAND")
    for task, summary in (("generate", "continue the prompt of every row"), ("score", "score the text of every row")):
        command = commands.add_parser(
            task,
            help=summary,
            description=DESCRIPTION,
            epilog=EXAMPLES,
            formatter_class=root.formatter_class,
            allow_abbrev=False,
        )
        command.add_argument("input", metavar="INPUT", help="a .jsonl, .parquet or .txt file, or a folder of them")
        command.add_argument(
            "output", metavar="OUTPUT", help="a .jsonl or .parquet file, in input order, or a folder for several files"
        )
        _add_job(command.add_argument_group("job"))
        _add_model(command.add_argument_group("model"))
        _add_rows(command.add_argument_group("rows"))
        options = command.add_argument_group(task)
        if task == "generate":
            _add_generation(options)
        else:
            options.add_argument("--stride", type=int, metavar="N", help="distance between the windows of long texts, in tokens")
        options.add_argument(
            "--option", action="append", default=[], metavar="NAME=JSON",
            help=f"another option of Model.{task}; can be repeated",
        )  # fmt: skip
    return root


def _add_job(group: Any) -> None:
    group.add_argument("--checkpoint", metavar="DIR", help="store progress in this folder, and resume from it after an interruption")
    group.add_argument("--address", metavar="HOST:PORT", help="Ray cluster to connect to; by default Ray starts on this machine")
    group.add_argument("--actors", type=int, metavar="N", help="number of actors, each with a model [default: one per node]")
    group.add_argument("--threads", type=int, metavar="N", help="threads per actor [default: its share of the CPUs]")
    group.add_argument("--gpus-per-actor", type=float, default=0, metavar="N", help="GPUs reserved by each actor")
    group.add_argument("--rows-per-block", type=int, metavar="N", help="rows in a block, the unit of saved progress")
    group.add_argument("--output-format", choices=["jsonl", "parquet"], help="format of the files in an output folder")
    group.add_argument("--overwrite", action="store_true", help="replace an existing output file")
    group.add_argument("--quiet", action="store_true", help="show no progress")
    group.add_argument("--json", action="store_true", help="print the summary as a JSON object")


def _add_model(group: Any) -> None:
    group.add_argument("--model", metavar="NAME", help="folder, file or name on the Hub [default: the built-in model]")
    for name in MODEL[:-1]:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, metavar="VALUE", help=f"see Model.from_pretrained({name}=…)")
    group.add_argument("--offline", action="store_true", default=None, help="never use the network")


def _add_rows(group: Any) -> None:
    group.add_argument("--prompt-column", default="prompt", metavar="NAME", help="column with the prompts [default: prompt]")
    group.add_argument("--id-column", default="id", metavar="NAME", help="column with the ids [default: id]")
    group.add_argument("--seed-column", metavar="NAME", help="column with the seeds; by default they are derived from --seed and the ids")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed for the whole job [default: 0]")
    group.add_argument("--one-seed", action="store_true", help="use --seed itself for every row, as gpt2 generate does")


def _add_generation(group: Any) -> None:
    group.add_argument("--greedy", action="store_true", help="always choose the most probable token")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop string; can be repeated")
    for name, kind, text in GENERATION:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text.replace("%", "%%"))


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns keyword arguments for `Rows` and for the model's method."""
    options: dict[str, Any] = {}
    if arguments.task == "generate":
        for name in [name for name, _, _ in GENERATION] + ["stop"]:
            if getattr(arguments, name) is not None:
                options[name] = getattr(arguments, name)
        if arguments.greedy:
            options["do_sample"] = False
    elif arguments.stride is not None:
        options["stride"] = arguments.stride
    for option in arguments.option:
        name, separator, value = option.partition("=")
        if not separator:
            raise ValueError(f"--option {option}: expected NAME=JSON")
        try:
            options[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            options[name.replace("-", "_")] = value
    model_options = {name: getattr(arguments, name) for name in MODEL if getattr(arguments, name) is not None}
    options.update(prompt_column=arguments.prompt_column, seed=arguments.seed, model_options=model_options)
    options["seed_column"] = arguments.seed_column
    options["id_column"] = None if arguments.one_seed else arguments.id_column
    return options


def _print_progress(done: int, blocks: int) -> None:
    print(f"\r{done} of {blocks} blocks", end="", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = parser().parse_args(argv)
    shows_progress = not arguments.quiet and sys.stderr.isatty()
    try:
        # Ray takes a second to import, and --help does not need it.
        from . import ray as bulk

        # Ray Data prints its plans to the console, and also writes them to its log files.
        for handler in logging.getLogger("ray.data").handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setLevel(logging.ERROR)
        run = bulk.generate_dataset if arguments.task == "generate" else bulk.score_dataset
        options = {name: getattr(arguments, name) for name in JOB} | options_of(arguments)
        progress = _print_progress if shows_progress else None
        summary = run(arguments.input, arguments.output, arguments.model, progress=progress, **options)
    except KeyboardInterrupt:
        print(f"\ninterrupted{_resume_hint(arguments)}", file=sys.stderr)
        return EXIT_FAILURE
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Exception as error:  # any error of an engine or a file system ends the job
        print(f"error: {error}{_resume_hint(arguments)}", file=sys.stderr)
        return EXIT_FAILURE
    finally:
        if shows_progress:
            print(file=sys.stderr)
    if arguments.json:
        print(json.dumps(vars(summary)))
    else:
        rate = summary.rows / max(summary.seconds, 1e-9)
        print(f"{summary.rows} rows, {summary.errors} with errors, {summary.seconds:.1f} s, {rate:.1f} rows/s: {summary.output}")
    return EXIT_FAILURE if summary.errors else 0


def _resume_hint(arguments: argparse.Namespace) -> str:
    return f"; run the same command again to resume from {arguments.checkpoint}" if arguments.checkpoint else ""


if __name__ == "__main__":
    sys.exit(main())
