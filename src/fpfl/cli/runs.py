"""The commands about runs: ``fpfl evaluate``, ``audit``, ``withdraw``, ``budget``."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fpfl.cli.options import help_alone
from fpfl.cli.train import resume, train

RATES_ALONE = (
    "These rates are all that was released. Balanced accuracy, F1, AUC and how often each class is "
    "predicted are not known from them, nor whether the model says the same of nearly everybody."
)


def evaluate(
    run: Path,
    epsilon: Annotated[float, typer.Option(help="ε of the evaluation, for the held-out users.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Held-out users (.npz, table or population folder); the config's test."),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ; 1/(10 K) by default.")] = None,
    bound: Annotated[
        float | None, typer.Option(help="Most samples that one user may count for.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="The held-out users' own population ledger.")
    ] = None,
    moved: Annotated[
        bool, typer.Option(help="The folder was moved or restored; no other copy is used.")
    ] = False,
    auc: Annotated[
        bool, typer.Option(help="Two classes: also release the AUC, for 5.4% more noise.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a finished model on held-out users with DP and test the constraint.

    RUN is the folder of a finished run.

    The run's ledger records it before it is released, and refuses a second time for one model. A
    run that was resumed since has another: it is a further release, and says what all cost. With a
    reference in the run's folder both models are evaluated and compared: ε is for both together.
    """
    from fpfl.config import (
        check_same_people,
        load_data,
        load_people,
        load_run_config,
        make_constraint,
        make_model,
    )
    from fpfl.heldout import evaluate_run, evaluate_with_reference
    from fpfl.heldout.against import NOT_MEASURED
    from fpfl.runs.folder import CUT_SHORT, EVALUATION, OpenRun, is_cut_short, reference_of

    opened = OpenRun(run)
    opened.require_finished()
    config, folder = load_run_config(run), Path(opened.origin.folder)
    if data is not None:
        people = load_people(config, data, folder)
    else:
        trained, test = load_data(config, folder, opened.origin.partition_seed, private=True)
        if test is None:
            raise ValueError("the config names no test set; give held-out users: --data PATH")
        check_same_people(config, trained, opened)
        people = test
    constraint = make_constraint(config, people.schema)
    if constraint is None:
        raise ValueError("the run was trained without a constraint, so there is none to judge by")
    asked: dict[str, Any] = {
        "model": make_model(config, people.schema),
        "constraint": constraint,
        "epsilon": epsilon,
        "delta": delta,
        "bound": bound,
        "ledger": ledger,
        "moved": moved,
        "auc": auc,
    }
    beside, against = reference_of(run), None
    if beside is not None:
        beside.require_finished()
        if is_cut_short(beside.ledger, opened.ledger):
            print(CUT_SHORT, file=sys.stderr)
            beside = None
    if beside is None:
        released = evaluate_run(opened, people, **asked)
    else:
        released, _, against = evaluate_with_reference(opened, beside, people, **asked)
    if as_json:
        print((run / EVALUATION.format("private")).read_text(encoding="utf-8"), end="")
        return
    print(released)
    print(f"\n{NOT_MEASURED if against is None else against}\n")
    for line in released.statement():
        print(line)
    if against is not None:
        print(against.price)
    if people.schema.task == "multiclass":
        print(RATES_ALONE)


def audit(
    epsilon: Annotated[float, typer.Option(help="ε to claim, and to attack.")] = 2.0,
    convention: Annotated[str, typer.Option(help="poisson, replace-one, paper or all.")] = "all",
    canaries: Annotated[int, typer.Option(help="Canary users in a run.")] = 200,
    runs: Annotated[int, typer.Option(help="Independent runs for each audit.")] = 300,
    rounds: Annotated[int, typer.Option(help="Rounds of each run.")] = 10,
    confidence: Annotated[float, typer.Option(help="Confidence of the whole audit.")] = 0.999,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write JSON to a file.")] = None,
) -> None:
    """Attack fpfl's own training with canary users, bound its ε from below, and check its noise.

    Ends with status 1 where a claim is refuted or a check fails: by chance alone with a probability
    of 1 − confidence at most.
    """
    from fpfl.audit import default_settings, run_audit
    from fpfl.experiments.runner import about_this_run

    settings = default_settings(
        epsilon=epsilon,
        convention=convention,
        canaries=canaries,
        runs=runs,
        rounds=rounds,
        confidence=confidence,
    )
    command = " ".join(["fpfl", *sys.argv[1:]])
    text, content = run_audit(
        settings,
        confidence=confidence,
        about=lambda seconds: about_this_run(command, seconds),
        out=out,
        report=lambda title, _: print(f"audited: {title}", file=sys.stderr, flush=True),
    )
    print(json.dumps(content, indent=1) if as_json else text)
    refuted = any(result["caught"] for result in content["audits"].values())
    if refuted or any(result["failed"] for result in content["checks"].values()):
        raise typer.Exit(1)


