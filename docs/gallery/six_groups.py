# %% [markdown]
# # Six groups: sex and race together
#
# Equal rates for women and men, and equal rates for races, can hide a group that is treated
# badly: an intersection, such as the women of one race. `fnr_parity(("sex", "race"))` compares
# intersections. The price is that groups get small, and small groups can show little. This page
# trains with six groups, draws every group's rate with its interval, and asks what it would take
# to know more.

# %%
import os
import warnings
from pathlib import Path

import matplotlib.pyplot as plt

import fpfl
from fpfl.aggregation.noise import SeededNoise
from fpfl.experiments.demo import COLOURS

QUICK = os.environ.get("FPFL_QUICK") == "1"  # the tests': a few rounds, to see that it runs
PICTURES = Path(os.environ.get("FPFL_PICTURES", "."))
COHORT, ROUNDS = 200, 10 if QUICK else 1000
warnings.simplefilter("ignore", fpfl.FpflWarning)

REST = ["Amer-Indian-Eskimo", "Asian-Pac-Islander", "Other"]
people, test = (
    fpfl.merge_values(
        fpfl.load_adult(part, attributes=("sex", "race")), "race", {"another race": REST}
    )
    for part in ("train", "test")
)
people = people.partition(mean=2, seed=0)
parity = fpfl.fnr_parity(("sex", "race"), tolerance=0.02)
print(*(f"{a.name}: {', '.join(a.values)}" for a in people.schema.attributes), sep="\n")

# %% [markdown]
# Which values are too rare to stand alone has to be known from elsewhere, a published census for
# example: counting them in users' data would be a release of its own. With the three merged ones
# there are six groups.

# %%
found = fpfl.suggest(
    people.schema,
    parity,
    population=people.population,
    cohort=COHORT,
    epsilon=2.0,
    rounds=ROUNDS,
)
plain = {name: value for name, value in found.arguments().items() if name != "method"}
runs = {
    "PFL": {**plain, "selection": "average"},
    "FPFL-1G": {**found.arguments(), "constraint": parity},
    "FPFL-1G, never\nweighing down": {
        **found.arguments(),
        "constraint": parity,
        "method": fpfl.OneGradient(low=1.0),
    },
}
judged = {}
for name, arguments in runs.items():
    model = fpfl.mlp(people.schema.shape[0], seed=0)
    run = fpfl.train(model, people, seed=0, noise_seed=0, **arguments)
    judged[name] = fpfl.evaluate_model(run.model, test, constraint=parity)
    title = name.replace("\n", " ")
    print(f"{title}: accuracy {judged[name].accuracy:.3f}, {judged[name].gaps['constraint']}")
    print(f"  {judged[name].verdict_in_words}")

# %% [markdown]
# ## Every group, with what is known about it
#
# n′ is the number of high earners of a group in the test set. A bar is the interval in which the
# group's rate lies for 95% of test sets, all bars of a picture at once; the grey band is
# the overall rate ± α.

# %%
figure, axes = plt.subplots(1, 3, figsize=(10.4, 3.9), sharey=True, layout="constrained")
for axis, (way, evaluation) in zip(axes, judged.items(), strict=True):
    differences = evaluation.gaps["constraint"].differences
    for place, d in enumerate(differences):
        ends = [[d.value - d.value_low], [d.value_high - d.value]]
        axis.errorbar(d.value, place, xerr=ends, fmt="o", color=COLOURS[1], capsize=4)
    overall = differences[0].overall
    axis.axvspan(overall - 0.02, overall + 0.02, color="#888888", alpha=0.3, lw=0)
    axis.set_title(f"{way}\naccuracy {evaluation.accuracy:.3f}", fontsize=11)
    axis.set(xlabel="false negative rate", xlim=(0, 1))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25)
who = [d.group.replace("sex=", "").replace("race=", "") for d in differences]
labels = [f"{name}, n′ = {d.count:,}" for name, d in zip(who, differences, strict=True)]
axes[0].set_yticks(range(len(labels)), labels)
axes[0].invert_yaxis()
words = "False negative rates of six groups with intervals, for three ways of training"
figure.savefig(PICTURES / "six_groups_rates.png", dpi=150, metadata={"Description": words})

# %% [markdown]
# FPFL-1G brings the rates together, but note which way: most groups are missed *more* often than
# without the constraint: the overall rate has come to meet the worst. With
# `OneGradient(low=1.0)` no sample is ever weighed down, so that a gap can close from the weak
# side only ([why, and what it costs](../robust.md#without-weighing-down)).
#
# And the rates of the small groups are hardly known, before and after: their bars are several
# times as wide as the band, and no training makes a bar narrower. The gap is a maximum over
# groups, so its interval is that of the group whose rate is least certain.

# %%
gap = judged["FPFL-1G"].gaps["constraint"]
pair = gap.worst_pair
print(f"furthest from everybody: {gap.worst_group}")
print(f"furthest apart: {pair.larger} and {pair.smaller}, {pair.difference:.3f} ", end="")
print(f"[{pair.low:.3f}, {pair.high:.3f}]")

# %% [markdown]
# ## How many people would it take?
#
# The half-width of an interval falls with the square root of n′, whatever the model; here are
# those of the last one. In a simulation the training population can be looked at as well, which
# has twice as many people: the points fall along the same line (drawn for the eye), which meets α
# far to the right. To know one group's rate to ± 0.02 takes thousands of its people with the
# label in question.

# %%
last = list(judged)[-1]
evaluated = fpfl.evaluate_model(run.model, people, constraint=parity)
figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
for colour, what, evaluation in (
    (COLOURS[1], "test set", judged[last]),
    (COLOURS[0], "training population", evaluated),
):
    seen = evaluation.gaps["constraint"].differences
    counts = [d.count for d in seen]
    widths = [(d.value_high - d.value_low) / 2 for d in seen]
    axis.loglog(counts, widths, "o", color=colour, label=what)
line = [(n, 1.3 / n**0.5) for n in (10, 20_000)]
axis.loglog(*zip(*line, strict=True), color="#555555", lw=1, label="1.3 / √n′")
axis.axhline(0.02, color="#555555", ls=":", lw=1.2)
axis.text(10, 0.0185, "α = 0.02", va="top", color="#555555")
axis.set(xlabel="people of the group with the label, n′", ylabel="half the interval's width")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
axis.grid(alpha=0.25)
words = "Half the width of a group's interval against the group's number of people"
figure.savefig(PICTURES / "six_groups_widths.png", dpi=150, metadata={"Description": words})

# %% [markdown]
# ## Without a test set
#
# A deployment asks held-out users once, under an ε of its own, and gets noisy counts. The
# intervals allow for the noise, too. Where the verdict is "cannot tell", it says about how many
# users it would take.

# %%
private = fpfl.evaluate_privately(
    run.model, test, constraint=parity, epsilon=1.0, bound=1, noise=SeededNoise(0)
)
print(private)

# %% [markdown]
# ## What to take away
#
# - Name intersections in the constraint if you care about them; the gap of two attributes one by
#   one says nothing about them.
# - Read the interval before the number. "Cannot tell" is an answer: it says that the data at hand
#   can neither show a model fair nor unfair at this α.
# - Merge groups, ask for a wider α, or find more people. Training longer does not help a
#   measurement.
