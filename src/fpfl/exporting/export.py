"""Export: files are made in memory, opened again, compared, and only then put in their place.

A file must answer as the model does, on made-up inputs of two batch sizes.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fpfl.data.schema import Schema, scale_by_ranges
from fpfl.exporting.predictor import Predictor, Ranges
from fpfl.store.files import explained, write_whole
from fpfl.users import task

BATCHES = (1, 7)
TOLERANCE = 1e-4
"""How far a score of a file may be from the model's, in units of 1 + its size."""

Answers = tuple[NDArray[Any], NDArray[Any]]


def verify(
    answers: Callable[[Tensor], Answers],
    model: nn.Module,
    schema: Schema,
    ranges: Ranges | None,
    tokens: int | None,
    target: Path,
) -> None:
    """Refuse a file that does not answer as the model does; the model is asked without Predictor.

    Classes may differ where the two best scores are closer than the tolerance.
    """
    plain = copy.deepcopy(model).cpu().eval()
    for batch in BATCHES:
        x = made_up(schema, ranges, tokens, batch, input_dtype(model))
        inputs = x if ranges is None else _scaled_columns(x, ranges)
        with torch.no_grad():
            output = task.flatten_output(plain(inputs), schema)
            wanted = arrays((task.scores(output, schema), task.predictions(output, schema)))
        found = answers(x)
        if not _agree(wanted, found, schema):
            worst = _distance(wanted[0], found[0])
            raise ValueError(
                f"the exported model does not answer as the model does: scores of a batch of "
                f"{batch} differ by up to {worst:.3g}. {target} was not written; the model has "
                "something that its export does not follow, such as a branch on the data"
            )


def _agree(wanted: Answers, found: Answers, schema: Schema) -> bool:
    scores, predictions = wanted
    if found[0].shape != scores.shape or found[1].shape != predictions.shape:
        return False
    if not np.allclose(found[0], scores, rtol=TOLERANCE, atol=TOLERANCE):
        return False
    if schema.classes is None:
        return np.allclose(found[1], predictions, rtol=TOLERANCE, atol=TOLERANCE)
    best = np.sort(scores, axis=-1)
    tie = best[..., -1] - best[..., -2] <= 2.0 * TOLERANCE
    return bool(((found[1] == predictions) | tie).all())


def _distance(wanted: NDArray[Any], found: NDArray[Any]) -> float:
    if wanted.shape != found.shape:
        return math.inf
    return float(np.abs(np.asarray(wanted, dtype=np.float64) - found).max(initial=0.0))


def made_up(
    schema: Schema, ranges: Ranges | None, tokens: int | None, batch: int, dtype: torch.dtype
) -> Tensor:
    """Inputs that are made up from public numbers; with ranges, some lie beyond them."""
    generator = torch.Generator().manual_seed(batch)
    if tokens is not None:
        if tokens < 1:
            raise ValueError(f"tokens is {tokens}; expected the size of a vocabulary")
        return torch.randint(tokens, (batch, *schema.shape), generator=generator)
    x = torch.randn(batch, *schema.shape, generator=generator, dtype=torch.float64)
    if ranges is not None:
        ends = np.array([(-1.0, 1.0) if each is None else each for each in ranges])
        low, high = torch.from_numpy(ends.T.copy())
        x = (low + high) / 2.0 + x * (high - low) / 3.0
    return x.to(dtype)


def _scaled_columns(x: Tensor, ranges: Ranges) -> Tensor:
    """The same scaling as Predictor's, by the function that the training data went through."""
    columns = [
        x.numpy()[:, number : number + 1].astype(np.float64)
        if each is None
        else scale_by_ranges(x.numpy()[:, number : number + 1], [each])
        for number, each in enumerate(ranges)
    ]
    return torch.from_numpy(np.concatenate(columns, axis=1)).to(x.dtype)


def arrays(answers: Any) -> Answers:
    """Scores and predictions, out of torch."""
    scores, predictions = answers
    return scores.detach().numpy(), predictions.detach().numpy()


def input_dtype(model: nn.Module) -> torch.dtype:
    """The type that a model takes its features in, where they are no tokens."""
    return next(model.parameters(), torch.zeros(())).dtype


ABOUT = "fpfl.json"
"""The name of the extra file that a .pt2 carries."""

LARGEST = 2**31
"""Bytes of an ONNX file at most: its format counts with 32 bits."""


