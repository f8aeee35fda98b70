"""What ``mkdocs build`` asks of the code: sources beside equations, the commands' help, formulas.

Three things in a page are replaced when the site is built, so that they cannot get out of date:

- a line ``[[code fpfl.methods.mmdm.MMDM.update]]`` becomes the source of what it names;
- a line ``[[commands]]`` becomes the help of every command of ``fpfl``;
- a fenced block ``formula`` becomes a formula: ``_x``, ``_{xy}`` and ``^x`` are set low and high.
"""

from __future__ import annotations

import html
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
if str(SOURCE) not in sys.path:
    sys.path.insert(0, str(SOURCE))

_CODE = re.compile(r"^\[\[code ([\w.]+)\]\]$", re.M)
_COMMANDS = re.compile(r"^\[\[commands\]\]$", re.M)
_SCRIPT = re.compile(r"([_^])(?:\{([^{}]*)\}|(\w))")


def on_config(config: Any) -> Any:
    """Teach the fenced blocks the language ``formula``."""
    fences = config["mdx_configs"].setdefault("pymdownx.superfences", {})
    fences.setdefault("custom_fences", []).append(
        {"name": "formula", "class": "formula", "format": _formula}
    )
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put sources and help in their places."""
    markdown = _CODE.sub(lambda found: source_block(found[1]), markdown)
    return _COMMANDS.sub(lambda _: commands(), markdown)


def references(markdown: str) -> list[str]:
    """The names whose source a page shows."""
    return _CODE.findall(markdown)


def find(name: str) -> Any:
    """What a dotted name stands for: a module's function or class, or a class's method."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # a package that is missing, not a name that is no module
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                raise ValueError(f"a page shows the code of {name!r}: there is no {part!r} in it")
            found = getattr(found, part)
        found = getattr(found, "func", found)  # a cached property's own function
        return found.fget if isinstance(found, property) else inspect.unwrap(found)
    raise ValueError(f"a page shows the code of {name!r}, which is nowhere in fpfl")


def source_block(name: str) -> str:
    """The source of a function or class, as a fenced block with its name and place."""
    found = find(name)
    code = textwrap.dedent(inspect.getsource(found)).rstrip()
    path = Path(inspect.getsourcefile(found) or "").resolve().relative_to(SOURCE)
    fence = "`" * 4
    return f'{fence}python title="{name} ({path})"\n{code}\n{fence}'


def commands() -> str:
    """The help of every command, one section each, from the command line's own parser."""
    import typer.main

    from fpfl.cli import app

    parts = []
    for words, command in _leaves("fpfl", typer.main.get_command(app)):
        parts += [f"## {words}", "", _plain_help(command), ""]
        parts += _parameters(words, command)
    return "\n".join(parts)


def _leaves(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name, each in inner.items():
        if not each.hidden:
            yield from _leaves(f"{words} {name}", each)


def _plain_help(command: Any) -> str:
    return inspect.cleandoc(command.help or "").replace("\f", "")


def _parameters(words: str, command: Any) -> list[str]:
    """The call, and a table of options; arguments are explained in the command's own help."""
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    call = [words, *(_argument(p) for p in arguments)]
    call += [f"{p.opts[0]} {_metavar(p)}" for p in options if p.required]
    call += ["[OPTIONS]"] if len(options) > sum(p.required for p in options) else []
    lines = ["```text", " ".join(call), "```", ""]
    rows = []
    for p in options:
        names = ", ".join([*p.opts, *p.secondary_opts])
        rows.append((names if getattr(p, "is_flag", False) else f"{names} {_metavar(p)}", p))
    if rows:
        lines += ["| | | by default |", "| --- | --- | --- |"]
    for name, p in rows:
        about = " ".join((p.help or "").split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {html.escape(about, quote=False)} | {_default(p)} |")
    return [*lines, ""]


def _metavar(p: Any) -> str:
    return str(p.metavar or p.type.name.upper())


def _argument(p: Any) -> str:
    name = str(p.metavar or p.name).upper()
    many = f"{name}..." if p.nargs == -1 else name
    return many if p.required else f"[{many}]"


def _default(p: Any) -> str:
    if p.required:
        return "needed"
    if p.default is None or callable(p.default) or p.default in ((), [], ""):
        return ""
    return "yes" if p.default is True else "no" if p.default is False else f"`{p.default}`"


def _formula(source: str, *_: Any, **__: Any) -> str:
    """A formula as HTML that needs no script: text, with what stands low and high."""
    lines = []
    for line in source.splitlines():
        text = html.escape(line)
        while _SCRIPT.search(text):  # from the inside out
            text = _SCRIPT.sub(_set, text)
        lines.append(text)
    return '<div class="formula" role="math">' + "\n".join(lines) + "</div>"


def _set(found: re.Match[str]) -> str:
    tag = "sub" if found[1] == "_" else "sup"
    return f"<{tag}>{found[2] if found[2] is not None else found[3]}</{tag}>"
