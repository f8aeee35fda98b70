"""The front door of private evaluation."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

from torch import nn

from fpfl.aggregation import NoiseSource
from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import load_model
from fpfl.data.schema import Schema
from fpfl.fairness.constraints import Constraint
from fpfl.heldout.estimates import Cells
from fpfl.heldout.plan import HeldoutPlan, length
from fpfl.heldout.result import PrivateEvaluation, repeated
from fpfl.heldout.scores import unit
from fpfl.privacy.assumptions import check_declared
from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.gaussian import gaussian_noise_multiplier
from fpfl.privacy.plan import Block, Neighbours, PrivacyPlan
from fpfl.privacy.settings import JOINT
from fpfl.runs.folder import EVALUATION, MODEL, OpenRun, as_json, model_digest
from fpfl.store.files import write_whole


def plan_heldout(
    schema: Schema,
    *,
    population: int,
    constraint: Constraint,
    epsilon: float,
    delta: float | None = None,
    bound: float | None = None,
    confidence: float = 0.95,
    neighbours: Neighbours = "zero-out",
    auc: bool = True,
) -> HeldoutPlan:
    """Plan a private evaluation: all that is public, before any data is touched.

    Parameters
    ----------
    schema
        The held-out users' declared schema.
    population
        K: how many users are held out.
    constraint
        Whose rates, groups and tolerance the verdict is about.
    epsilon, delta
        The budget of the evaluation; δ is 1/(10 K) when it is not given.
    bound
        B: how many samples one user weighs at most; the schema's ``samples_per_user`` when it is
        not given. The noise grows with it, and so do the intervals, which allow for users whose B
        samples are all alike: what most users have, or less, is a good choice.
    confidence
        Of the intervals.
    neighbours
        What one user may change: ``"zero-out"``, ``"add-remove"`` or ``"replace-one"`` (which
        takes twice the noise).
    auc
        For two classes: count scores, too, in the same release, for the area under the ROC curve.
        It takes a tenth of the budget 1/σ², so the noise of the other counts is 5.4% larger.
    """
    schema.check_declared()
    constraint.check(schema.classes, schema.label_range)
    weight = schema.samples_per_user if bound is None else bound
    if weight is None or not (math.isfinite(weight) and weight > 0):
        raise ValueError(
            f"bound is {bound} and the schema declares samples_per_user = "
            f"{schema.samples_per_user}; give as bound how many samples one user may weigh, e.g. 2"
        )
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; it must be between 0 and 1, e.g. 0.95")
    if population < 1:
        raise ValueError(f"population is {population}; give how many users are held out")
    cells = Cells(schema, constraint)
    scores = unit(cells.length**2) if auc and cells.confusion else 0.0
    noise = gaussian_noise_multiplier(
        epsilon,
        1,
        1 / (10 * population) if delta is None else delta,
        sensitivity=2.0 if neighbours == "replace-one" else 1.0,
    )
    privacy = PrivacyPlan(
        population=population,
        cohort=population,
        rounds=1,
        noise_multiplier=noise,
        blocks=[Block(JOINT, weight * length(cells, scores))],
        convention="poisson",  # with a cohort of all users: everyone takes part for certain
        neighbours=neighbours,
        delta=delta,
    )
    return HeldoutPlan(cells, float(weight), confidence, privacy, scores)


def evaluate_privately(
    model: nn.Module,
    data: FederatedDataset,
    *,
    constraint: Constraint,
    epsilon: float,
    delta: float | None = None,
    bound: float | None = None,
    confidence: float = 0.95,
    neighbours: Neighbours = "zero-out",
    noise: NoiseSource | None = None,
    auc: bool = True,
) -> PrivateEvaluation:
    """Release counts of held-out users once, under a budget of their own, and judge by them.

    Parameters
    ----------
    model
        It returns logits (or numbers in units of the label range), as for training.
    data
        The held-out users: other people than the training users, or the two prices add up.
    constraint, epsilon, delta, bound, confidence, neighbours, auc
        As in :func:`plan_heldout`.
    noise
        Where the noise comes from; the operating system's randomness when it is not given.
    """
    check_declared(neighbours, data.schema.population is not None)
    plan = plan_heldout(
        data.schema,
        population=data.K,
        constraint=constraint,
        epsilon=epsilon,
        delta=delta,
        bound=bound,
        confidence=confidence,
        neighbours=neighbours,
        auc=auc,
    )
    return plan.release(model, data, noise)


def evaluate_run(
    run: str | Path | OpenRun,
    data: FederatedDataset,
    *,
    model: nn.Module,
    constraint: Constraint,
    epsilon: float,
    delta: float | None = None,
    bound: float | None = None,
    confidence: float = 0.95,
    ledger: str | Path | None = None,
    moved: bool = False,
    noise: NoiseSource | None = None,
    auc: bool = True,
) -> PrivateEvaluation:
    """Evaluate a finished run's model on held-out users, once, as ``fpfl evaluate`` does.

    The run's ledger records it before it is released, and refuses a second time for one model. A
    run that was resumed since has another: it is a further release, and says what all cost. What
    was released is written to the folder.

    Parameters
    ----------
    run
        The run's folder, or what was opened of it.
    data
        The held-out users.
    model
        The run's network: the weights in the folder are loaded into a copy of it.
    constraint, epsilon, delta, bound, confidence, noise, auc
        As in :func:`evaluate_privately`.
    ledger
        The held-out users' own population ledger, which is charged as well.
    moved
        The folder was moved or restored, and no other copy of it is used.

    Returns
    -------
    PrivateEvaluation
        What was released.
    """
    from safetensors.torch import load_file

    opened = run if isinstance(run, OpenRun) else OpenRun(Path(run))
    opened.require_finished()
    path, own = opened.path, opened.ledger
    model = load_model(copy.deepcopy(model), load_file(path / MODEL))
    check_declared("zero-out", data.schema.population is not None)
    plan = plan_heldout(
        data.schema,
        population=data.K,
        constraint=constraint,
        epsilon=epsilon,
        delta=delta,
        bound=bound,
        confidence=confidence,
        auc=auc,
    )
    plan.check(model, data)
    own.to_evaluate(moved=moved)
    with own:
        digest, earlier = model_digest(path), list(own.evaluations)
        own.evaluation(plan.mechanism, plan.epsilon, plan.delta, digest)
        if ledger is not None:
            with PopulationLedger.open(ledger) as theirs:
                theirs.charge(own.run, plan.mechanism, None, "evaluation")
                theirs.sync()
        released = plan.release(model.eval(), data, noise)
        if earlier:
            costs = [(record["epsilon"], record["delta"]) for record in earlier]
            again = repeated([*costs, (plan.epsilon, plan.delta)])
            released = replace(released, lines=(*released.lines, again))
        content = released.as_dict() | {"model": digest}
        write_whole(path / EVALUATION.format("private"), as_json(content))
    return released
