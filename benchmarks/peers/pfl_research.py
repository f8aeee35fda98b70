"""FPFL as an algorithm of pfl-research: its loop, sampler, aggregation and Gaussian mechanism.

Run in the peer's environment, from the repository's root:
``.venv-pfl/bin/python -m benchmarks.peers.pfl_research --workload FILE.npz --vector paper``.
"""

from __future__ import annotations

import importlib.metadata
import warnings

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import FederatedNNAlgorithm, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.context import CentralContext
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from pfl.stats import MappedVectorStatistics
from torch import Tensor, nn

from benchmarks.peers.fpfl_round import Server, Users
from benchmarks.peers.measuring import Clock, arguments, check, own_peak_memory


class Fpfl(FederatedNNAlgorithm):
    """One vector from every user, then the multipliers and an SGD step of the central optimizer."""

    def __init__(self, users: Users):
        super().__init__()
        self.users = users
        self.server = Server(users)
        self.last_sum: Tensor | None = None

    def simulate_one_user(
        self, model: PyTorchModel, user_dataset: Dataset, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """v of a user.

        The parent's method saves and restores the model's parameters around local training. There
        is none here, so this does not. The statistics are one vector, not one for each of its
        blocks: clipping, adding and noise then are one operation each.
        """
        return MappedVectorStatistics({"v": self.users.vector(*user_dataset.raw_data)}), Metrics()

    def train_one_user(self, *arguments: object) -> tuple[MappedVectorStatistics, Metrics]:
        """Not used: see simulate_one_user."""
        raise NotImplementedError

    def process_aggregated_statistics(
        self,
        central_context: CentralContext,
        aggregate_metrics: Metrics,
        model: PyTorchModel,
        statistics: MappedVectorStatistics,
    ) -> tuple[PyTorchModel, Metrics]:
        """The server's part, from the clipped and noisy sum."""
        self.last_sum = statistics["v"]
        step = -self.server.direction(self.last_sum)
        variables = model.variable_map
        pieces = step.split([variable.numel() for variable in variables.values()])
        update = {
            name: piece.reshape(variable.shape)
            for (name, variable), piece in zip(variables.items(), pieces, strict=True)
        }
        return model.apply_model_update(MappedVectorStatistics(update))


class FpflInTheFrameworksFlow(Fpfl):
    """The same through the framework's own steps for a user, block by block.

    What its documentation shows: the parent keeps the model's parameters around ``train_one_user``
    and the statistics are named, so that each block is clipped, added and noised by name.
    """

    def simulate_one_user(
        self, model: PyTorchModel, user_dataset: Dataset, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """The framework's."""
        return FederatedNNAlgorithm.simulate_one_user(self, model, user_dataset, central_context)

    def train_one_user(
        self,
        initial_model_state: MappedVectorStatistics,
        model: PyTorchModel,
        user_dataset: Dataset,
        central_context: CentralContext,
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """v of a user, its blocks by name."""
        blocks = self.users.vector(*user_dataset.raw_data).split(list(self.users.sizes.values()))
        named = dict(zip(self.users.sizes, blocks, strict=True))
        return MappedVectorStatistics({n: b for n, b in named.items() if b.numel()}), Metrics()

    def process_aggregated_statistics(
        self,
        central_context: CentralContext,
        aggregate_metrics: Metrics,
        model: PyTorchModel,
        statistics: MappedVectorStatistics,
    ) -> tuple[PyTorchModel, Metrics]:
        """The server's part, from the blocks put together."""
        whole = torch.cat([statistics[name] for name in self.users.sizes if name in statistics])
        return super().process_aggregated_statistics(
            central_context, aggregate_metrics, model, MappedVectorStatistics({"v": whole})
        )


class Stop(TrainingProcessCallback):
    """Ends the training when the clock says so."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """A round has ended."""
        return self.clock.tick(), Metrics()


def run(
    users: Users, rounds: int, noise_multiplier: float, clock: Clock, *, tuned: bool
) -> tuple[Tensor, list]:
    """Train; return the last round's noisy sum, and everybody who was asked, in order."""
    work, asked = users.work, []
    sampler = get_user_sampler("minimize_reuse", list(range(work.population)))

    def dataset_of(user: int) -> PyTorchTensorDataset:
        asked.append(user)
        return PyTorchTensorDataset(users.samples(user), user_id=str(user))

    data = FederatedDataset(dataset_of, sampler)
    mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(work.clip, noise_multiplier))
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[mechanism])
    # What PyTorchModel asks of a module, and a round without evaluation never calls.
    users.model.loss = users.model.metrics = nn.Module.forward
    model = PyTorchModel(
        users.model,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(users.model.parameters(), lr=0.1),
    )
    # The first round would evaluate, which fails for users without samples.
    model.evaluate = lambda *arguments, **options: Metrics()
    algorithm = Fpfl(users) if tuned else FpflInTheFrameworksFlow(users)
    algorithm.run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=work.cohort,
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=None),
        callbacks=[Stop(clock)],
        send_metrics_to_platform=False,
    )
    return algorithm.last_sum, asked


def main() -> None:
    """Measure or check."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--tuned", action="store_true", help="skip the framework's own user flow")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    np.random.seed(0)  # noqa: NPY002 - what pfl-research seeds everything from
    # It makes tensors of tensors when it adds noise, and torch says so every time.
    warnings.filterwarnings("ignore", message="To copy construct from a tensor")
    users = Users(options.workload, options.vector, exact=options.check)
    clock = Clock(options.seconds)
    if options.check:
        before = [p.detach().clone() for p in users.parameters]
        found, asked = run(users, 1, 0.0, clock, tuned=options.tuned)
        for parameter, value in zip(users.parameters, before, strict=True):
            parameter.data.copy_(value)
        check(users, asked, found)
        return
    run(users, 10**9, users.work.noise_multiplier, clock, tuned=options.tuned)
    version = f"pfl {importlib.metadata.version('pfl')}"
    clock.report(users.work.cohort, own_peak_memory(), version)


if __name__ == "__main__":
    main()