def export_torch(
    model: nn.Module,
    schema: Schema,
    path: str | Path,
    *,
    ranges: Ranges | None = None,
    tokens: int | None = None,
    about: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model as a ``.pt2`` file (`torch.export.save`), for any batch size.

    ``torch.export.load(path).module()(features)`` gives (scores, predictions): see `Predictor`. The
    extra file ``fpfl.json`` in it has `metadata`.

    Parameters
    ----------
    model, schema
        ``run.model``, and the schema of the data that it was trained on.
    path
        The new file.
    ranges
        For tables: scale raw columns by these public ranges inside the file
        (``schema.feature_ranges`` where all columns were scaled by them; None for a column that
        was not). Without it the file takes features as the model was trained on.
    tokens
        For text: the number of token ids, 0 ... tokens − 1; features are int64 then.
    about
        What to say of the model in the file's metadata: `fpfl.run_facts`.
    overwrite
        Replace a file that is there.
    """
    target = _target(path, ".pt2", overwrite)
    predictor = Predictor(model, schema, ranges)
    program = _program(predictor, tokens)
    content = io.BytesIO()
    text = json.dumps(metadata(schema, ranges, tokens, about), indent=1)
    with _quiet():
        torch.export.save(program, content, extra_files={ABOUT: text})
        opened = torch.export.load(io.BytesIO(content.getvalue())).module()
    verify(lambda x: arrays(opened(x)), model, schema, ranges, tokens, target)
    write_whole(target, content.getvalue())
    return target


def export_onnx(
    model: nn.Module,
    schema: Schema,
    path: str | Path,
    *,
    ranges: Ranges | None = None,
    tokens: int | None = None,
    about: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model as an ``.onnx`` file, for any batch size; needs the extra ``export``.

    Its input is ``features``, its outputs are ``scores`` and ``predictions``: see `Predictor`. Each
    item of `metadata` is one of its ``metadata_props``, with ``fpfl.`` before its name. It is
    checked by onnx, and run by onnxruntime where that is installed, else by onnx's own (slow)
    evaluator.

    Parameters
    ----------
    model, schema, path, ranges, tokens, about, overwrite
        As in `export_torch`.
    """
    onnx = needed("onnx")
    needed("onnxscript")
    target = _target(path, ".onnx", overwrite)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size >= LARGEST:
        raise ValueError(
            f"the model has {size / 1e9:.1f} GB of parameters, and an ONNX file holds "
            f"{LARGEST / 1e9:.1f}; use export_torch"
        )
    predictor = Predictor(model, schema, ranges)
    with _quiet():
        made = torch.onnx.export(
            _program(predictor, tokens),
            (),
            dynamo=True,
            verbose=False,
            input_names=["features"],
            output_names=["scores", "predictions"],
            dynamic_shapes=({0: "batch"},),  # names the axis, which the program has already
        )
    assert made is not None  # it is with dynamo=True
    proto = made.model_proto
    for key, value in metadata(schema, ranges, tokens, about).items():
        words = value if isinstance(value, str) else json.dumps(value)
        proto.metadata_props.add(key=f"fpfl.{key}", value=words)
    onnx.checker.check_model(proto, full_check=True)
    content = proto.SerializeToString()
    verify(_onnx_answers(content), model, schema, ranges, tokens, target)
    write_whole(target, content)
    return target


def metadata(
    schema: Schema,
    ranges: Ranges | None,
    tokens: int | None,
    about: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What an exported file says of itself: plain values, all of them public."""
    scaled = "as the model was trained on" if ranges is None else "raw, scaled inside"
    return {
        "fpfl_version": import_module("fpfl").__version__,
        "task": schema.task,
        "classes": schema.classes,
        "class_names": schema.class_names,
        "positive": schema.class_names[1] if schema.class_names and schema.classes == 2 else None,
        "label_range": schema.label_range,
        "features": f"token ids below {tokens}" if tokens is not None else scaled,
        "ranges": None if ranges is None else list(ranges),
        "schema": schema.as_dict(),
        **(about or {}),
    }


def _program(predictor: Predictor, tokens: int | None) -> torch.export.ExportedProgram:
    example = made_up(predictor.schema, predictor.ranges, tokens, 3, input_dtype(predictor.model))
    batch = torch.export.Dim("batch")
    with _quiet():
        try:
            with torch.no_grad():
                predictor(example)
            return torch.export.export(predictor, (example,), dynamic_shapes=({0: batch},))
        except Exception as error:  # the model's own code runs: there is no telling what it raises
            hint = "" if tokens is not None else " (for a text model give tokens=, its vocabulary)"
            raise ValueError(
                f"the model cannot be exported for {example.dtype} features of shape "
                f"{tuple(predictor.schema.shape)}{hint}: {_first_line(error)}"
            ) from error


def _onnx_answers(content: bytes) -> Callable[[Tensor], Answers]:
    try:
        runtime = import_module("onnxruntime")
    except ImportError:
        evaluator: Any = needed("onnx.reference").ReferenceEvaluator(content)
    else:
        evaluator = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def answers(x: Tensor) -> Answers:
        scores, predictions = evaluator.run(None, {"features": x.numpy()})
        return np.asarray(scores), np.asarray(predictions)

    return answers


def _target(path: str | Path, ending: str, overwrite: bool) -> Path:
    target = Path(path)
    if target.suffix != ending:
        raise ValueError(f"the file is called {target.name!r}; its name must end in {ending}")
    if target.exists() and not overwrite:
        raise ValueError(
            f"{target} is there already; name another, or replace it (overwrite=True; on the "
            "command line --force)"
        )
    with explained(target.parent, "Nothing was exported; name a folder that can be written to"):
        target.parent.mkdir(parents=True, exist_ok=True)
    return target


def needed(package: str) -> Any:
    """A package of the extra, or an error that names it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"an export to ONNX needs {package}, which is not installed: pip install 'fpfl[export]'"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says to its own developers while it exports."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
