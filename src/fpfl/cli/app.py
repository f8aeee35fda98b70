"""The command line: ``fpfl demo``, ``privacy``, ``reproduce``, and the commands about runs.

Bad input ends with exit code 2 and one line; there are no tracebacks for what a user can mend.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fpfl import __version__
from fpfl.cli import data as cli_data
from fpfl.cli import export as cli_export
from fpfl.cli import federation as cli_federation
from fpfl.cli import measure as cli_measure
from fpfl.cli import plan as cli_plan
from fpfl.cli import runs
from fpfl.cli import sweep as cli_sweep
from fpfl.cli.options import help_alone
from fpfl.privacy.conventions import BudgetExhaustedError


def _show_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


def _top(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    """Group-fair, differentially private federated learning."""
    help_alone(ctx)


app = typer.Typer(
    callback=_top,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

runs.add_commands(app)
app.command()(cli_measure.measure)
app.command()(cli_sweep.sweep)
app.command()(cli_export.export)
app.command()(cli_plan.plan)
app.command()(cli_export.report)
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_federation.app, name="federation")


def main() -> None:
    """Entry point: run the app and turn errors into one line."""
    _plain_warnings()
    try:
        code = app(cli_data.show_alone(sys.argv[1:]), standalone_mode=False)
    except typer.Abort:
        code = _fail("interrupted", 130)
    except (ValueError, OSError, ImportError, BudgetExhaustedError) as error:
        code = _fail(str(error), 2)
    except Exception as error:
        # A usage error's class is click's or Typer's own, by their releases; all have this method.
        say = getattr(error, "format_message", None)
        if say is None:
            raise
        code = _fail(say(), 2)
    sys.exit(code if isinstance(code, int) else 0)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the table.")] = Path(
        "out/demo"
    ),
) -> None:
    """Show that private federated learning is unfair and that FPFL closes the gap (on Adult)."""
    from rich.console import Console
    from rich.table import Table

    from fpfl.callbacks.progress import progress
    from fpfl.experiments.demo import (
        TOLERANCE,
        draw_demo,
        in_words,
        run_demo,
        run_folders,
        save_demo,
    )
    from fpfl.experiments.runner import about_this_run
    from fpfl.privacy import round_up
    from fpfl.report.page import write_report

    start = time.perf_counter()
    runs = run_demo(progress)
    table = Table(title="Adult test set: false negative rates of women and men")
    for column in ("", "accuracy", "women", "men", "gap [95%]", f"in {TOLERANCE}?", "ε"):
        table.add_column(column, no_wrap=True)
    for r in runs:
        rates, gap, private = r.test.rates["FNR"], r.test.gaps["fnr"], r.run.privacy
        table.add_row(
            r.name,
            f"{r.test.accuracy:.3f}",
            f"{rates['sex=Female']:.3f}",
            f"{rates['sex=Male']:.3f}",
            f"{gap.value:.3f} [{gap.low:.3f}, {gap.high:.3f}]",
            r.test.verdict if r.test.collapsed is None else "collapsed",
            round_up(private.epsilon) if private and private.epsilon is not None else "none",
        )
    console = Console()
    console.print(table)
    for r in runs:
        balance = f"balanced accuracy {r.test.balanced_accuracy:.3f}, AUC {r.test.auc:.3f}"
        console.print(f"{r.name}: {r.what}; {balance}", highlight=False)
        if r.test.collapsed is not None:
            console.print(f"  COLLAPSED: {r.test.collapsed}", highlight=False, soft_wrap=True)
    console.print(f"\n{in_words(runs)}", highlight=False, soft_wrap=True)
    picture = draw_demo(runs, out / "fnr.png")
    save_demo(runs, out, about_this_run("fpfl demo", time.perf_counter() - start))
    # Said once where all that differs are small terms of δ, with the largest of them.
    said = {
        r.name: (str(replace(r.run.privacy, delta_terms=())), r.run.privacy)
        for r in runs
        if r.run.privacy
    }
    for alike in dict.fromkeys(text for text, _ in said.values()):
        names = " and ".join(name for name, (text, _) in said.items() if text == alike)
        statement = max((p for text, p in said.values() if text == alike), key=lambda p: p.delta)
        console.print(f"\nPrivacy of {names}:", highlight=False)
        for line in statement.lines():
            console.print(f"  {line}", highlight=False, soft_wrap=True)
    for r in runs:
        for note in r.run.warnings:
            console.print(f"Note on {r.name}: {note}", highlight=False, soft_wrap=True)
    console.print(f"\nPicture: {picture}   Runs: {out}", highlight=False, soft_wrap=True)
    try:
        page = f"Report: {write_report(run_folders(runs, out), out / 'report.html')}"
    except ImportError as error:  # all the rest is there without it
        page = f"No report: {error}"
    console.print(page, highlight=False, soft_wrap=True, markup=False)


@app.command()
def privacy(
    population: Annotated[int, typer.Option(help="Number of users K.")],
    cohort: Annotated[int, typer.Option(help="Expected cohort m: users in a round.")],
    rounds: Annotated[int, typer.Option(help="Rounds T.")],
    epsilon: Annotated[float | None, typer.Option(help="ε to calibrate the noise to.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="σ, instead of ε.")] = None,
    delta: Annotated[float | None, typer.Option(help="δ; 1/(10 K) by default.")] = None,
    max_participations: Annotated[
        int | None, typer.Option(help="How many rounds a user takes part in at most.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the noise for an ε, or the ε of a noise, under all three conventions."""
    from fpfl.privacy import compare_conventions

    answers = compare_conventions(
        population=population,
        cohort=cohort,
        rounds=rounds,
        delta=delta,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        max_participations=max_participations,
    )
    if as_json:
        print(json.dumps(answers, indent=1))
    else:
        _print_conventions(answers)


