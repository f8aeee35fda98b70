"""The model card: its figures are the run's own, and nothing that is confidential is in it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from conftest import make_population

import fpfl
from fpfl.heldout import plan_heldout
from fpfl.privacy import round_up
from fpfl.report.card import TO_FILL, model_card, plain, table
from fpfl.report.facts import run_facts

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning", "ignore::UserWarning")

SEED, NOISE_SEED = 918273645, 564738291
HOSTILE = "a|b\n# Head <script>alert(1)</script> `x` [y](z) *w* ---"


def trained(folder: Path | None, attributes=None, **changed):
    people = make_population(users=60, **({} if attributes is None else {"attributes": attributes}))
    settings = {"cohort": 20, "rounds": 4, "constraint": fpfl.fnr_parity(), "seed": SEED}
    settings |= {"method": fpfl.OneGradient(), "privacy": fpfl.Privacy(noise_multiplier=1.5)}
    run = fpfl.train(fpfl.mlp(5, seed=0), people, folder=folder, **(settings | changed))
    return run, people


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory):
    """A run in a folder that has everything: a test evaluation and a private one."""
    folder = tmp_path_factory.mktemp("somewhere-secret") / "the-run"
    run, _ = trained(folder, noise_seed=NOISE_SEED)
    test = make_population(users=80, seed=1)
    (folder / "evaluation-test.json").write_text(
        json.dumps(run.evaluate(test, bootstrap=30).as_dict()), encoding="utf-8"
    )
    plan = plan_heldout(
        test.schema, population=80, constraint=fpfl.fnr_parity(), epsilon=2.0, bound=3.0
    )
    (folder / "evaluation-private.json").write_text(
        json.dumps(plan.release(run.model, test).as_dict()), encoding="utf-8"
    )
    (folder / "config.toml").write_text(f"seed = {SEED}\n", encoding="utf-8")
    (folder / "origin.json").write_text('{"folder": "/home/anna/secret"}', encoding="utf-8")
    return folder, run


def section(card: str, title: str) -> str:
    found = re.search(rf"^#+ {re.escape(title)}.*?\n(.*?)(?=^#+ |\Z)", card, re.M | re.S)
    assert found, title
    return found.group(1)


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def shown(value: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    def one(number: float) -> str:
        return f"{number:{sign}.3f}".replace("-", "−")

    ends = "" if low is None else f" [{one(low)}, {one(high)}]"
    return ("–" if value is None else one(value)) + ends


def test_every_figure_is_that_of_the_files(kept) -> None:
    folder, _ = kept
    card = model_card(folder)
    told = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    said, settings = told["privacy"], told["settings"]
    privacy = section(card, "Privacy")
    assert f"ε = {round_up(said['epsilon_honest'])} at δ = {said['delta']:g}" in privacy
    assert f"ε = {round_up(said['epsilon_server'])} against a server" in privacy
    for line in (folder / "privacy.txt").read_text(encoding="utf-8").splitlines():
        assert f"- {plain(line, 10_000)}" in privacy
    training = dict(rows(section(card, "Training")))
    assert training["users in a round"] == str(settings["cohort"])
    assert training["rounds"] == f"4 of {settings['rounds']}"
    assert training["parameters of the model"] == str(settings["layout"]["parameters"])
    assert training["tolerance α"] == f"{settings['tolerance']:g}"
    data = dict(rows(section(card, "Data")))
    assert (data["users"], data["samples per user (declared)"]) == ("60", "3")

    test = json.loads((folder / "evaluation-test.json").read_text(encoding="utf-8"))
    part, gap = section(card, "Test set (simulation only)"), test["gaps"]["constraint"]
    assert f"accuracy {shown(test['accuracy'], *test['accuracy_interval'])}" in part
    assert rows(part) == [
        [
            d["group"],
            d["rate"],
            shown(d["value"], d["value_low"], d["value_high"]),
            shown(d["difference"], d["low"], d["high"], sign="+"),
            str(d["count"]),
        ]
        for d in gap["differences"]
    ]
    assert f"Gap (FNR parity): {shown(gap['value'], gap['low'], gap['high'])}" in part
    pair = gap["worst_pair"]
    apart = shown(pair["difference"], pair["low"], pair["high"])
    assert f"{pair['larger']} and {pair['smaller']}, by {apart}" in part
    assert plain(test["verdict_in_words"], 2000) in part
    for name in ("balanced_accuracy", "f1", "auc"):
        figure = test["metrics"][name]
        assert shown(figure["value"], figure["low"], figure["high"]) in part
    for one in (*test["metrics"]["labels"], *test["metrics"]["predicted"]):
        assert f"{shown(one['value'], one['low'], one['high'])} of the " in part

    held = json.loads((folder / "evaluation-private.json").read_text(encoding="utf-8"))
    cost = f"released, ε = {round_up(held['epsilon'])}"
    part = section(card, f"Held-out users, released with noise ({cost})")
    assert shown(*(held["gap"][name] for name in ("value", "low", "high"))) in part
    assert plain(held["verdict_in_words"], 2000) in part
    assert "Balanced accuracy " in part
    assert ", AUC " in part
    assert all(f"- {plain(line, 10_000)}" in part for line in held["statement"])
    assert card.index("### Held-out users") < card.index("### Test set (simulation only)")
    # Four rounds with much noise leave a model at chance, and the card begins with that.
    assert card.index("**Collapsed model.** Test set (simulation only): the model") < 300


def test_a_card_says_what_it_does_not_know(kept) -> None:
    card = model_card(kept[0])
    assert card.count(TO_FILL) == 2
    assert "license: to be chosen by whoever publishes" in card
    limits = section(card, "Limits")
    assert "The verdict rests on: held-out users, released with noise" in limits
    assert "no ε covers showing them" in limits
    assert "ε covers the training alone" in limits
    assert "**Seeded noise: a simulation.**" in card


def test_nothing_confidential_is_in_a_card_or_a_file(kept) -> None:
    folder, _ = kept
    texts = [model_card(folder), json.dumps(run_facts(folder))]
    digests = json.loads((folder / "fingerprints.json").read_text(encoding="utf-8")).values()
    assert digests
    for text in texts:
        for secret in (str(SEED), str(NOISE_SEED), "/home/anna", str(folder), "secret", *digests):
            assert secret not in text


def test_a_warning_does_not_tell_where_the_folder_is(kept) -> None:
    folder, run = kept
    noted = dataclasses.replace(run, warnings=(f"{folder}/totals-1.bin ends early",))
    noted.save(folder)
    try:
        card = model_card(folder)
    finally:
        run.save(folder)
    assert "the run's folder/totals-1.bin ends early" in card
    assert str(folder) not in card


def test_a_run_in_memory_has_the_same_card(kept) -> None:
    folder, run = kept
    people = make_population(users=60)
    test = run.evaluate(make_population(users=80, seed=1), bootstrap=30)
    ours = model_card(run, name="x", schema=people.schema, evaluation=test)
    theirs = model_card(folder, name="x")
    for title in ("What it is", "Data", "Groups", "Training", "Privacy", "Test set"):
        assert section(ours, title) == section(theirs, title)
    assert "Begun" not in ours
    facts = run_facts(run, test=test)
    assert facts["epsilon"] == run.privacy.epsilon_honest
    assert facts["verdict"] == test.verdict
    assert facts["verdict_on"] == "test set (simulation only)"
    released = json.loads((folder / "evaluation-private.json").read_text(encoding="utf-8"))
    assert run_facts(folder)["verdict_in_words"] == released["verdict_in_words"]
    cost = f"released, ε = {round_up(released['epsilon'])}"
    assert run_facts(folder)["verdict_on"] == f"held-out users, released with noise ({cost})"


def test_the_card_says_which_class_is_which(kept) -> None:
    folder, run = kept
    schema = dataclasses.replace(make_population(users=60).schema, class_names=("no", "ye|s"))
    card = model_card(run, schema=schema)
    assert "| classes | 0 = no; 1 = ye\\|s, the positive one |" in section(card, "Data")
    assert "for 2 classes (0 = no; 1 = ye\\|s, the positive one)" in section(card, "What it is")
    assert dict(rows(section(model_card(folder), "Data")))["classes"] == "2"  # nobody said


def test_missing_pieces_are_said(tmp_path: Path) -> None:
    run, _ = trained(None, privacy=None, constraint=None, method=None)
    card = model_card(run.save(tmp_path / "run"))
    assert "**No privacy.**" in card
    assert "This run gives no privacy guarantee" in section(card, "Privacy")
    assert "there is no schema.json" in card
    assert "was not evaluated" in card
    assert "No constraint: nothing was done" in card
    assert "ε covers" not in section(card, "Limits")
    assert "differential-privacy" not in card.split("---")[1]
    with pytest.raises(ValueError, match="is not the folder of a run"):
        model_card(tmp_path)


def test_without_a_constraint_the_usual_rates_are_tabled() -> None:
    run, people = trained(None, privacy=None, constraint=None, method=None)
    test = run.evaluate(people, bootstrap=20)
    part = section(model_card(run, schema=people.schema, evaluation=test), "Test set")
    tabled = [row for row in rows(part) if row[1] in ("FNR", "FPR", "selection rate")]
    groups = [name for name in test.rates["FNR"] if name != "overall"]
    assert {(row[1], row[0]) for row in tabled} == {
        (rate, group) for rate in ("FNR", "FPR", "selection rate") for group in groups
    }
    assert f"Gap (FNR and FPR): {test.gaps['eo'].value:.3f}" in part
    assert f"Gap (selection rate): {test.gaps['demp'].value:.3f}" in part
    assert "Verdict" not in part


def test_hypothetical_privacy_and_groups_without_samples_are_said() -> None:
    race = fpfl.Attribute("race", ("A", "B", "C"), unknown=True)
    run, people = trained(
        None,
        attributes=(race,),
        privacy=fpfl.Privacy(noise_multiplier=1.5, population=100_000),
        constraint=fpfl.fnr_parity(tolerance=0.05),
    )
    none = dataclasses.replace(people, attributes=people.attributes.clamp(max=1))
    card = model_card(run, schema=people.schema, evaluation=run.evaluate(none, bootstrap=20))
    assert "**Hypothetical population.**" in card
    assert round_up(run.privacy.epsilon_real) in section(card, "Privacy").splitlines()[1]
    limits = section(card, "Limits")
    assert "Not judged, having no sample or too much noise: race=C" in limits
    assert "no known value of race" in limits
    # A group that has no value has a dash, not a number.
    assert rows(section(card, "Test set"))[2][2] == "–"


def test_hostile_names_stay_text() -> None:
    attribute = fpfl.Attribute(HOSTILE, ("x|y", "<img src=x onerror=alert(1)>"))
    run, people = trained(None, attributes=(attribute,))
    schema = dataclasses.replace(
        people.schema, feature_names=tuple(f"{i}|{HOSTILE}" for i in "abcde")
    )
    card = model_card(
        run, name=HOSTILE, schema=schema, evaluation=run.evaluate(people, bootstrap=20)
    )
    assert "<" not in card.replace("<!--", "")
    assert not re.search(r"^# Head", card, re.M)
    assert not re.search(r"(?<!\\)\[y\]", card)
    widths: dict[str, int] = {}
    for line in card.splitlines():
        if line.startswith("|"):
            cells = len(re.findall(r"(?<!\\)\|", line))
            assert cells == widths.setdefault("head", cells), line
        else:
            widths.clear()


def test_front_matter_is_yaml(kept) -> None:
    yaml = pytest.importorskip("yaml", reason="it is not installed: pip install pyyaml")
    front = yaml.safe_load(model_card(kept[0]).split("---")[1])
    assert front == {
        "library_name": "fpfl",
        "tags": ["fairness", "federated-learning", "differential-privacy"],
        "metrics": ["accuracy"],
        "pipeline_tag": "tabular-classification",
    }


def test_text_is_escaped_once_and_cut() -> None:
    assert plain("a|b_c <d> & e\n\tf") == r"a\|b\_c &lt;d&gt; &amp; e f"
    assert plain("x" * 400) == f"{'x' * 299}…"
    assert plain("a\x00\u202eb") == "a��b"
    for address in ("https://evil.test/x", "ftp://evil.test", "WWW.evil.test", "me@evil.test"):
        shown = plain(f"see {address} now")
        assert re.search(r"://|www\.|\w@", shown, re.I) is None, "a reader would make it a link"
        assert shown.replace("<!-- -->", "") == f"see {address} now"
    assert table(("h",), [("a|b",)]) == ["| h |", "| --- |", r"| a\|b |"]
