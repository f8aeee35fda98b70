"""The documentation: its code runs, its commands exist, its figures are the committed results'.

Every block of README and docs is held to what it is: ``python`` runs by itself in an empty folder,
``toml`` is read as a config or as a schema, each line of ``sh`` is parsed by the command line
itself, and docs/start.md and docs/howto/own-data.md are walked from top to bottom, block after
block in one folder. A block without a language, or of ``text``, is no code.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fpfl

ROOT = Path(__file__).parents[1]
START = ROOT / "docs" / "start.md"
OWN_DATA = ROOT / "docs" / "howto" / "own-data.md"
GALLERY = ROOT / "docs" / "gallery"  # whole scripts, which tests/test_gallery.py runs
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if "results" not in p.parts),
]
LANGUAGES = {"python", "sh", "toml", "text", "formula", ""}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    number: int
    language: str
    code: str

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}-{self.number}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, those in lists too."""
    found = re.findall(
        r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2$", page.read_text(encoding="utf-8"), re.S | re.M
    )
    return [
        Block(page, number, language.strip(), textwrap.dedent(code))
        for number, (_, _, language, code) in enumerate(found)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]


def those(language: str, *, but: tuple[Path, ...] = ()) -> list[object]:
    """The blocks of a language, as a test's parameters."""
    return [
        pytest.param(block, id=block.id)
        for block in BLOCKS
        if block.language == language and not any(block.page.is_relative_to(p) for p in but)
    ]


def test_blocks_are_of_a_known_language() -> None:
    for page in PAGES:
        fences = len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.M))
        assert fences == 2 * len(blocks(page)), f"{page.name} has a fence that is not closed"
    unknown = {block.id: block.language for block in BLOCKS if block.language not in LANGUAGES}
    assert not unknown, "no test knows what to do with these blocks"


@pytest.mark.parametrize("block", those("python", but=(START, OWN_DATA, GALLERY)))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_examples_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.code, "example", "exec"), {"__name__": "example"})


SECTIONS = {
    "data": '[data]\nname = "adult"\n',
    "training": "[training]\ncohort = 10\nrounds = 1\n",
}
"""What every config has: a page may leave it out where it speaks of another section."""


@pytest.mark.parametrize("block", those("toml"))
def test_configs_are_read(block: Block, tmp_path: Path) -> None:
    """A table's schema has a label, a site approves; all else is a config, or sections of one."""
    from fpfl.config import load_config, load_sweep
    from fpfl.data.table_schema import read_table_schema

    path = tmp_path / "block.toml"
    given = tomllib.loads(block.code)
    missing = "" if "label" in given else "".join(SECTIONS[n] for n in SECTIONS if n not in given)
    path.write_text(f"{block.code}\n{missing}", encoding="utf-8")
    if "label" in given:
        read_table_schema(path)
    elif "approve" in given:
        pytest.importorskip("cryptography", reason="not installed: pip install 'fpfl[flower]'")
        from fpfl.federation.site import Site

        path.write_text(block.code, encoding="utf-8")
        Site.read(path)
    elif "sweep" in given:
        load_sweep(path)
    else:
        load_config(path)


# --- commands ---------------------------------------------------------------------------------

OURS = "fpfl"
OTHERS = {
    "cat", "cd", "export", "flwr", "git", "make", "mkdir", "mlflow", "nvflare", "pip", "printf",
    "python", "sh", "source", "systemctl", "docker", "tensorboard", "torchrun", "useradd", "chown",
}  # fmt: skip
"""Commands that are not ours; what make and python are asked for is looked at all the same."""


def lines_of(block: Block) -> list[str]:
    """A block's lines, continued ones joined, without those that are comments alone."""
    joined = re.sub(r"\\\n\s*", " ", block.code)
    return [line for line in joined.splitlines() if line.split("#")[0].strip()]


