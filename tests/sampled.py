"""How samples of formats are read, and what those that go on were begun with.

For tests/test_samples.py, and for scripts/make_samples.py, which writes down what is found. It goes
with the samples of all versions that there are: where a reader gets another name, it is called by
that here; where one reads less than it did, its test fails.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fpfl
from fpfl.data.femnist.compact import CompactSource
from fpfl.methods.onegradient import AveragedState
from fpfl.privacy.budget import PopulationLedger
from fpfl.report.reading import read_run
from fpfl.runs.folder import OpenRun
from fpfl.runs.journal import WITHDRAWALS, read_past, read_withdrawals
from fpfl.store.checkpoints import encode

SETTINGS = (
    "cohort", "population", "method", "clip", "privacy", "optimizer", "learning_rate",
    "normaliser", "selection", "selection_window", "sampling", "samples_per_user", "local",
)  # fmt: skip
FIGURES = (
    "convention", "neighbours", "population", "cohort", "rounds", "noise_multiplier", "blocks",
    "delta", "epsilon", "epsilon_honest", "epsilon_server", "participations", "seeded_noise",
    "seeded_cohorts",
)  # fmt: skip
"""What is compared of a run's settings, and of its privacy statement."""

PEOPLE = "people.npz"
LEDGER = "people.jsonl"
USERS = 60
SCHEMA = fpfl.Schema(
    shape=(5,),
    attributes=(fpfl.Attribute("sex", ("Female", "Male")),),
    population=USERS,
    samples_per_user=3.0,
)
NUMBERS = fpfl.Schema(
    shape=(5,),
    classes=None,
    label_range=(-5.0, 5.0),
    attributes=SCHEMA.attributes,
    population=USERS,
    samples_per_user=3.0,
)


def load_people(folder: Path, schema: fpfl.Schema = SCHEMA) -> fpfl.FederatedDataset:
    """The people of a version's samples."""
    with np.load(folder / PEOPLE) as file:
        labels = file["labels" if schema.classes else "numbers"]
        return fpfl.FederatedDataset.from_samples(
            file["features"], labels, file["attributes"], schema, users=file["users"]
        )


# --- runs that are begun from Python --------------------------------------------------------------


def momentum(w: list[Tensor]) -> torch.optim.Optimizer:
    """An optimiser with a state of its own."""
    return torch.optim.SGD(w, lr=0.05, momentum=0.9)


def python_run(
    name: str, folder: Path
) -> tuple[torch.nn.Module, fpfl.FederatedDataset, dict[str, Any]]:
    """What a run from Python is begun with, and resumed with: model, people, settings."""
    equal = fpfl.fnr_parity("sex", tolerance=0.05)
    common: dict[str, Any] = {"cohort": 20, "rounds": 6}
    network, people = fpfl.mlp(5, (3,), seed=0), load_people(folder)
    if name == "plain-cut":
        own = {
            "local": fpfl.FederatedAveraging(steps=2, learning_rate=0.1),
            "privacy": fpfl.Privacy(noise_multiplier=2.0, clip=1.0, convention="replace-one"),
            "selection": "last",
            "normaliser": "samples",
        }
    elif name == "averaged-cut":
        own = {
            "constraint": equal,
            "method": fpfl.OneGradient(),
            "privacy": fpfl.Privacy(noise_multiplier=2.0, clip=fpfl.Clipping(1.0, counts=2.0)),
            "samples_per_user": 2,
        }
    elif name == "numbers-cut":
        people = load_people(folder, NUMBERS)
        own = {
            "constraint": fpfl.equal_error("sex", label_range=(-5.0, 5.0), tolerance=0.05),
            "method": fpfl.BMDM(multiplier_lr=0.05),
            "clip": 1.0,
            "optimizer": momentum,
        }
    elif name == "seeded":
        own = {
            "constraint": equal,
            "privacy": fpfl.Privacy(noise_multiplier=2.0, clip=fpfl.Clipping(1.0, counts=2.0)),
            "seed": 1,
            "noise_seed": 2,
        }
    elif name == "seeded-cut":
        own = {"constraint": equal, "method": fpfl.Tran(), "seed": 1}
    elif name == "saved":
        own = {"constraint": fpfl.equalized_odds("sex"), "privacy": fpfl.Privacy(4.0, clip=1.0)}
    else:
        raise ValueError(f"there is no run from Python called {name!r}")
    return network, people, common | own


