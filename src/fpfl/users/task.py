"""The task: from a model's outputs to losses, scores and hard predictions, sample by sample."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from fpfl.data.schema import Schema


def loss(output: Tensor, labels: Tensor, schema: Schema) -> Tensor:
    """ℓ(z, w) of every sample: cross-entropy of logits, or half the squared error over the range.

    Regression's error is divided by the declared range, so that its gradients have the same
    scale (and clip bounds the same meaning) whatever the label's unit.
    """
    if schema.task == "binary":
        return functional.binary_cross_entropy_with_logits(
            output, labels.to(output.dtype), reduction="none"
        )
    if schema.task == "multiclass":
        flat = functional.cross_entropy(
            output.reshape(-1, output.shape[-1]), labels.reshape(-1), reduction="none"
        )
        return flat.reshape(labels.shape)
    return 0.5 * ((output - labels) / _span(schema)) ** 2


def scores(output: Tensor, schema: Schema) -> Tensor:
    """Soft predictions: probabilities of shape (..., classes), or real numbers (...)."""
    if schema.task == "binary":
        positive = output.sigmoid()
        return torch.stack([1.0 - positive, positive], dim=-1)
    return output.softmax(dim=-1) if schema.task == "multiclass" else output


def predictions(output: Tensor, schema: Schema) -> Tensor:
    """Hard predictions: the likeliest class, or the number clamped to the declared range."""
    if schema.task == "binary":
        return (output > 0).to(torch.int64)
    if schema.task == "multiclass":
        return output.argmax(dim=-1)
    assert schema.label_range is not None  # the schema checked it
    return output.clamp(*schema.label_range)


def performance(output: Tensor, labels: Tensor, schema: Schema) -> Tensor:
    """What model selection counts, in [0, 1]: a hit, or 1 − ((ŷ − y)/range)² in regression."""
    predicted = predictions(output, schema)
    if schema.classes is not None:
        return (predicted == labels).float()
    return 1.0 - ((predicted - labels) / _span(schema)) ** 2


def flatten_output(output: Tensor, schema: Schema) -> Tensor:
    """Drop the last dimension of size one of a single-output model: (n, 1) becomes (n,)."""
    if schema.task != "multiclass" and output.ndim > 1 and output.shape[-1] == 1:
        return output.squeeze(-1)
    return output


def _span(schema: Schema) -> float:
    assert schema.label_range is not None  # the schema checked it
    low, high = schema.label_range
    return high - low


def check_model(model: nn.Module, schema: Schema, dtype: torch.dtype) -> None:
    """Refuse models that cannot be trained here, naming the layer and what to use instead.

    Layers that mix samples make a user's statistics depend on who else is in the batch; a final
    Sigmoid or Softmax would be applied twice. The probe below uses made-up inputs, no data.
    """
    for name, layer in model.named_modules():
        where = f"layer {name!r} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{where} mixes samples: one sample's statistics would depend on the others in "
                "the batch. Use nn.GroupNorm or nn.LayerNorm instead"
            )
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
            raise ValueError(
                f"{where} keeps running statistics of private data outside v. Use "
                "track_running_stats=False or nn.GroupNorm"
            )
        if isinstance(layer, nn.Embedding) and layer.sparse:
            raise ValueError(f"{where} has sparse gradients; construct it with sparse=False")
    if isinstance(model, nn.Sequential) and len(model):
        last = model[-1]
        if isinstance(last, nn.Sigmoid | nn.Softmax | nn.LogSoftmax):
            raise ValueError(
                f"the model ends in {type(last).__name__}; expected logits. Remove that layer: "
                "loss and rates apply it themselves"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameters; give one that has")
    if not dtype.is_floating_point:
        return  # integers index an embedding of unknown size: nothing can be made up safely
    _probe(model, schema, dtype)


def _probe(model: nn.Module, schema: Schema, dtype: torch.dtype) -> None:
    parameter = next(model.parameters())
    device = parameter.device
    was_training = model.training
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(3, *schema.shape, generator=generator).to(device, dtype)
    changed = inputs.clone()
    changed[1:] = torch.rand(2, *schema.shape, generator=generator).to(device, dtype)
    model.eval()
    try:
        with torch.no_grad():
            output, other = model(inputs), model(changed)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(
            f"the model does not take inputs of shape (n, {', '.join(map(str, schema.shape))}), "
            f"as the schema declares: {str(error).splitlines()[0]}"
        ) from error
    finally:
        model.train(was_training)
    if not isinstance(output, Tensor):
        raise ValueError(f"the model returns {type(output).__name__}; expected one tensor")
    classes = schema.classes
    wanted = [(3, classes)] if schema.task == "multiclass" else [(3,), (3, 1)]
    if tuple(output.shape) not in wanted:
        expected = " or ".join(str(("n", *shape[1:])) for shape in wanted)
        hint = " (one logit for two classes)" if schema.task == "binary" else ""
        raise ValueError(
            f"the model's output has shape ('n', {', '.join(map(str, output.shape[1:]))}); the "
            f"schema ({schema.task}) expects {expected}{hint}"
        )
    if not torch.allclose(output[0], other[0], rtol=1e-4, atol=1e-5, equal_nan=True):
        raise ValueError(
            "the model mixes samples: its output for one sample changes with the others in the "
            "batch. Use layers that treat samples one by one"
        )
