"""What was released, to TensorBoard and MLflow: callbacks that log each round's figures.

Only rows of the history, settings and the privacy statement are logged: all of it was released, or
is public. A run's ε covers it.
"""

from __future__ import annotations

import json
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from fpfl.callbacks import register
from fpfl.server.events import Training
from fpfl.server.loop import RoundEvent
from fpfl.server.state import Row
from fpfl.training.run import NO_PRIVACY, Run
from fpfl.training.session import FpflWarning

SEEDED = "seeded: simulation only"
"""The tag of a run whose noise comes from a seed."""
_TABLES = {"groups": "rate", "counts": "count", "multipliers": "multiplier"}
_BATCH, _WAIT = 500, 10.0
"""Metrics are sent to MLflow when there are so many, or after so many seconds."""
_PARAMS, _LONGEST = 100, 5000
"""MLflow takes so many parameters at a time, and values of about this length."""


def scalars(row: Row, training: Training | None = None) -> dict[str, float]:
    """The released figures of a round by name, those that are known.

    ``accuracy`` (``score`` in regression), ``gap``, ``gradient_norm``, a method's own figures,
    ``balanced_accuracy``, ``f1``, ``predicted/...`` and ``collapsed`` of classifications, and
    ``rate/FNR/sex=Female``, ``overall/FNR``, ``count/...``, ``multiplier/...``; ``epsilon_so_far``
    is a bound (see `fpfl.Progress`).
    """
    found: dict[str, float | None] = {}
    for name, value in row.items():
        if name in _TABLES:
            for rate, groups in value.items():
                for group, number in groups.items():
                    found[f"{_TABLES[name]}/{rate}/{group}"] = number
        elif name == "confusion":
            continue  # what it says is in the balance
        elif name == "balance":
            found |= _balance(value)
        elif name == "overall":
            found |= {f"overall/{rate}": number for rate, number in value.items()}
        elif name == "accuracy" and training is not None:
            found[training.score] = value
        elif name not in ("round", "fair"):
            found[name] = value
    found["fair"] = float(bool(row["fair"])) if "groups" in row else None
    if training is not None and training.spending is not None:
        spent = training.spending.after(int(row["round"]))
        found["epsilon_so_far"] = None if spent is None else spent.epsilon
    known = {name: float(value) for name, value in found.items() if value is not None}
    return {name: value for name, value in known.items() if math.isfinite(value)}


def _balance(found: dict[str, Any] | None) -> dict[str, float | None]:
    """Figures over a window of rounds: ``balanced_accuracy``, ``predicted/1``, ``collapsed``."""
    if found is None:
        return {}
    shares = {f"predicted/{k}": share for k, share in enumerate(found["predicted"])}
    names = ("balanced_accuracy", "f1", "collapsed")
    return {**{name: found[name] for name in names}, **shares}


def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings one by one, e.g. ``privacy.epsilon``; those that were not given are left out."""
    return dict(_flat("", settings))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        yield name, ", ".join(map(str, value))
    elif value is not None:
        yield name, value


class Names:
    """Names that every tracker allows, each for one of ours: sex=Female becomes sex_Female."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._given:
            safe = re.sub(r"[^A-Za-z0-9_./ -]", "_", name)[:200]
            taken, number, free = set(self._given.values()), 1, safe
            while free in taken:  # two groups whose names differ in other characters alone
                number += 1
                free = f"{safe}_{number}"
            self._given[name] = free
        return self._given[name]


def _tags(training: Training) -> dict[str, str]:
    seeded = bool(training.settings.get("seeded_noise"))
    noise = "none: no privacy" if training.plan is None else SEEDED if seeded else "system"
    return {"fpfl.noise": noise, "fpfl.first_round": str(training.fresh)}


def _statement(run: Run) -> str:
    """The privacy statement, and what else should be known of a run, as text."""
    lines = [f"Note: {note}." for note in run.warnings]
    lines += [f"Stopped: {run.stopped}."] if run.stopped else []
    return "\n\n".join([*lines, *str(run.privacy or NO_PRIVACY).splitlines()])


