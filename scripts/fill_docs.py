"""Write the figures of committed results files into the documentation.

A page has markers, and what stands between them is made by this script:

    <!-- results: adult-federated -->            one table of docs/results/NAME/results.json
    <!-- compare: adult-central adult-central-last -->   several, side by side
    <!-- demo -->                                docs/results/demo/results.json
    <!-- bench: speeds -->                       a table of benchmarks/results/*.json
    <!-- audit -->, <!-- audit: twins -->        docs/results/audit/*.json
    <!-- robust: table -->                       a table of scripts/robust_tables.py
    <!-- digits: table femnist -->               one of scripts/digits_tables.py, of results files
    <!-- federation: figures -->                 one of scripts/federation_tables.py
    <!-- estimator: fairlearn -->                one of scripts/estimator_tables.py
    <!-- tables: bars -->                       a part of fpfl.experiments.people.report
    <!-- end -->

``python scripts/fill_docs.py`` rewrites the pages, ``--check`` only says whether they are up to
date (a test does that), so that no figure in a page can differ from the file it comes from.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

import digits_tables  # noqa: E402 - neighbours of this script
import estimator_tables  # noqa: E402
import federation_tables  # noqa: E402
import robust_tables  # noqa: E402

RESULTS = ROOT / "docs" / "results"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("howto/*.md"))]
BLOCK = re.compile(
    r"(<!-- (results|compare|demo|bench|audit|robust|digits|federation|estimator|tables)"
    r"(?:: ([^>]*?))? -->\n).*?(<!-- end -->)",
    re.S,
)

HOW = {
    "engine": "make bench",
    "cuda": "python -m benchmarks.cuda",
    "parts": "python -m benchmarks.parts",
    "journal": "python -m benchmarks.journal",
    "company": "python -m benchmarks.company --against CHECKOUT",
    "sweeps": "python -m benchmarks.sweeps",
}
"""What makes each of the benchmarks' files."""

Result = dict[str, Any]
Key = tuple[str, str, int | None]


def main() -> int:
    """Fill or check all pages."""
    check = "--check" in sys.argv[1:]
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = BLOCK.sub(lambda m: m[1] + render(m[2], m[3] or "") + m[4], text)
        if new != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'out of date' if check else 'rewritten'}: {', '.join(stale)}")
    return 1 if check and stale else 0


def render(kind: str, argument: str) -> str:
    """The text between two markers."""
    if kind == "demo":
        return demo_table()
    if kind == "bench":
        return bench_table(argument.strip())
    if kind == "robust":
        return robust_tables.TABLES[argument.strip()]()
    if kind == "federation":
        return federation_tables.TABLES[argument.strip()]()
    if kind == "estimator":
        return estimator_tables.TABLES[argument.strip()]()
    if kind == "tables":
        return people_table(argument.strip())
    if kind == "digits":
        what, *names = argument.split()
        return digits_tables.TABLES[what](names)
    if kind == "audit":
        return audit_table(argument.strip() or "audit")
    names = argument.split()
    return result_table(names[0]) if kind == "results" else comparison(names)


def bench_table(what: str) -> str:
    """One of the benchmarks' tables, with where it comes from."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import report

    tables: dict[str, tuple[str, Callable[[Any], str]]] = {
        "speeds": ("engine", lambda found: report.speed_table(found["speeds"])),
        "ratios": ("engine", lambda found: report.ratio_table(found["ratios"])),
        "scaling": ("engine", lambda found: report.scaling_table(found["scaling"])),
        "gpu": ("cuda", report.gpu_table),
        "gpu ratios": ("cuda", lambda found: report.ratio_table(report.gpu_ratios(found))),
        "gpu agreement": ("cuda", report.agreement_table),
        "gpu profile": ("cuda", report.profile_table),
        "gpu side by side": ("cuda", report.side_by_side_table),
        "parts": ("parts", report.parts_table),
        "journal": ("journal", report.journal_table),
        "company": ("company", report.company_table),
        "sweeps": ("sweeps", report.sweeps_table),
    }
    if what not in tables:
        raise SystemExit(
            f"there is no table {what!r} of the benchmarks; {sorted(tables)} are there"
        )
    name, table = tables[what]
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    if not file.exists():
        raise SystemExit(f"{file.name} is missing: run {HOW[name]}")
    found = json.loads(file.read_text(encoding="utf-8"))
    if name in ("company", "sweeps"):  # say themselves where their parts are from
        return table(found) + "\n"
    sources = [found["about_scaling" if what == "scaling" else "about"]]
    if what == "ratios" and found["about_scaling"] != found["about"]:
        sources.append(found["about_scaling"])  # from the populations on
    return "\n\n".join([table(found), *map(report.provenance, sources)]) + "\n"


def people_table(name: str) -> str:
    """A part of the page about other people's tables; says so where nothing was run yet."""
    sys.path.insert(0, str(ROOT / "src"))
    from fpfl.experiments.people.report import PARTS
    from fpfl.experiments.people.runner import read_results

    found = read_results(RESULTS / "tables" / "results.json")
    if not found["results"]:
        return "No results are committed yet.\n"
    return PARTS[name](found["results"], found["about"])


