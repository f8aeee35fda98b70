r"""UserStatistics of Algorithm 1, as the paper writes it: one user, one gradient after the other.

    v^k = [∇L(d^k, w), F(d'^k_a, w), ∇F(d'^k_a, w), n'^k_a  for every rate and group a]

(section 3.2, and Algorithm 1 in appendix A). d'^k are the user's samples that the rate's condition
picks, d'^k_a those of group a among them. F is counted with the true f, and its gradient is that of
the surrogate (appendix A.1). Nothing here is fast, and nothing is used in training: it is what
every fast way (`fpfl.users.passes`) is tested against, and where to begin reading.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fpfl.data.federated import FederatedDataset
from fpfl.fairness.constraints import Constraint
from fpfl.users import task
from fpfl.users.flat import FlatModel


def user_statistics(
    k: int, w: Tensor, model: FlatModel, data: FederatedDataset, constraint: Constraint | None
) -> dict[str, Tensor]:
    """v^k in blocks: the paper's, the whole's own F, ∇F and n', and what model selection needs.

    That is hits and misses and, of a classification, the confusion table: a layout has one of them.

    A user without samples sends zero.
    """
    d_k = slice(*data.offsets[k : k + 2].tolist())
    x, y, attributes = data.features[d_k], data.labels[d_k], data.attributes[d_k]
    if not len(y):
        return {}
    w = w.clone().requires_grad_()
    output = task.flatten_output(model(w, x), data.schema)
    scores, predictions = task.scores(output, data.schema), task.predictions(output, data.schema)

    def gradient(total: Tensor) -> Tensor:
        return torch.autograd.grad(total, w, retain_graph=True)[0]

    hits = task.performance(output.detach(), y, data.schema).sum()
    v = {
        "loss_gradient": gradient(task.loss(output, y, data.schema).sum()),
        "hits": hits,
        "misses": len(y) - hits,
    }
    C = data.schema.classes
    if C is not None:
        table = torch.zeros(C, C, device=w.device)
        for true, predicted in zip(y, predictions, strict=True):
            table[true, predicted] += 1
        v["table"] = table
    if constraint is None:
        return v
    member = constraint.bind(data.schema.attributes).membership(attributes)
    F, grad_F, n = [], [], []
    for rate in constraint.rates:
        in_d = rate.condition(y)
        f, surrogate = rate.evaluate(predictions, y), rate.surrogate(scores, y)
        # The groups, and as the last one everybody.
        for d_a in [*(in_d & a for a in member.T), in_d]:
            F.append(f[d_a].sum())
            grad_F.append(gradient(surrogate[d_a].sum()))
            n.append(d_a.sum())
    shape = len(constraint.rates), member.shape[1] + 1
    for name, values in (("F", F), ("F_gradient", grad_F), ("n", n)):
        block = torch.stack(values).reshape(*shape, -1)
        v[name], v[f"overall_{name}"] = block[:, :-1], block[:, -1]
    return v