def commands_in(line: str) -> Iterator[list[str]]:
    """The commands of a line of shell: pipes and lists apart, without what is redirected."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    skip = False
    for token in lexer:
        if skip:
            skip = False
        elif token in (">", ">>", "<"):
            skip = True
        elif set(token) <= set("|&;"):
            yield _without_variables(words)
            words = []
        else:
            words.append(token)
    if words:
        yield _without_variables(words)


def _without_variables(words: list[str]) -> list[str]:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


def check(words: list[str]) -> None:
    """Say whether a command exists and is complete, without running it."""
    name, *rest = words
    if name == OURS:
        parse(rest)
        return
    assert name in OTHERS, f"{name!r} is not a command that the docs use"
    if name == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
        asked = [word for word in rest if "=" not in word]
        assert set(asked) <= set(targets), f"make has no {asked}"
    elif name == "torchrun":
        assert rest[rest.index("-m") + 1] == "fpfl.cli"
        parse(rest[rest.index("-m") + 2 :])
    elif name == "python" and not rest[0].startswith("-"):
        assert (ROOT / rest[0]).exists(), f"there is no {rest[0]}"


@cache
def command_line() -> Any:
    """The command line, as its parser has it: click's, or Typer's own copy of that."""
    import typer.main

    from fpfl.cli import app

    return typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """Have the command line's own parser read a command: its options, and that none is missing."""
    from fpfl.cli.data import show_alone

    command, path, words = command_line(), [OURS], show_alone(words)
    while hasattr(command, "commands"):
        assert words, f"{' '.join(path)} needs a command"
        assert words[0] in command.commands, f"{' '.join(path)} has no command {words[0]!r}"
        command, path, words = command.commands[words[0]], [*path, words[0]], words[1:]
    try:
        command.make_context(" ".join(path), list(words))
    except Exception as error:
        if hasattr(error, "format_message"):
            raise AssertionError(f"{' '.join(path)}: {error}") from error
        raise


@pytest.mark.parametrize("block", those("sh"))
def test_commands_exist(block: Block) -> None:
    for line in lines_of(block):
        for words in commands_in(line):
            check(words)