def audit_table(name: str) -> str:
    """What the audits found: claims and lower bounds of ε."""
    found = json.loads((RESULTS / "audit" / f"{name}.json").read_text(encoding="utf-8"))
    lines = ["| audit | attack | claimed ε | found ε ≥ | confidence | right guesses | |",
             "| --- | --- | ---: | ---: | ---: | ---: | --- |"]  # fmt: skip
    for title, row in found["audits"].items():
        verdict = "**refuted**" if row["caught"] else "stands"
        if row["face_value"] != row["claimed"]:
            face = "**refuted**" if row["face_value_caught"] else "not refuted"
            verdict += f"; at face value, ε = {row['face_value']:.2f}: {face}"
        lines.append(
            f"| {title} | {row['attack']} | {row['claimed']:.2f} | {row['lower_bound']:.2f} | "
            f"{100 * row['confidence']:.6g}% | {row['correct']:,} of {row['guesses']:,} | "
            f"{verdict} |"
        )
    if checks := found.get("checks"):
        lines += ["", "| check | found | p | level | |", "| --- | --- | ---: | ---: | --- |"]
        lines += [
            f"| {title} | {row['found']} | {row['p_value']:.2g} | {row['level']:.2g} | "
            f"{'**failed**' if row['failed'] else 'holds'} |"
            for title, row in checks.items()
        ]
    about = found["about"]
    source = (
        f"`{about['command']}`, {about['date']}, {about['hardware']}, "
        f"{about['wall_seconds']:.0f} s; no seeds: coins, cohorts and noise are the system's."
    )
    return "\n".join([*lines, "", source]) + "\n"


def load(name: str) -> tuple[dict[Key, list[Result]], str]:
    """The runs of a results file by row, and where they come from in one sentence."""
    folder = RESULTS / name
    rows: dict[Key, list[Result]] = {}
    for run in json.loads((folder / "results.json").read_text(encoding="utf-8")):
        rows.setdefault((run["model"], run["algorithm"], run["cohort"]), []).append(run)
    return rows, provenance(json.loads((folder / "about.json").read_text(encoding="utf-8")), rows)


def provenance(about: dict[str, Any], rows: dict[Key, list[Result]]) -> str:
    """Command, seeds, machine and date."""
    seeds = sorted({run["seed"] for runs in rows.values() for run in runs})
    return (
        f"`{about['command']}`, {about['date']}, {about['hardware']}, "
        f"seeds {seeds[0]} to {seeds[-1]}, {about['wall_seconds']:.0f} s."
    )


def paper_figures(table: str) -> dict[Key, dict[str, float]]:
    """The paper's figures, from the table's own file."""
    sys.path.insert(0, str(ROOT / "src"))
    from fpfl.experiments.tables import load_table

    return {(row.model, row.algorithm, row.cohort): row.paper for row in load_table(table)}


def result_table(name: str) -> str:
    """One results file beside the paper."""
    rows, source = load(name)
    paper = paper_figures(next(iter(rows.values()))[0]["table"])
    lines = [
        "| model | algorithm | m | accuracy | paper | FNR gap | paper | training gap "
        "| σ | ε | honest ε |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for key, runs in rows.items():
        first = runs[0]
        cells = [
            key[0],
            key[1],
            "–" if key[2] is None else str(key[2]),
            spread(runs, "accuracy"),
            f"{paper[key]['accuracy']:.3f}",
            spread(runs, "fnr_gap"),
            f"{paper[key]['fnr_gap']:.3f}",
            spread(runs, "train_gap"),
            *(
                "–" if first[field] is None else f"{first[field]:.3f}"
                for field in ("noise_multiplier", "epsilon", "epsilon_honest")
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", source]) + "\n"


def comparison(names: list[str]) -> str:
    """Accuracy / test gap (training gap) of the rows that all files have, side by side."""
    loaded = {name: load(name) for name in names}
    keys = [key for key in loaded[names[0]][0] if all(key in rows for rows, _ in loaded.values())]
    paper = paper_figures(next(iter(loaded[names[0]][0].values()))[0]["table"])
    lines = [
        f"| model | algorithm | m | paper | {' | '.join(f'`{name}`' for name in names)} |",
        "| --- " * (4 + len(names)) + "|",
    ]
    for key in keys:
        cells = [*key[:2], "–" if key[2] is None else str(key[2])]
        cells.append(f"{paper[key]['accuracy']:.3f} / {paper[key]['fnr_gap']:.3f}")
        for name in names:
            figures = [
                mean(run[field] for run in loaded[name][0][key])
                for field in ("accuracy", "fnr_gap", "train_gap")
            ]
            cells.append("{:.3f} / {:.3f} ({:.3f})".format(*figures))
        lines.append(f"| {' | '.join(cells)} |")
    sources = [f"- `{name}`: {source}" for name, (_, source) in loaded.items()]
    return "\n".join([*lines, "", *sources]) + "\n"


def demo_table() -> str:
    """The demo's three runs."""
    content = json.loads((RESULTS / "demo" / "results.json").read_text(encoding="utf-8"))
    lines = [
        "| | accuracy | FNR women | FNR men | FNR gap [95%] | ε |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for run in content["runs"]:
        low, high = run["fnr_gap_interval"]
        epsilon = "none" if run["epsilon"] is None else f"{run['epsilon']:.2f}"
        lines.append(
            f"| {run['algorithm']} | {run['accuracy']:.3f} | {run['fnr']['sex=Female']:.3f} "
            f"| {run['fnr']['sex=Male']:.3f} | {run['fnr_gap']:.3f} [{low:.3f}, {high:.3f}] "
            f"| {epsilon} |"
        )
    about = content["about"]
    source = f"`{about['command']}`, {about['date']}, {about['hardware']}, seed 0, "
    return "\n".join([*lines, "", f"{source}{about['wall_seconds']:.0f} s."]) + "\n"


def spread(runs: list[Result], field: str) -> str:
    """Mean ± standard deviation over seeds."""
    values = [run[field] for run in runs]
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


if __name__ == "__main__":
    sys.exit(main())
