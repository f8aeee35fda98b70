# %% [markdown]
# # What the server sees: reading noise
#
# A server of this library never sees a user's vector, nor a sum without noise. Everything it
# does, and everything a report shows, comes from noisy totals. This page puts the totals of a run
# beside the truth, which only a simulation can know, to learn how far to trust them.

# %%
import os
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import fpfl
from fpfl.experiments.demo import COLOURS
from fpfl.training.run import evaluate_vector
from fpfl.users.flat import FlatModel

QUICK = os.environ.get("FPFL_QUICK") == "1"  # the tests': a few rounds, to see that it runs
PICTURES = Path(os.environ.get("FPFL_PICTURES", "."))
ROUNDS, LOOK_EVERY = (12, 4) if QUICK else (800, 20)
warnings.simplefilter("ignore", fpfl.FpflWarning)

people = fpfl.load_adult("train").partition(mean=2, seed=0)
parity = fpfl.fnr_parity("sex", tolerance=0.02)
WOMEN = "sex=Female"

# %% [markdown]
# A callback is called after each round with what was released. This one also computes the true
# rate of the model that the round *measured*: v_t is computed at w_{t−1}, the model that was
# broadcast.


# %%
class Watch:
    """Released and true rates of a group, round by round; true: simulation only."""

    def __init__(self, model):
        self.flat = FlatModel.of(model)
        self.before = None
        self.released, self.true, self.counts = [], [], []

    def __call__(self, event):
        t = event.row["round"]
        self.released.append(event.row["groups"]["FNR"][WOMEN])
        self.counts.append(event.row["counts"]["FNR"][WOMEN])
        if self.before is not None and t % LOOK_EVERY == 0:
            seen = evaluate_vector(self.flat, self.before, people, bootstrap=0)
            self.true.append((t, seen.rates["FNR"][WOMEN]))
        self.before = event.w


def watched(cohort: int, epsilon: float) -> tuple[fpfl.Run, Watch]:
    """Train with FPFL-1G, and watch."""
    found = fpfl.suggest(
        people.schema,
        parity,
        population=people.population,
        cohort=cohort,
        epsilon=epsilon,
        rounds=ROUNDS,
    )
    model = fpfl.mlp(people.schema.shape[0], seed=0)
    watch = Watch(model)
    run = fpfl.train(
        model,
        people,
        constraint=parity,
        seed=0,
        noise_seed=0,
        callbacks=[watch],
        **found.arguments(),
    )
    return run, watch


runs = {cohort: watched(cohort, 2.0) for cohort in (200, 1000)}

# %% [markdown]
# ## How large is the noise?
#
# The noise on every number of a block is the same, and public: it is in the privacy statement.
# What differs is the signal it lies on. Of a cohort of 200 users some 15 are women with a high
# income.