def agreed() -> Any:
    """What the parties of the federation have agreed on."""
    from fpfl.federation import Agreement

    return Agreement(
        model=lambda: fpfl.mlp(5, (3,), seed=0),
        schema=SCHEMA,
        population=USERS,
        cohort=20,
        rounds=4,
        nodes=5,
        constraint=fpfl.fnr_parity("sex", tolerance=0.05),
        method=fpfl.OneGradient(),
        privacy=fpfl.Privacy(noise_multiplier=1.0, clip=1.0, convention="coins"),
        learning_rate=0.2,
    )


def federated(folder: Path, run: Path) -> fpfl.Run:
    """Begin or go on with the federation, its nodes in this process."""
    from federated import Memory

    from fpfl.federation import federate

    agreement, people = agreed(), load_people(folder)
    parts = np.array_split(np.arange(USERS), agreement.nodes)
    nodes = [lambda part=part: people.subset(part) for part in parts]
    courier = Memory(agreement, data=nodes)
    return federate(agreement, courier, courier.key, folder=run)


# --- what is read ---------------------------------------------------------------------------------


def run_facts(run: Path) -> dict[str, Any]:
    """What the readers find in a run's folder."""
    record = read_run(run)
    said = record.privacy or {}
    found = {
        "finished": record.finished,
        "rounds": record.rounds,
        "rates": record.rates,
        "groups": record.groups,
        "parameters": record.parameters,
        "constraint": record.constraint,
        "tolerance": record.tolerance,
        "epsilon": record.epsilon,
        "seeded noise": record.seeded_noise,
        "injected": record.injected,
        "selected": record.selected,
        "stopped": record.stopped,
        "warnings": record.warnings,
        "charged": record.charged,
        "begun": record.begun,
        "ended": record.ended,
        "settings": {name: record.settings[name] for name in SETTINGS},
        "history": record.history,
        "privacy": {name: said[name] for name in FIGURES if name in said},
        # A finished run's statement is in its folder. Another one's is made when it is read.
        "statement": record.statement if record.finished else None,
        "evaluations": {kind: evaluation_facts(e) for kind, e in record.evaluations.items()},
        "schema": None if record.schema is None else schema_facts(record.schema),
        "packages": sorted((record.environment or {}).get("packages", {})),
    }
    if (run / "ledger.jsonl").exists():
        found |= {"ledger": ledger_facts(run), "kept": kept_facts(run)}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def schema_facts(values: dict[str, Any]) -> dict[str, Any]:
    """What a schema in a file declares."""
    schema = fpfl.Schema.from_dict(values)
    return {
        "shape": schema.shape,
        "classes": schema.classes,
        "class names": schema.class_names,
        "label range": schema.label_range,
        "attributes": [(a.name, a.values, a.unknown) for a in schema.attributes],
        "features": None if schema.feature_names is None else len(schema.feature_names),
        "ranges": None if schema.feature_ranges is None else len(schema.feature_ranges),
        "population": schema.population,
        "samples per user": schema.samples_per_user,
        "source": schema.source,
    }


def evaluation_facts(found: Any) -> dict[str, Any]:
    """What an evaluation says."""
    return {
        "score": (found.score_name, *figure(found.score)),
        "judged": (found.constraint, found.tolerance, found.confidence),
        "verdict": (found.verdict, found.verdict_in_words),
        "people": (found.users, found.samples),
        "price": (found.epsilon, found.delta, found.seeded),
        "statement": found.statement,
        "gaps": {
            name: {
                "value": figure(gap.value),
                "worst": (gap.worst_group, gap.worst_pair and figure(gap.worst_pair.difference)),
                "rows": [
                    (row.rate, row.group, row.overall, row.count, *figure(row.difference))
                    for row in gap.rows
                ],
            }
            for name, gap in found.gaps.items()
        },
    }