def withdraw(
    where: Path,
    users: list[int],
) -> None:
    """Leave users out from the next round on, also in a run that is in progress.

    WHERE is a run's folder or a population's ledger, USERS are the users' indices.
    """
    from fpfl.privacy.budget import PopulationLedger
    from fpfl.runs.folder import REFERENCE, is_begun, read_manifest
    from fpfl.runs.journal import withdraw as note

    if where.is_dir():
        settings = read_manifest(where).settings
        population = settings["population"]
        # There may be more users than were declared.
        last = math.inf if settings.get("population_declared") else population
        wrong = [user for user in users if not 0 <= user < last]
        if wrong:
            raise ValueError(f"there are no users {wrong}; indices run from 0 to {population - 1}")
        note(where, users)
        if is_begun(where / REFERENCE):
            note(where / REFERENCE, users)
    else:
        with PopulationLedger.open(where) as ledger:
            ledger.withdraw(users)
            ledger.sync()
    print(f"Recorded: {len(users)} withdrawn, honoured from the next round that is drawn.")


budget = typer.Typer(
    help="A privacy budget for all runs on one population.",
    callback=help_alone,
    invoke_without_command=True,
)


@budget.command()
def create(
    file: Path,
    population: Annotated[int, typer.Option(help="Number of users K.")],
    epsilon: Annotated[float, typer.Option(help="ε that all runs together may cost.")],
    delta: Annotated[float | None, typer.Option(help="δ; 1/(10 K) by default.")] = None,
    neighbours: Annotated[
        str, typer.Option(help="Adjacency: what one user may change.")
    ] = "zero-out",
    name: Annotated[str, typer.Option(help="What the population is called.")] = "",
    cohort: Annotated[int | None, typer.Option(help="Users in a round of a usual run.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="σ of a usual run.")] = None,
) -> None:
    """Create the ledger of a population.

    FILE is the new ledger, e.g. people.jsonl.

    Its accountant is a privacy filter at a Rényi order that is fixed now. With --cohort and
    --noise-multiplier of the runs to come it is the order that has most room for them.
    """
    from fpfl.privacy.budget import PopulationLedger
    from fpfl.privacy.filter import Mechanism

    if file.exists():
        raise ValueError(f"{file} is there already: fpfl budget show {file}")
    usual = None
    if cohort is not None and noise_multiplier is not None:
        sampler = "fixed" if neighbours == "replace-one" else "poisson"
        usual = Mechanism(sampler, population, cohort, noise_multiplier, neighbours)  # type: ignore[arg-type]
    elif cohort is not None or noise_multiplier is not None:
        raise ValueError("give both --cohort and --noise-multiplier of a usual run, or neither")
    made = PopulationLedger.create(
        file,
        population=population,
        epsilon=epsilon,
        delta=delta,
        neighbours=neighbours,  # type: ignore[arg-type]
        mechanism=usual,
        name=name,
    )
    with made as ledger:
        print(ledger.summary())


@budget.command()
def show(
    file: Path,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what the runs on a population have cost, by its ledger FILE."""
    from fpfl.privacy.budget import PopulationLedger

    with PopulationLedger.open(file, write=False) as ledger:
        print(json.dumps(ledger.as_dict(), indent=1) if as_json else ledger.summary())


def add_commands(app: typer.Typer) -> None:
    """Put the commands of this module into the app."""
    for command in (train, resume, evaluate, audit, withdraw):
        app.command()(command)
    app.add_typer(budget, name="budget")