@app.command()
def reproduce(
    table: str,
    seeds: Annotated[
        int | None, typer.Option(help="How many seeds, from 0: 1 by default; for tables 10 or 3.")
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Glob on model/algorithm/cohort/population, e.g. '*/FPFL/*'.")
    ] = "*",
    out: Annotated[Path | None, typer.Option(help="Folder for results.json, table.md.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results as JSON.")] = False,
    convention: Annotated[str, typer.Option(help="poisson, replace-one or paper.")] = "poisson",
    noise_multiplier: Annotated[
        list[str] | None,
        typer.Option(help="σ instead of ε, for all rows; or PATTERN=σ, as often as needed."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE for all rows, e.g. rounds=250.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes side by side.")] = None,
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="Train every run by itself, e.g. to time it.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="For femnist: a path, femnist (cache or download), or digits (the default). For "
            "tables: the folder that has their files."
        ),
    ] = None,
    order: Annotated[
        str, typer.Option(help="For femnist: how users get their groups, lexicographic or seeded.")
    ] = "lexicographic",
    scale: Annotated[float | None, typer.Option(help="Share of the rounds to run, 0 to 1.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str, typer.Option(help="float32, tf32 or bf16.")] = "float32",
    resume: Annotated[bool, typer.Option(help="Resume the table in --out.")] = False,
    tables: Annotated[
        str | None, typer.Option(help="For tables: some, e.g. credit,compas.")
    ] = None,
    epsilons: Annotated[str | None, typer.Option(help="For tables: some, e.g. 0.5,2,none.")] = None,
    constraints: Annotated[
        str | None, typer.Option(help="For tables: some of fnr,odds,parity.")
    ] = None,
    prepare: Annotated[
        Path | None, typer.Option(help="For tables: a file to train from on another machine.")
    ] = None,
) -> None:
    """Run a table of the paper and show it beside the paper's figures.

    TABLE: adult-central, adult-federated, adult-robust, adult-ablation, adult-lift or femnist.
    Or tables: several tables of people, by public ranges and defaults, beside models without
    privacy; --out is resumed always.
    """
    chosen = {"--tables": tables, "--epsilons": epsilons, "--constraints": constraints}
    if table == "tables":
        from fpfl.experiments.people.report import run_tables

        text = run_tables(
            data, out, seeds=seeds, rows=rows, chosen=chosen, prepare=prepare, jobs=jobs,
            as_json=as_json, words=["fpfl", *sys.argv[1:]],
        )  # fmt: skip
        print(text)
        return
    given = chosen | {"--prepare": prepare}
    strange = [name for name, value in given.items() if value is not None]
    if strange:
        raise ValueError(f"{', '.join(strange)} are for fpfl reproduce tables; {table} has --rows")
    from fpfl.experiments.runner import run_table

    text = run_table(
        table,
        seeds=1 if seeds is None else seeds,
        rows=rows,
        out=out,
        as_json=as_json,
        jobs=jobs,
        convention=convention,
        noise_multiplier=noise_multiplier or [],
        overrides=overrides or [],
        data=data,
        order=order,
        scale=scale,
        device=device,
        precision=precision,
        resume=resume,
        words=["fpfl", *sys.argv[1:]],
    )
    print(text)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _print_conventions(answers: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from fpfl.privacy import round_up

    table = Table(title=f"δ = {answers[0]['delta']:g}; σ is the noise over the clip bound")
    titles = ("convention", "σ", "sensitivity", "ε", "honest ε", "ε against the server")
    for title in titles:
        table.add_column(title)
    for a in answers:
        table.add_row(
            a["convention"],
            f"{a['noise_multiplier']:.4f}",
            f"{a['sensitivity']}C",
            round_up(a["epsilon"]),
            round_up(a["epsilon_honest"]),
            f"{round_up(a['epsilon_server'])} ({a['participations']} rounds, "
            f"δ = {a['delta_server']:g})",
        )
    Console().print(table)
    print(
        "paper: cohorts without replacement, RDP, σ at face value (as published).\n"
        "replace-one: the same with the sensitivity that replacing a user has.\n"
        "poisson: Poisson cohorts and PLD; the default for training.\n"
        "Honest ε: with the true sensitivity. The server knows the cohorts, so sampling does not "
        "hide a user from it."
    )


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _plain_warnings() -> None:
    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)

    warnings.showwarning = show