def _missing(package: str, error: ImportError) -> NoReturn:
    raise ImportError(
        f"{package} is not installed, or cannot be imported ({error}): pip install 'fpfl[tracking]'"
    ) from error


class _Careful:
    """What was spent must not be lost because a server or a disk is: warn once and go on."""

    _what = ""
    _lost = False

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            if not self._lost:
                warnings.warn(
                    f"{self._what} ({type(error).__name__}: {error}); training goes on",
                    FpflWarning,
                    stacklevel=3,
                )
            self._lost = True


@register("tensorboard", "a folder to log to, for TensorBoard", takes_value=True)
class TensorBoardCallback(_Careful):
    """Logs every round's released figures for TensorBoard, and in the end the privacy statement.

    ``fpfl.train(..., callbacks=[fpfl.TensorBoardCallback("logs/one")])``. A run that is resumed
    goes on in the same folder; another run needs another one. A folder that cannot be written to
    is an error before the first round; later there is one warning, and training goes on.

    Parameters
    ----------
    folder
        Where the event files go.
    """

    _what = "TensorBoard's file cannot be written any more, and lacks what follows"

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            _missing("tensorboard", error)
        self.folder = Path(folder)
        self._make: Any = SummaryWriter
        self._writer: Any = None
        self._training: Training | None = None
        self._last: dict[str, float] = {}
        self._names = Names()

    def begin(self, training: Training) -> None:
        """Open the event file and write the settings."""
        self._training, self._names, self._last = training, Names(), {}
        self._lost = False
        # What an earlier part of the run wrote of rounds that it has lost is not shown.
        purge = training.fresh if training.fresh > 1 else None
        self._writer = self._make(str(self.folder), purge_step=purge)
        settings = json.dumps(training.settings, indent=1)
        tags = "\n".join(f"{name}: {value}" for name, value in _tags(training).items())
        self._writer.add_text("settings", f"```\n{settings}\n```", training.fresh - 1)
        self._writer.add_text("tags", tags, training.fresh - 1)

    def __call__(self, event: RoundEvent) -> None:
        """Write a round's figures."""
        if self._training is None:
            raise ValueError("TensorBoardCallback was not told what is trained: use fpfl.train")
        t = int(event.row["round"])
        if t < self._training.fresh:
            return  # written before the run was cut off
        self._last = scalars(event.row, self._training)
        if not self._lost:
            self._try(lambda: self._write(self._last, t))

    def end(self, run: Run) -> None:
        """Write the privacy statement and the settings' table, and close."""
        self._try(lambda: self._finish(run))

    def failed(self, error: BaseException) -> None:
        """Write that it failed, and close."""
        if self._writer is not None:
            # What an error says may be about data; what it is called is not.
            self._writer.add_text("failed", type(error).__name__)
            self._try(self._close)

    def _write(self, figures: dict[str, float], t: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(self._names[name], value, t)

    def _finish(self, run: Run) -> None:
        assert self._training is not None
        rounds = len(run.history)
        self._writer.add_text("privacy", _statement(run), rounds)
        settings = plain_settings(self._training.settings)
        table = {n: v if isinstance(v, bool | int | float) else str(v) for n, v in settings.items()}
        figures = (self._training.score, "gap", "averaged_gap", "epsilon_so_far")
        final = {f"final/{name}": self._last[name] for name in figures if name in self._last}
        self._writer.add_hparams(table, final, run_name=".", global_step=rounds)
        self._close()

    def _close(self) -> None:
        self._writer.close()
        self._writer = None


@register("mlflow", "an MLflow experiment to log to", takes_value=True)
class MLflowCallback(_Careful):
    """Logs every round's released figures to MLflow, with settings and the privacy statement.

    ``fpfl.train(..., callbacks=[fpfl.MLflowCallback("adult")])``. The tracking server is asked for
    the experiment at once: one that cannot be reached is an error before anything is spent. If it
    is lost later, training goes on, there is one warning, and all that is missing is sent in the
    end, if it is back by then. Every call of ``train`` is an MLflow run of its own, also one that
    resumes: the tag ``fpfl.first_round`` says where it begins.

    Parameters
    ----------
    experiment
        The experiment's name; it is made where it is not there.
    run_name
        The run's name; MLflow makes one up otherwise.
    tracking_uri
        Where MLflow keeps it; by default as MLflow is configured (``MLFLOW_TRACKING_URI``).
    """

    _what = (
        "MLflow cannot be reached any more, and what is missing is sent in the end, if it can be"
    )

    def __init__(
        self,
        experiment: str = "fpfl",
        run_name: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        try:
            from mlflow import MlflowClient, entities
        except ImportError as error:
            _missing("mlflow", error)
        self.experiment, self.run_name = experiment, run_name
        self.run_id: str | None = None
        self._entities: Any = entities
        self._where = tracking_uri or "as configured"
        with self._reached():
            self._client: Any = MlflowClient(tracking_uri=tracking_uri)
            known = self._client.get_experiment_by_name(experiment)
            self._experiment_id = (
                self._client.create_experiment(experiment) if known is None else known.experiment_id
            )
        self._training: Training | None = None
        self._names = Names()
        self._waiting: list[Any] = []
        self._sent_at = 0.0

    def begin(self, training: Training) -> None:
        """Make the MLflow run, with settings as parameters; an error here stops the training."""
        self._training, self._names, self._waiting = training, Names(), []
        self._lost, self._sent_at, self.run_id = False, time.monotonic(), None
        params, names = [], Names()
        for name, value in plain_settings(training.settings).items():
            params.append(self._entities.Param(names[name], str(value)[:_LONGEST]))
        with self._reached():
            made = self._client.create_run(
                self._experiment_id, run_name=self.run_name, tags=_tags(training)
            )
            self.run_id = made.info.run_id
            for start in range(0, len(params), _PARAMS):
                self._client.log_batch(self.run_id, params=params[start : start + _PARAMS])

    def __call__(self, event: RoundEvent) -> None:
        """Keep a round's figures, and send them with others."""
        if self._training is None:
            raise ValueError("MLflowCallback was not told what is trained: use fpfl.train")
        t, stamp = int(event.row["round"]), int(time.time() * 1000)
        if t < self._training.fresh:
            return  # logged before the run was cut off
        found = scalars(event.row, self._training).items()
        self._waiting += [
            self._entities.Metric(self._names[name], value, stamp, t) for name, value in found
        ]
        late = time.monotonic() - self._sent_at > _WAIT
        if not self._lost and (late or len(self._waiting) >= _BATCH):
            self._try(self._send)

    def end(self, run: Run) -> None:
        """Send what is left, the privacy statement and warnings, and end the MLflow run."""
        self._try(lambda: self._finish(run))

    def failed(self, error: BaseException) -> None:
        """Send what is left, and mark the MLflow run as failed, or as killed."""
        if self.run_id is not None:
            status = "FAILED" if isinstance(error, Exception) else "KILLED"
            self._try(lambda: self._close(status))

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Before anything is spent: whatever a store or a network raises, in words."""
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"MLflow ({self._where}) does not take the experiment {self.experiment!r}: "
                f"{error}. Check the tracking URI, e.g. sqlite:///mlflow.db or "
                "http://localhost:5000"
            ) from error

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self.run_id, metrics=self._waiting[:_BATCH])
            del self._waiting[:_BATCH]
        self._sent_at = time.monotonic()

    def _finish(self, run: Run) -> None:
        self._send()
        self._client.log_text(self.run_id, f"{_statement(run)}\n", "privacy.txt")
        about = {
            "privacy": None if run.privacy is None else run.privacy.as_dict(),
            "selected": run.selected,
            "stopped": run.stopped,
            "warnings": list(run.warnings),
        }
        self._client.log_dict(self.run_id, about, "result.json")
        self._client.set_tag(self.run_id, "fpfl.privacy", _statement(run)[:_LONGEST])
        self._close("FINISHED")

    def _close(self, status: str) -> None:
        self._send()
        self._client.set_terminated(self.run_id, status)
