"""The command ``triptych``. Each command imports what it needs when it runs, so that ``--help`` is instant.

Exit codes: 0 done, 1 a defect (with traceback), 2 usage or recipe, 3 data, 4 infrastructure, 5 stalled,
130 interrupted, 143 preempted (a checkpoint is written for both; run the command again).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from system.core.errors import TriptychError

app = typer.Typer(
    name="triptych",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Distributed actor-learner reinforcement learning of language models.",
    pretty_exceptions_enable=False,
)
run_app = typer.Typer(no_args_is_help=True, help="Look at and steer runs: list, status, stop.")
model_app = typer.Typer(no_args_is_help=True, help="Bring models in and out: import, export.")
app.add_typer(run_app, name="run")
app.add_typer(model_app, name="model")

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides with the full dotted path: learner.learning_rate=1e-5"),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under ./runs.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"triptych {version('triptych')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of expected errors too.")] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the resolved plan, start nothing.")
    ] = False,
    assume_gpus: Annotated[
        int | None, typer.Option(min=0, help="With --dry-run: check against this many GPUs instead of this machine's.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="One process, no Ray: for debuggers and small machines.")
    ] = False,
) -> None:
    """Train a model; continues the run folder if it holds this run."""
    from system.train import run_training

    run_training(recipe, overrides or [], dry_run=dry_run, assume_gpus=assume_gpus, local=local)


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="objectives, rewards or divergences")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show one with its options.")] = None,
) -> None:
    """List what a recipe can name, with options and defaults."""
    from system.catalog import print_catalog

    print_catalog(kind, name)


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option(help="Where runs will be written.")] = Path("runs"),
) -> None:
    """Check versions, devices, ports and permissions: what would fail, and the mend."""
    from system.doctor import print_doctor

    raise typer.Exit(print_doctor(folder))


@model_app.command("import")
def model_import(
    source: Annotated[str, typer.Argument(metavar="SRC", help="smollm2, a GGUF file, a model folder or a hub id.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
) -> None:
    """Bring a model into a plain Hugging Face folder with tokenizer and chat template."""
    from system.models import import_model

    typer.echo(f"{import_model(source, destination)}")


@model_app.command("export")
def model_export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run's folder.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
) -> None:
    """Copy a checkpoint's model out as a plain Hugging Face folder."""
    from system.models import export_model

    typer.echo(f"{export_model(checkpoint, destination)}")


@run_app.command("list")
def run_list(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where runs are.")] = Path("runs"),
) -> None:
    """All runs below a folder, with state, step and last reward."""
    from system.run_commands import print_runs

    print_runs(folder)


@run_app.command("status")
def run_status(run: RunArgument) -> None:
    """What a run is doing: step, reward, who waits for whom."""
    from system.run_commands import print_status

    print_status(run)


@run_app.command("stop")
def run_stop(
    run: RunArgument,
    deadline_s: Annotated[float, typer.Option(help="Wait this long for the run to end.")] = 120.0,
) -> None:
    """Ask a run to write a checkpoint and end."""
    from system.run_commands import stop_run

    stop_run(run, deadline_s)


def main() -> None:
    """Runs the command line; an expected error is one message and its exit code, a defect is a traceback and 1."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) != len(sys.argv) - 1
    try:
        app(args=arguments, prog_name="triptych")
    except TriptychError as error:
        if debug:
            raise
        print(f"triptych: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
