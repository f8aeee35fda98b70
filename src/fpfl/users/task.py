"""The task: from a model's outputs to losses, scores and hard predictions, sample by sample."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from fpfl.data.schema import Schema
from fpfl.users.precision import computing


def loss(output: Tensor, labels: Tensor, schema: Schema) -> Tensor:
    """ℓ(z, w) of every sample: cross-entropy of logits, or half the squared error.

    A regression model's output o is in units of the declared range, ŷ = low + (high − low) o (or of
    what was measured in it, `Schema.label_unit`), and so is its error: learning rates and clip
    bounds mean the same whatever the label's unit. Where class weights are declared, a sample's
    loss is multiplied by that of its class.
    """
    if schema.task == "binary":
        plain = functional.binary_cross_entropy_with_logits(
            output, labels.to(output.dtype), reduction="none"
        )
        return _weighed(plain, labels, schema)
    if schema.task == "multiclass":
        flat = functional.cross_entropy(
            output.reshape(-1, output.shape[-1]), labels.reshape(-1), reduction="none"
        )
        return _weighed(flat.reshape(labels.shape), labels, schema)
    low, span = _unit(schema)
    return 0.5 * (output - (labels - low) / span) ** 2


def loss_gradient(output: Tensor, labels: Tensor, schema: Schema) -> Tensor:
    """∂ℓ/∂o of every sample: σ(o) − y, softmax(o) − e_y, or the error itself."""
    if schema.task == "binary":
        return _weighed(output.sigmoid() - labels, labels, schema)
    if schema.task == "multiclass":
        gradient = output.softmax(dim=-1)
        gradient.scatter_add_(-1, labels.unsqueeze(-1), gradient.new_full((*labels.shape, 1), -1.0))
        return _weighed(gradient, labels.unsqueeze(-1), schema)
    low, span = _unit(schema)
    return output - (labels - low) / span


def _weighed(values: Tensor, labels: Tensor, schema: Schema) -> Tensor:
    """Every sample's values times the weight of its class."""
    if schema.class_weights is None:
        return values
    # Class by class, and without a table on the device: bits are a sample's own.
    weights = torch.zeros_like(labels, dtype=values.dtype)
    for k, weight in enumerate(schema.class_weights):
        weights = weights.masked_fill(labels == k, weight)
    return values * weights


def scores(output: Tensor, schema: Schema) -> Tensor:
    """Soft predictions: probabilities of shape (..., classes), or numbers in the label's unit."""
    if schema.task == "binary":
        positive = output.sigmoid()
        return torch.stack([1.0 - positive, positive], dim=-1)
    if schema.task == "multiclass":
        return output.softmax(dim=-1)
    low, span = _unit(schema)
    return low + span * output


def score_gradient(soft: Tensor, gradient: Tensor, schema: Schema) -> Tensor:
    """∂f/∂o of every sample, given its scores s and ∂f/∂s: the chain rule through `scores`."""
    if schema.task == "binary":
        return (gradient[..., 1] - gradient[..., 0]) * soft[..., 0] * soft[..., 1]
    if schema.task == "multiclass":
        return soft * (gradient - (soft * gradient).sum(dim=-1, keepdim=True))
    return gradient * _unit(schema)[1]


def predictions(output: Tensor, schema: Schema) -> Tensor:
    """Hard predictions: the likeliest class, or the number clamped to the declared range."""
    if schema.task == "binary":
        return (output > 0).to(torch.int64)
    if schema.task == "multiclass":
        return output.argmax(dim=-1)
    low, span = _range(schema)
    return scores(output, schema).clamp(low, low + span)


def performance(output: Tensor, labels: Tensor, schema: Schema) -> Tensor:
    """What model selection counts, in [0, 1]: a hit, or 1 − ((ŷ − y)/range)² in regression."""
    predicted = predictions(output, schema)
    if schema.classes is not None:
        return (predicted == labels).float()
    return 1.0 - ((predicted - labels) / _range(schema)[1]) ** 2


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Every sample's part of the confusion table, row by row: 1 where it is counted, (n, C²)."""
    places = torch.arange(classes * classes, device=labels.device)
    return ((labels * classes + predicted).unsqueeze(-1) == places).float()


def flatten_output(output: Tensor, schema: Schema) -> Tensor:
    """Drop the last dimension of size one of a single-output model: (n, 1) becomes (n,)."""
    if schema.task != "multiclass" and output.ndim > 1 and output.shape[-1] == 1:
        return output.squeeze(-1)
    return output


def _unit(schema: Schema) -> tuple[float, float]:
    """(c, w), where an output o stands for c + w o."""
    return schema.label_unit or _range(schema)