# %%
for cohort, (run, watch) in runs.items():
    noise = {block.name: block.noise_stddev for block in run.privacy.blocks}
    n = np.mean([count for count in watch.counts if count is not None])
    s = noise["counts"]
    print(f"m = {cohort}: noise of a count {s:.1f}, women with a high income in a cohort {n:.0f}:")
    alone = 0.5 / n**0.5
    print(
        f"  one round's FNR is off by about {s / n:.3f} from noise, {alone:.3f} from who was drawn"
    )
    parameters = sum(p.numel() for p in run.model.parameters())
    length = noise["gradients"] * parameters**0.5
    norm = np.mean([row["gradient_norm"] for row in run.history])
    print(f"  the gradient's noise has the length {length:.0f}, the released sum {norm:.0f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for axis, (cohort, (_, watch)) in zip(axes, runs.items(), strict=True):
    t = np.arange(1, len(watch.released) + 1)
    released = np.array([np.nan if r is None else r for r in watch.released], dtype=float)
    axis.plot(t, released, ".", ms=3.5, color="#999999", label="released, one round")
    counts = np.where(np.isnan(released), 0.0, watch.counts)
    F, n, averaged = 0.0, 0.0, []
    for rate, count in zip(np.nan_to_num(released), counts, strict=True):
        F, n = 0.95 * F + rate * count, 0.95 * n + count
        averaged.append(F / n)
    axis.plot(t, averaged, color=COLOURS[1], lw=1.8, label="from averaged counts")
    axis.plot(*zip(*watch.true, strict=True), color=COLOURS[0], lw=1.8, label="true")
    axis.set(title=f"m = {cohort}, ε = 2", xlabel="round", ylim=(0, 1.2))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
axes[0].set_ylabel("false negative rate of women")
figure.legend(
    *axes[1].get_legend_handles_labels(), frameon=False, ncols=3, loc="outside lower center"
)
words = "Released rates of single rounds scattered around the true rate, for two cohorts"
figure.savefig(PICTURES / "reading_noise_rates.png", dpi=150, metadata={"Description": words})

# %% [markdown]
# A single round's rate says little, and can exceed 1: it is a quotient of two noisy numbers, and
# nothing is cut off, since that would bias averages. FPFL-1G goes by moving averages of the
# *counts*, from which the blue line is: steadier, and some twenty rounds late. Late steering
# swings, as the true rate does here. The model that is kept is the mean of the second half of all
# models, in which the swings cancel.
#
# A larger cohort has more noise for the same ε, since each user takes part more often, and its
# counts still stand out better. The released gradient is mostly noise in both: a step shows
# nothing, but noise cancels over hundreds of steps, and what users have in common adds up.
#
# ## Clipping biases what is counted
#
# Noise is not all. In the paper's vector the counts are clipped together with the gradients. A
# user whom the model gets wrong has a large gradient, is scaled down the most, and so errors
# count for less than hits. To see that without any noise, the next cell trains with the bound and
# without noise, and asks everybody in every round.


# %%
def counted(clip: fpfl.Clipping, method: object) -> tuple[list[float], list[float]]:
    """Released and true FNR of women, with everybody in every round and no noise."""
    model = fpfl.mlp(people.schema.shape[0], seed=0)
    watch = Watch(model)
    fpfl.train(
        model,
        people,
        cohort=people.population,
        rounds=2 if QUICK else 30,
        learning_rate=1.0,
        constraint=parity,
        method=method,
        clip=clip,
        seed=0,
        callbacks=[watch],
    )
    return [watch.released[t - 1] for t, _ in watch.true], [true for _, true in watch.true]


LOOK_EVERY = 1
ways = {
    "one bound C = 2 for all (the paper's)": counted(fpfl.Clipping(2.0), fpfl.MMDM()),
    "counts in a block of their own": counted(fpfl.Clipping(2.0, counts=1.0), fpfl.MMDM()),
}
figure, axis = plt.subplots(figsize=(5.2, 4.2), layout="constrained")
axis.plot([0, 1], [0, 1], color="#555555", lw=1, ls="--", label="what is true")
for colour, (name, (released, true)) in zip(COLOURS, ways.items(), strict=False):
    axis.plot(true, released, "o", ms=4, color=colour, label=name)
    print(f"{name}: off by {np.mean(np.subtract(released, true)):+.3f} on average")
axis.set(xlabel="true FNR of women", ylabel="FNR by the clipped counts", xlim=(0, 1), ylim=(0, 1))
axis.legend(frameon=False, loc="upper left", fontsize=9)
axis.spines[["top", "right"]].set_visible(False)
words = "Rates by clipped counts against true rates: joint clipping lies below the diagonal"
figure.savefig(PICTURES / "reading_noise_clipping.png", dpi=150, metadata={"Description": words})

# %% [markdown]
# Counts in a block of their own, written as (F, n′ − F) and scaled by a factor that depends on n′
# alone, stay close to the diagonal. What is left is that a user with several relevant samples
# counts as their mean, so users weigh alike and not samples.
#
# ## What to take away
#
# - Read averages over rounds, never a single round, and compare the noise of a count with the
#   count: `fpfl train -v` and the report say both.
# - A smooth curve can be wrong: the bias from joint clipping has no noise in it at all.
# - What decides is n′ of the smallest group in a cohort. Plan for it before training.