def figure(found: Any) -> tuple[Any, ...]:
    """A number and its interval."""
    return (found.value, found.low, found.high)


def ledger_facts(run: Path) -> dict[str, Any]:
    """What a run's own ledger says, and the files that go with it."""
    about, ledger = OpenRun(run).manifest, OpenRun(run).ledger
    records, terms, limit = ledger.chain.records, ledger.terms, ledger.filter
    return {
        "run": (about.run, ledger.run),
        "simulation": (about.simulation, ledger.simulation),
        "strict": about.strict,
        "population ledger": about.population_ledger,
        "kinds": [record["kind"] for record in records],
        "charges": [record["round"] for record in records if record["kind"] == "charge"],
        "planned": ledger.planned,
        "spent": ledger.spent,
        "finished": ledger.finished,
        "terms": terms and (terms.rounds, terms.delta, terms.budget, terms.order, terms.cap),
        "mechanism": ledger.mechanism and ledger.mechanism.as_dict(),
        "filter": limit and (limit.epsilon, limit.delta, limit.order),
        "changes": [(change["rounds"], change["mechanism"]) for change in ledger.changes],
        "evaluations": [(e["epsilon"], e["delta"], e["model"]) for e in ledger.evaluations],
        "left": [(r["round"], r["users"]) for r in records if r["kind"] == "withdrawal"],
        "withdrawn": sorted(read_withdrawals(run / WITHDRAWALS)),
        "fingerprints": OpenRun(run).fingerprints,
    }


def kept_facts(run: Path) -> dict[str, Any]:
    """What the last checkpoint and the logs since hold: every class that a checkpoint names."""
    ledger = OpenRun(run).ledger
    past = read_past(run, ledger.simulation, ledger.terms.cap if ledger.terms else None)
    state, chosen = past.state, past.state.selection
    best, method = chosen.best, state.method
    tensors: list[Tensor] = []
    encode(state.optimizer, tensors)
    found = {
        "round": state.round,
        "next": past.next_round,
        "w": brief(state.w),
        "optimizer": (sorted(map(str, state.optimizer)), [brief(each) for each in tensors]),
        "method": type(method).__name__,
        "multipliers": method.multipliers.tolist(),
        "rule": (chosen.rule, chosen.rounds, chosen.tolerance, chosen.window),
        "recent": [
            (
                brief(w),
                counts.F.tolist(),
                counts.n.tolist(),
                float(counts.accuracy()),
                float(counts.gap()),
            )
            for w, counts in chosen.recent
        ],
        "best": best and (brief(best.w), best.rounds, best.accuracy, best.gap, best.fair),
        "mean": (None if chosen.mean is None else brief(chosen.mean), chosen.averaged),
        "totals": [(round, brief(v)) for round, v in sorted(past.totals.items())],
        "participations": sorted(past.participations.items()),
    }
    if isinstance(method, AveragedState):
        averages = (method.F, method.n, method.mass, method.squares)
        found["averages"] = [each.tolist() for each in averages]
        found["noise"] = (method.smallest, method.noise)
    return found


def brief(numbers: Tensor) -> tuple[Any, ...]:
    """Enough of a tensor to know it by: its kind, and sums that depend on every number's place."""
    flat = numbers.double().flatten()
    weights = torch.linspace(1.0, 2.0, len(flat), dtype=torch.float64)
    sums = (float(flat.sum()), float(flat @ weights))
    return (str(numbers.dtype), list(numbers.shape), *sums)


def population_ledger_facts(path: Path) -> dict[str, Any]:
    """What a population's ledger says."""
    with PopulationLedger.open(path, write=False) as ledger:
        return {**ledger.as_dict(), "who withdrew": sorted(ledger.withdrawn())}


def population_facts(data: fpfl.FederatedDataset) -> dict[str, Any]:
    """What is in a population."""
    return {
        "schema": schema_facts(data.schema.as_dict()),
        "lazy": data.lazy,
        "population": data.population,
        "samples": len(data),
        "sizes": data.sizes().tolist(),
        "values": [brief(each) for each in (data.features, data.labels, data.attributes)],
    }


