"""`gpt2-ray`: bulk jobs on Ray without code."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import Any

from ._native import _number_options

EXIT_FAILURE, EXIT_USAGE = 1, 2

DESCRIPTION = """\
Continues or scores every row of JSONL, Parquet or text files, on one machine or on a Ray cluster. Every row of the output has a
result, or an `error` that says why not; ids and all other columns stay."""

EXAMPLES = """\
examples:
  gpt2-ray generate prompts.jsonl texts.jsonl --model gpt2 --max-new-tokens 50 --checkpoint texts.checkpoint
  gpt2-ray generate prompts/ texts/ --address 10.0.0.1:6379 --actors 8 --threads 16 --temperature 0.8 --seed 7
  gpt2-ray score reviews.parquet scores.parquet --model gpt2 --prompt-column review

After an interruption the same command with the same --checkpoint resumes the job. Exit codes: 0 success; 1 the job failed, or rows
have an error; 2 usage error."""

# Options of a job, and of `Model.from_pretrained`.
JOB = (
    "checkpoint", "address", "actors", "threads", "gpus_per_actor", "rows_per_block", "output_format", "overwrite",
)  # fmt: skip
MODEL = ("dtype", "kv_dtype", "device", "tokenizer", "revision", "offline")
# Options of generation that have a flag, beside those with a flag of another name: name, type, what it does.
GENERATION: list[tuple[str, type, str]] = [
    *((name, int if is_whole else float, what) for name, is_whole, what in _number_options() if name != "seed"),
    ("keep_last", int, "of a prompt beyond the context keep the last N tokens"),
    ("batch_size", int, "sequences that an actor generates at once"),
]


def parser() -> argparse.ArgumentParser:
    """The arguments of both commands."""
    whole = argparse.ArgumentParser(
        "gpt2-ray",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = whole.add_subparsers(dest="task", required=True, metavar="COMMAND")
    for task, what in (("generate", "continue the prompt of every row"), ("score", "score the text of every row")):
        command = commands.add_parser(
            task,
            help=what,
            description=DESCRIPTION,
            epilog=EXAMPLES,
            formatter_class=whole.formatter_class,
            allow_abbrev=False,
        )
        command.add_argument("input", metavar="INPUT", help="a file .jsonl, .parquet or .txt, or a folder of them")
        command.add_argument(
            "output", metavar="OUTPUT", help="a file .jsonl or .parquet, in the order of the input, or a folder for many"
        )
        _add_job(command.add_argument_group("job"))
        _add_model(command.add_argument_group("model"))
        _add_rows(command.add_argument_group("rows"))
        options = command.add_argument_group(task)
        if task == "generate":
            _add_generation(options)
        else:
            options.add_argument("--stride", type=int, metavar="N", help="distance between windows of long texts, in tokens")
        options.add_argument(
            "--option", action="append", default=[], metavar="NAME=JSON",
            help=f"any other option of Model.{task}; give it for each",
        )  # fmt: skip
    return whole


def _add_job(group: Any) -> None:
    group.add_argument("--checkpoint", metavar="DIR", help="keep what is done here, and resume from it after an interruption")
    group.add_argument("--address", metavar="HOST:PORT", help="the Ray cluster; without it Ray is started on this machine")
    group.add_argument("--actors", type=int, metavar="N", help="models at work at once [default: one on each node]")
    group.add_argument("--threads", type=int, metavar="N", help="threads of each actor [default: its share of the CPUs]")
    group.add_argument("--gpus-per-actor", type=float, default=0, metavar="N", help="GPUs that an actor reserves")
    group.add_argument("--rows-per-block", type=int, metavar="N", help="rows that are saved, or lost, together")
    group.add_argument("--output-format", choices=["jsonl", "parquet"], help="format of the files of a folder")
    group.add_argument("--overwrite", action="store_true", help="replace an output file that is there")
    group.add_argument("--quiet", action="store_true", help="tell no progress")
    group.add_argument("--json", action="store_true", help="print the summary as a JSON object")


def _add_model(group: Any) -> None:
    group.add_argument("--model", metavar="NAME", help="a folder, a file or a name on the Hub [default: the built-in model]")
    for name in MODEL[:-1]:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, metavar="VALUE", help=f"as with Model.from_pretrained({name}=…)")
    group.add_argument("--offline", action="store_true", default=None, help="never use the network")


def _add_rows(group: Any) -> None:
    group.add_argument("--prompt-column", default="prompt", metavar="NAME", help="column of the texts [default: prompt]")
    group.add_argument("--id-column", default="id", metavar="NAME", help="column of the ids [default: id]")
    group.add_argument("--seed-column", metavar="NAME", help="column of seeds; without it they come from --seed and the ids")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the whole job [default: 0]")
    group.add_argument("--one-seed", action="store_true", help="sample every row with --seed itself, as gpt2 generate does")


def _add_generation(group: Any) -> None:
    group.add_argument("--greedy", action="store_true", help="always the most probable token")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end a text here; give it for each")
    for name, kind, what in GENERATION:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=what.replace("%", "%%"))


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `Rows` and of the model's method."""
    options: dict[str, Any] = {}
    if arguments.task == "generate":
        for name in [name for name, _, _ in GENERATION] + ["stop"]:
            if getattr(arguments, name) is not None:
                options[name] = getattr(arguments, name)
        if arguments.greedy:
            options["do_sample"] = False
    elif arguments.stride is not None:
        options["stride"] = arguments.stride
    for given in arguments.option:
        name, is_there, value = given.partition("=")
        if not is_there:
            raise ValueError(f"--option {given}: expected NAME=JSON")
        try:
            options[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            options[name.replace("-", "_")] = value
    model_options = {name: getattr(arguments, name) for name in MODEL if getattr(arguments, name) is not None}
    options.update(prompt_column=arguments.prompt_column, seed=arguments.seed, model_options=model_options)
    options["seed_column"] = arguments.seed_column
    options["id_column"] = None if arguments.one_seed else arguments.id_column
    return options


def _told(done: int, blocks: int) -> None:
    print(f"\r{done} of {blocks} blocks", end="", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    arguments = parser().parse_args(argv)
    is_told = not arguments.quiet and sys.stderr.isatty()
    try:
        # Ray takes a second to load, and --help needs none of it.
        from . import ray as bulk

        # Ray Data tells its plans on the console; its files keep them.
        for handler in logging.getLogger("ray.data").handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setLevel(logging.ERROR)
        run = bulk.generate_dataset if arguments.task == "generate" else bulk.score_dataset
        options = {name: getattr(arguments, name) for name in JOB} | options_of(arguments)
        progress = _told if is_told else None
        summary = run(arguments.input, arguments.output, arguments.model, progress=progress, **options)
    except KeyboardInterrupt:
        print(f"\ninterrupted{_way_on(arguments)}", file=sys.stderr)
        return EXIT_FAILURE
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Exception as error:  # whatever an engine or a file system may raise ends the job alike
        print(f"error: {error}{_way_on(arguments)}", file=sys.stderr)
        return EXIT_FAILURE
    finally:
        if is_told:
            print(file=sys.stderr)
    if arguments.json:
        print(json.dumps(vars(summary)))
    else:
        rate = summary.rows / max(summary.seconds, 1e-9)
        print(f"{summary.rows} rows, {summary.errors} with an error, {summary.seconds:.1f} s, {rate:.1f} rows/s: {summary.output}")
    return EXIT_FAILURE if summary.errors else 0


def _way_on(arguments: argparse.Namespace) -> str:
    return f"; the same command resumes from {arguments.checkpoint}" if arguments.checkpoint else ""


if __name__ == "__main__":
    sys.exit(main())