@pytest.mark.parametrize(
    "line",
    [
        "fpfl trian a.toml --out b",
        "fpfl privacy --populaton 10",
        "fpfl resume",
        "fpfl budget",
        "make nothing",
        "python scripts/missing.py",
        "curl example.org",
    ],
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    (words,) = commands_in(line)
    with pytest.raises(AssertionError):
        check(words)


def test_inline_commands_exist() -> None:
    """``fpfl ...`` in running text: the command's name at the least."""
    known = command_line().commands
    for page in PAGES:
        for words in re.findall(r"`fpfl ([a-z]+)[^`]*`", page.read_text(encoding="utf-8")):
            assert words in known, f"{page.name} speaks of fpfl {words}"


# --- the newcomer's path ----------------------------------------------------------------------


Walk = Callable[[Path], list[str]]


@pytest.fixture
def walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Walk:
    """All of a page, in order, in one empty folder, but for installing and the demo.

    Returns which of our commands were run. A toml block begins with its file's name.
    """
    from fpfl.cli import main

    def run(line: str, words: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", words)
        try:
            code = main()
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        said = capsys.readouterr()
        assert not code, f"{line}\n{said.out}\n{said.err}"

    def walked(page: Path) -> list[str]:
        monkeypatch.chdir(tmp_path)
        done = []
        for block in blocks(page):
            if block.language == "toml":
                name = block.code.splitlines()[0].removeprefix("#").strip()
                (tmp_path / name).write_text(block.code, encoding="utf-8")
            if block.language == "python":
                exec(compile(block.code, page.name, "exec"), {"__name__": "example"})
            for line in lines_of(block) if block.language == "sh" else []:
                for words in commands_in(line):
                    if words[0] == OURS and words[1] != "demo":
                        run(line, words)
                        done.append(words[1])
        return done

    return walked


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_ten_minute_start_leads_to_its_end(walk: Walk, tmp_path: Path) -> None:
    """Its two runs are compared like with like: by the same gap, on the same held-out people."""
    from fpfl.report.comparability import compare
    from fpfl.report.reading import read_run

    for package in ("plotly", "onnx", "onnxscript"):
        pytest.importorskip(package, reason="the path needs the extras report and export")
    assert {"data", "train", "report", "export"} <= set(walk(START))
    (report,) = tmp_path.glob("*.html")
    assert list((tmp_path / "exported").glob("*.onnx")), "the path ends with a model"
    runs = [read_run(tmp_path / name) for name in ("plain", "fair")]
    plain, fair = (run.evaluations["test"] for run in runs)
    assert (plain.users, plain.samples) == (fair.users, fair.samples), "held out alike"
    found, left_out = compare(runs)
    assert not left_out
    (tested,) = [comparison for comparison in found if comparison.source == "test"]
    assert [entry.index for entry in tested.entries] == [0, 1]
    assert tested.measures == fair.gaps["constraint"].measures == plain.gaps["fnr"].measures
    assert [entry.gap for entry in tested.entries] == [
        plain.gaps["fnr"].value,
        fair.gaps["constraint"].value,
    ]
    assert "Not compared" not in report.read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_page_on_own_data_can_be_followed(walk: Walk, tmp_path: Path) -> None:
    assert walk(OWN_DATA) == ["data", "train"]
    assert (tmp_path / "out" / "people" / "evaluation-test.json").exists()


# --- figures, links, the site -----------------------------------------------------------------


def test_figures_are_those_of_the_results_files() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "fill_docs.py"), "--check"]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 0, f"{out.stdout}{out.stderr}run scripts/fill_docs.py"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(
            r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M
        )
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if not target.startswith(("http:", "https:", "mailto:")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


THREATS = ROOT / "docs" / "threat-model.md"


@cache
def named_in(path: Path) -> frozenset[str]:
    """The names of a file's tests."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(
        each.name
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
    )


def test_tests_that_pages_name_exist() -> None:
    """``file.py::test`` is in tests/federation, ``folder/file.py::test`` in tests/folder."""
    named = 0
    for page in PAGES:
        for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
            path = ROOT / "tests" / (file if "/" in file else f"federation/{file}")
            assert path.is_file(), f"{page.name} names {file}"
            assert name in named_in(path), f"{page.name} names {file}::{name}"
            named += 1
    assert named > 50


def test_every_threat_has_a_test_or_says_that_nothing_holds() -> None:
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in THREATS.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    columns = 0
    checked = 0
    for row in rows:
        if row[-1] in ("test", "tests"):
            columns = len(row)
        elif columns and len(row) == columns and not set(row[0]) <= set("- "):
            assert "::test_" in row[-1] or row[1] == row[-1] == "–", row[0]
            checked += 1
    assert checked > 40


@cache
def hooks() -> ModuleType:
    """scripts/docs_hooks.py, which the site is built with."""
    path = ROOT / "scripts" / "docs_hooks.py"
    spec = importlib.util.spec_from_file_location("docs_hooks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_beside_equations_exists() -> None:
    shown = [name for page in PAGES for name in hooks().references(page.read_text("utf-8"))]
    assert len(shown) >= 15
    for name in shown:
        title, first = hooks().source_block(name).splitlines()[:2]
        assert name in title
        assert first.strip()
    with pytest.raises(ValueError, match="nothing_like_it"):
        hooks().source_block("fpfl.methods.mmdm.nothing_like_it")


def test_formulas_are_set() -> None:
    made = hooks()._formula("F_a/n′_a ≤ w_{t−1}^2 & <b>")
    assert "F<sub>a</sub>/n′<sub>a</sub> ≤ w<sub>t−1</sub><sup>2</sup> &amp; &lt;b&gt;" in made


def test_every_public_name_is_in_the_reference() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    documented = {
        n for p in pages for n in re.findall(r"^::: fpfl\.(\w+)$", p.read_text("utf-8"), re.M)
    }
    assert set(fpfl.__all__) - documented == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as strictly as ``make docs`` builds it."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="the site needs the extra docs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return out


def test_the_site_has_sources_commands_and_signatures(site: Path) -> None:
    def words(page: str) -> str:
        return re.sub(r"<[^>]+>", "", (site / page).read_text("utf-8"))

    assert "def update(" in words("concepts.html")
    assert "[[code fpfl" not in words("concepts.html")
    commands = words("reference/cli.html")
    for command in ("fpfl train", "fpfl budget create", "fpfl federation init", "--population"):
        assert command in commands
    assert "cohort" in words("reference/training.html")


def test_the_site_asks_nothing_of_the_network(site: Path) -> None:
    """Scripts, styles, fonts and pictures are the site's own: it opens offline."""
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(PAGES) - 1
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=[\"']?([^\"' >]+)", text)
        loaded += re.findall(r"<link[^>]*rel=[\"']?(?:stylesheet|preconnect)[^>]*", text)
        assert not [each for each in loaded if "//" in each.removeprefix("data:")], page


def test_the_nav_names_files_that_exist() -> None:
    named = re.findall(
        r"^\s+- (?:.*: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M
    )
    assert set(named) == {str(p.relative_to(ROOT / "docs")) for p in PAGES[1:]}