def writers_facts(path: Path) -> dict[str, Any]:
    """What is in a compact file of digits."""
    source = CompactSource(path)
    return {
        "title": source.title,
        "names": source.names(),
        "writers": {
            part: [
                (writer.name, writer.labels.tolist(), brief(torch.from_numpy(writer.pixels)))
                for writer in source.read(part)
            ]
            for part in ("train", "test")
        },
    }


def estimator_facts(estimator: Any, rows: Any) -> dict[str, Any]:
    """What a fitted estimator answers, and says of itself."""
    scores = getattr(estimator, "predict_proba", estimator.predict)
    run = estimator.run_
    return {
        "class": type(estimator).__name__,
        "parameters": {name: repr(value) for name, value in estimator.get_params().items()},
        "predictions": estimator.predict(rows).tolist(),
        "scores": scores(rows).tolist(),
        "rounds": (estimator.n_iter_, len(run.history)),
        "epsilon": None if estimator.privacy_ is None else estimator.privacy_.epsilon,
        "delta": None if estimator.privacy_ is None else estimator.privacy_.delta,
        "constraint": None if run.constraint is None else run.constraint.name,
        "schema": schema_facts(estimator.schema_.as_dict()),
    }


def exported_rows() -> Tensor:
    """What an exported model of Adult is asked about."""
    return fpfl.load_adult("test", attributes=("sex",)).features[:8].float()


def torch_facts(path: Path) -> dict[str, Any]:
    """What a .pt2 file answers, and says of itself."""
    extra = {"fpfl.json": ""}
    program = torch.export.load(path, extra_files=extra).module()
    scores, predictions = program(exported_rows())
    return {
        "scores": scores.tolist(),
        "predictions": predictions.tolist(),
        "about": json.loads(extra["fpfl.json"]),
    }


def onnx_facts(path: Path) -> dict[str, Any]:
    """What an .onnx file answers, and says of itself."""
    import onnxruntime as runtime

    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    scores, predictions = session.run(None, {"features": exported_rows().numpy()})
    about = session.get_modelmeta().custom_metadata_map
    said = {name.removeprefix("fpfl."): text for name, text in about.items() if "fpfl." in name}
    return {"scores": scores.tolist(), "predictions": predictions.tolist(), "about": said}


def keys_facts(place: Path) -> dict[str, Any]:
    """Who the made-up node is, and what its authority's register and list say."""
    from fpfl.federation import enrolment as keys
    from fpfl.federation.register import Register
    from fpfl.federation.revocation import Revocations
    from fpfl.federation.secagg import Credential, Trust
    from fpfl.federation.secagg.certificates import certificates_from_pem

    trust = Trust.from_pem((place / keys.AUTHORITY).read_bytes())
    own, _ = certificates_from_pem((place / keys.CREDENTIAL).read_bytes())
    credential = Credential.signed(own, trust)
    revoked = Revocations.read((place / keys.REVOKED).read_bytes(), trust)
    with Register.open(place / keys.REGISTER, trust, write=False) as register:
        known = [(one.credential.name, one.revoked is not None) for one in register.entries]
    return {
        "credential": (credential.name, credential.index, credential.fingerprint),
        "authority": trust.fingerprint,
        "register": known,
        "list": (revoked.number, [f"{serial:x}" for serial in revoked.serials]),
    }


def agreement_text(agreement: Any) -> dict[str, Any]:
    """What an agreement's fingerprint is a digest of."""
    said = {
        **agreement.spec.settings,
        **agreement.terms,
        "schema": agreement.schema.as_dict(),
        "scale": agreement.encoding.scale,
        "bits": agreement.bits,
        "test_seed": agreement.test_seed,
    }
    plain: dict[str, Any] = json.loads(json.dumps(said, default=repr))
    return plain


def agreement_digest(text: dict[str, Any]) -> str:
    """The fingerprint of an agreement that was written down."""
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()[:32]
