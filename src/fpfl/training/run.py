"""A finished run: the model that was kept, what was released on the way, and what it cost."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import Scaling
from fpfl.fairness.against import Against, compare_predictions
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.gaps import Evaluation, evaluate_predictions
from fpfl.fairness.levelling import weighed_down
from fpfl.runs.folder import HISTORY, MODEL, PRIVACY, RESULT
from fpfl.server.state import Row
from fpfl.store.files import explained, write_whole
from fpfl.users import task
from fpfl.users.engine import outputs
from fpfl.users.flat import FlatModel
from fpfl.users.task import check_model

if TYPE_CHECKING:
    from torch import Tensor

    from fpfl.privacy.statement import PrivacyStatement

NO_PRIVACY = "This run gives no privacy guarantee."


@dataclass(frozen=True)
class Run:
    """What ``fpfl.train`` returns.

    Attributes
    ----------
    model
        The selected model, a copy of the one given; it returns logits.
    history
        One row a round: released accuracy, gap, each group's rates, counts and multipliers.
    privacy
        The privacy statement; None for a run without privacy.
    selected
        Which of the iterates was kept, in words.
    stopped
        Why training stopped early, where it did.
    warnings
        What a user should know about this run, e.g. a constraint whose noise dominates its signal.
    settings
        What the run was started with, as plain values.
    collapse
        Whether the model collapsed while it was trained, by released totals, in a sentence; None
        where they do not have the confusion table (`fpfl.fairness.confusion`).
    scaling
        How a table's inputs are scaled; the model does it itself. None where they are not.
    """

    model: nn.Module
    history: list[Row] = field(repr=False)
    privacy: PrivacyStatement | None
    selected: str
    constraint: Constraint | None = None
    stopped: str | None = None
    warnings: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict, repr=False)
    collapse: str | None = None
    scaling: Scaling | None = field(default=None, repr=False)

    def __str__(self) -> str:
        lines = [f"{len(self.history)} rounds; model kept: {self.selected}."]
        lines += [f"Inputs: {self.scaling}."] if self.scaling else []
        lines += [f"Note: {note}." for note in self.warnings]
        if self.collapse is not None and self.collapse.rstrip(".") not in self.warnings:
            lines.append(self.collapse)
        down = weighed_down(self.history, self.settings)
        lines += [down] if down else []
        lines += [f"Stopped: {self.stopped}."] if self.stopped else []
        return "\n".join([*lines, str(self.privacy or NO_PRIVACY)])

    def evaluate(
        self, data: FederatedDataset, *, bootstrap: int = 1000, seed: int = 0
    ) -> Evaluation:
        """Accuracy and gaps on a dataset, with bootstrap intervals over its users.

        This looks at data without any noise: for a simulation's test set, or public data.
        """
        return evaluate_model(
            self.model, data, constraint=self.constraint, bootstrap=bootstrap, seed=seed
        )

    def against(
        self, reference: Run, data: FederatedDataset, *, bootstrap: int = 1000, seed: int = 0
    ) -> Against:
        """Who is better and who is worse off than by a reference, `fpfl.train_reference`'s run.

        Like `evaluate` it looks at data without any noise.
        """
        if self.constraint is None:
            raise ValueError("the run was trained without a constraint, so it has no reference")
        return compare_models(
            self.model, reference.model, data, self.constraint, bootstrap=bootstrap, seed=seed
        )

    def save(self, folder: str | Path) -> Path:
        """Write the run to a folder: model.safetensors, history.json, result.json, privacy.txt."""
        files = self.files()
        path = Path(folder)
        with explained(path, "The run was not saved; name a folder that can be written to"):
            path.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(path / name, content)
        return path

    def files(self) -> dict[str, bytes]:
        """What `save` writes, by name; the result is the last: where it is, the others are."""
        from safetensors.torch import save

        # Clones: tied weights share memory, which the format refuses.
        state = {n: v.detach().clone().contiguous() for n, v in self.model.state_dict().items()}
        if any(v.is_floating_point() and not bool(v.isfinite().all()) for v in state.values()):
            raise ValueError("the model has parameters that are not finite; it is not saved")
        about = {
            "selected": self.selected,
            "stopped": self.stopped,
            "warnings": list(self.warnings),
            "settings": self.settings,
            "privacy": self.privacy.as_dict() if self.privacy else None,
            **({"scaling": self.scaling.as_dict()} if self.scaling else {}),
        }
        return {
            MODEL: save(state),
            HISTORY: f"{json.dumps(self.history)}\n".encode(),
            PRIVACY: f"{self.privacy or NO_PRIVACY}\n".encode(),
            RESULT: f"{json.dumps(about, indent=1)}\n".encode(),
        }


def evaluate_model(
    model: nn.Module,
    data: FederatedDataset,
    *,
    constraint: Constraint | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
) -> Evaluation:
    """Evaluate any model on a dataset; see `fpfl.fairness.gaps`."""
    parameter = next(model.parameters(), torch.zeros(()))
    data = data.to(parameter.device, parameter.dtype)
    check_model(model, data.schema, data.input_dtype(parameter.dtype))
    call = _reading(model, parameter) if data.lazy else model
    return _evaluate(model, call, data, constraint, bootstrap, seed)


def compare_models(
    model: nn.Module,
    reference: nn.Module,
    data: FederatedDataset,
    constraint: Constraint,
    *,
    bootstrap: int = 1000,
    seed: int = 0,
) -> Against:
    """Compare a model with its reference on a dataset; see `fpfl.fairness.against`."""
    found: list[Tensor] = []
    for each in (model, reference):
        parameter = next(each.parameters(), torch.zeros(()))
        moved = data.to(parameter.device, parameter.dtype)
        check_model(each, moved.schema, moved.input_dtype(parameter.dtype))
        call = _reading(each, parameter) if moved.lazy else each
        found.append(task.predictions(_outputs(each, call, moved), moved.schema).cpu())
    schema = data.schema
    constraint.check(schema.classes, schema.label_range)
    return compare_predictions(
        found[0],
        found[1],
        data.labels.cpu(),
        data.attributes.cpu(),
        schema.attributes,
        constraint=constraint,
        classes=schema.classes,
        label_range=schema.label_range,
        users=_owners(data),
        bootstrap=bootstrap,
        seed=seed,
    )


def evaluate_vector(
    model: FlatModel,
    w: Tensor,
    data: FederatedDataset,
    constraint: Constraint | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
) -> Evaluation:
    """Evaluate the model with parameters w."""
    data = data.to(w.device, w.dtype)
    call = partial(model, w)
    return _evaluate(
        model.module, _reading(call, w) if data.lazy else call, data, constraint, bootstrap, seed
    )


def _reading(call: Callable[[Tensor], Tensor], like: Tensor) -> Callable[[Tensor], Tensor]:
    """The same model for pieces of lazy features: each is read and put beside its parameters."""

    def read(piece: Tensor) -> Tensor:
        dtype = like.dtype if piece.is_floating_point() else piece.dtype
        # A copy in any case: a model that works in place must not write to a mapped file.
        return call(piece.to(like.device, dtype, copy=True))

    return read


def _evaluate(
    module: nn.Module,
    call: Callable[[Tensor], Tensor],
    data: FederatedDataset,
    constraint: Constraint | None,
    bootstrap: int,
    seed: int,
) -> Evaluation:
    schema = data.schema
    if constraint is not None:
        constraint.check(schema.classes, schema.label_range)
    found = _outputs(module, call, data)
    scores = None
    # What is not a number has no rank; what it is worth is said by the predictions alone.
    if schema.classes is not None and not bool(found.isnan().any()):
        # Logits of two classes are ranked as they are: probabilities near 1 would be ties.
        scores = found if schema.task == "binary" else task.scores(found, schema)
    return evaluate_predictions(
        task.predictions(found, schema).cpu(),
        data.labels.cpu(),
        data.attributes.cpu(),
        schema.attributes,
        classes=schema.classes,
        label_range=schema.label_range,
        users=_owners(data),
        constraint=constraint,
        bootstrap=bootstrap,
        seed=seed,
        scores=scores,
        class_names=schema.class_names,
    )


def _outputs(module: nn.Module, call: Callable[[Tensor], Tensor], data: FederatedDataset) -> Tensor:
    """What a model returns for all samples; it is as it was afterwards."""
    was_training = module.training
    module.eval()
    try:
        return outputs(call, data.features, data.schema)
    finally:
        module.train(was_training)


def _owners(data: FederatedDataset) -> Tensor:
    """Each sample's user."""
    return torch.repeat_interleave(torch.arange(data.population), data.sizes().cpu())


def with_parameters(model: FlatModel, w: Tensor) -> nn.Module:
    """A copy of the module that has the parameters w."""
    module = copy.deepcopy(model.module)
    module.load_state_dict(module.state_dict() | model.parameters(w.detach().clone()))
    return module.eval()