def _range(schema: Schema) -> tuple[float, float]:
    assert schema.label_range is not None  # the schema checked it
    low, high = schema.label_range
    return low, high - low


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
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"{name!r} is {value.dtype}: clip bounds and counts are not kept at that "
                "precision. Use model.float()"
            )
    parameter = next(model.parameters(), torch.zeros(()))
    with computing("float32", parameter.device):  # what was set for all of torch would show here
        _probe(model, schema, dtype)


def _probe(model: nn.Module, schema: Schema, dtype: torch.dtype) -> None:
    """Call the model on made-up inputs, in both modes, and look at what comes back."""
    parameter = next(model.parameters(), torch.zeros(()))
    generator = torch.Generator().manual_seed(0)
    inputs = 5.0 * torch.randn(64, *schema.shape, generator=generator)
    if not dtype.is_floating_point:
        inputs = torch.zeros(64, *schema.shape)  # the one index that every embedding has
    inputs = inputs.to(parameter.device, dtype)
    was_training = model.training
    state = {name: value.detach().clone() for name, value in model.named_buffers()}
    rng_state = torch.get_rng_state()  # dropout draws from it
    try:
        for training in (True, False):
            model.train(training)
            output, alone, other = (
                _call(model, piece, schema) for piece in (inputs, inputs[:1], inputs.flip(0)[-2:])
            )
            _check_output(output, schema)
            # The last of the flipped pair is the first sample, in other company.
            first = output[0], alone.reshape(-1, *output.shape[1:])[0], other[-1]
            same = torch.allclose(first[0], first[1], 1e-3, 1e-4, equal_nan=True)
            if not (same and torch.allclose(first[0], first[2], 1e-3, 1e-4, equal_nan=True)):
                if training and has_dropout(model):
                    continue  # masks differ with the batch; the other mode decides
                raise ValueError(
                    "the model mixes samples: its output for one sample changes with the others "
                    "in the batch. Use layers that treat samples one by one"
                )
        if dtype.is_floating_point:
            _check_logits(_call(model, 1e6 * inputs, schema), schema)
    finally:
        torch.set_rng_state(rng_state)
        model.train(was_training)
        written = [n for n, v in model.named_buffers() if not torch.equal(v, state[n])]
        for name, value in model.named_buffers():
            value.copy_(state[name])
    if written:
        raise ValueError(
            f"the model writes its buffers {written} when it is called: what it learns there "
            "bypasses clipping and noise. Use a model that keeps its state in its parameters"
        )


def _call(model: nn.Module, inputs: Tensor, schema: Schema) -> Tensor:
    try:
        with torch.no_grad():
            output = model(inputs)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(
            f"the model does not take {inputs.dtype} inputs of shape "
            f"({len(inputs)}, {', '.join(map(str, schema.shape))}), as the data has (cast integers "
            f"to float32 for layers other than embeddings): {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(output, Tensor):
        raise ValueError(f"the model returns {type(output).__name__}; expected one tensor")
    if output.ndim == 0 or len(output) != len(inputs):
        raise ValueError(
            f"the model returns shape {tuple(output.shape)} for {len(inputs)} samples; expected "
            "one row for each (a bare .squeeze() drops the batch of one: use .squeeze(-1))"
        )
    return output


def _check_output(output: Tensor, schema: Schema) -> None:
    shape = tuple(output.shape[1:])
    wanted = [(schema.classes,)] if schema.task == "multiclass" else [(), (1,)]
    if shape not in wanted:
        expected = " or ".join(str(("n", *each)) for each in wanted)
        hint = " (one logit for two classes)" if schema.task == "binary" else ""
        raise ValueError(
            f"the model's output has shape {('n', *shape)}; the schema ({schema.task}) expects "
            f"{expected}{hint}"
        )


def _check_logits(output: Tensor, schema: Schema) -> None:
    """Refuse probabilities: for huge inputs they are 0s and 1s, which logits never are."""
    if schema.classes is None or not bool(output.isfinite().all()):
        return
    low, high = output < 1e-3, output > 1.0 - 1e-3
    saturated = bool(((output >= 0) & (output <= 1) & (low | high)).all())
    if saturated and bool(low.any()) and bool(high.any()):
        raise ValueError(
            "the model returns probabilities (0s and 1s for huge inputs); expected logits. Remove "
            "the final sigmoid or softmax: loss and rates apply it"
        )


def has_dropout(model: nn.Module) -> bool:
    """Whether a model has active dropout, as a layer or inside one."""
    for layer in model.modules():
        # Dropout layers call it p; recurrent and attention layers have it inside.
        inside = getattr(layer, "dropout", 0.0)
        chance = layer.p if isinstance(layer, nn.modules.dropout._DropoutNd) else inside
        if isinstance(chance, float) and chance > 0.0:
            return True
    return False
