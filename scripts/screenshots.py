"""Take the pictures of docs/report.md: ``python scripts/screenshots.py``.

Trains a run with six groups and five runs to compare on Adult (where they are not there yet),
writes their reports, and photographs them in a headless chromium. Takes playwright and chromium.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import fpfl  # noqa: E402
from fpfl.aggregation.noise import SeededNoise  # noqa: E402
from fpfl.experiments.runner import about_this_run  # noqa: E402
from fpfl.report.evaluations import SIMULATION_ONLY  # noqa: E402
from fpfl.runs.folder import model_digest  # noqa: E402

ROUNDS, DELTA, SEED = 250, 5e-6, 0
COHORTS = {"six-groups": 1000, "compared": 200}
BUDGETS = (0.5, 1.0, 2.0, 8.0, None)
WIDTHS = {"desktop": (1280, 1500), "phone": (390, 1500)}
SCHEMES = ("light", "dark")
PARTS = ("rounds", "groups")
"""Sections of a run's page that have pictures of their own."""
LIMIT = 1.5e6
"""All pictures together have fewer bytes."""


def main() -> None:
    """Train, report, photograph."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--runs", type=Path, default=ROOT / "out" / "screenshots")
    given = parser.parse_args()
    start = time.perf_counter()
    single = six_groups(given.runs / "six-groups")
    several = [budget_run(given.runs, epsilon) for epsilon in BUDGETS]
    pages = {
        "run": fpfl.write_report(single, given.runs / "six-groups.html"),
        "compare": fpfl.write_report(several, given.runs / "compare.html"),
    }
    given.out.mkdir(parents=True, exist_ok=True)
    pictures = photograph(pages, given.out)
    total = sum(path.stat().st_size for path in pictures)
    if total > LIMIT:
        raise SystemExit(f"the pictures have {total:,} bytes together, more than {LIMIT:,.0f}")
    about = about_this_run("python scripts/screenshots.py", time.perf_counter() - start)
    about |= {
        "data": "Adult",
        "seeds": {"users": SEED, "model": SEED, "cohorts": SEED, "noise": SEED},
        "cohort": COHORTS,
        "rounds": ROUNDS,
        "delta": DELTA,
        "epsilon": {"six-groups": 8.0, "compared": list(BUDGETS)},
        "pictures": sorted(path.name for path in pictures),
    }
    text = json.dumps(about, indent=1) + "\n"
    (given.out / "about.json").write_text(text, encoding="utf-8")
    print(f"{len(pictures)} pictures, {total / 1e6:.2f} MB: {given.out}")


def six_groups(folder: Path) -> Path:
    """Sex × race (three values): equalised odds at ε = 8, evaluated with noise and without."""
    if (folder / "evaluation-private.json").exists():
        return folder
    train, test = (three_races(split) for split in ("train", "test"))
    constraint = fpfl.equalized_odds(("sex", "race"), tolerance=0.05)
    private = fpfl.Privacy(epsilon=8.0, delta=DELTA, clip=4.0)
    run = trained(COHORTS["six-groups"], train, constraint, private, folder)
    save(folder, "test", run.evaluate(test).as_dict())
    released = fpfl.evaluate_privately(
        run.model, test, constraint=constraint, epsilon=1.0, bound=1.0, noise=SeededNoise(SEED)
    )
    save(folder, "private", released.as_dict())
    return folder


def three_races(split: str) -> fpfl.FederatedDataset:
    """Adult with sex and race, the rarer values of race taken together."""
    data = fpfl.load_adult(split, attributes=("sex", "race"))  # type: ignore[arg-type]
    names = next(a.values for a in data.schema.attributes if a.name == "race")
    rare = [name for name in names if name not in ("White", "Black")]
    merged = fpfl.merge_values(data, "race", {"other": rare})
    return merged.partition(mean=2, seed=SEED) if split == "train" else merged


def budget_run(folder: Path, epsilon: float | None) -> Path:
    """FNR parity by sex at one ε."""
    path = folder / ("no-privacy" if epsilon is None else f"epsilon-{epsilon:g}")
    if (path / "evaluation-test.json").exists():
        return path
    data = fpfl.load_adult("train").partition(mean=2, seed=SEED)
    private = None if epsilon is None else fpfl.Privacy(epsilon=epsilon, delta=DELTA, clip=4.0)
    parity = fpfl.fnr_parity("sex", tolerance=0.02)
    run = trained(COHORTS["compared"], data, parity, private, path)
    save(path, "test", run.evaluate(fpfl.load_adult("test")).as_dict())
    return path


def trained(
    cohort: int,
    data: fpfl.FederatedDataset,
    constraint: fpfl.Constraint,
    private: fpfl.Privacy | None,
    folder: Path,
) -> fpfl.Run:
    """Train with seeds, so that the pictures show the same figures again."""
    print(f"training {folder.name}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)  # what was cut off
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fpfl.FpflWarning)  # they are in the report
        return fpfl.train(
            fpfl.mlp(data.schema.shape[0], seed=SEED),
            data,
            cohort=cohort,
            rounds=ROUNDS,
            constraint=constraint,
            method=fpfl.OneGradient(),
            privacy=private,
            clip=None if private is not None else 4.0,
            learning_rate=1.0,
            seed=SEED,
            noise_seed=None if private is None else SEED,
            folder=folder,
        )


def save(folder: Path, kind: str, content: dict[str, Any]) -> None:
    """Write an evaluation beside its run, as ``fpfl train`` and ``fpfl evaluate`` do."""
    if kind != "private":
        content |= {"on": f"{kind} set", "mark": f"{SIMULATION_ONLY}: measured without noise"}
    text = json.dumps(content | {"model": model_digest(folder)}, indent=1) + "\n"
    (folder / f"evaluation-{kind}.json").write_text(text, encoding="utf-8")


def photograph(pages: dict[str, Path], out: Path) -> list[Path]:
    """Every page at desktop and phone width, in both schemes: its top, and parts of a run's."""
    pictures = []
    with browser() as chromium:
        for device, (width, height) in WIDTHS.items():
            for scheme in SCHEMES:
                context = chromium.new_context(
                    viewport={"width": width, "height": height},
                    color_scheme=scheme,
                    reduced_motion="reduce",
                )
                page = context.new_page()
                for name, file in pages.items():
                    page.goto(file.resolve().as_uri())
                    page.wait_for_selector("html[data-ready=yes]")
                    page.wait_for_timeout(300)
                    pictures.append(
                        compressed(page.screenshot(), out / f"{name}-{device}-{scheme}.png")
                    )
                    for part in PARTS if name == "run" else ():
                        heading = f"document.getElementById('run-0-{part}-heading')"
                        page.evaluate(f"{heading}.scrollIntoView()")
                        page.wait_for_timeout(800)  # charts are drawn when they come near
                        picture = out / f"{part}-{device}-{scheme}.png"
                        pictures.append(compressed(page.screenshot(), picture))
                context.close()
    return pictures


@contextmanager
def browser() -> Iterator[Any]:
    """A headless chromium."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def compressed(png: bytes, path: Path) -> Path:
    """Write a picture with 256 colours, which a page of text and lines does not miss."""
    from PIL import Image

    # A median cut would drop the colours of thin lines, which have few pixels.
    full = Image.open(io.BytesIO(png)).convert("RGB")
    picture = full.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1)
    picture.save(path, optimize=True)
    return path


if __name__ == "__main__":
    main()
