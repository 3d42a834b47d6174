"""The README's generated parts are up to date. `python tests/test_readme.py` rewrites them."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import get_args, get_origin

import pytest

ROOT = Path(__file__).parent.parent
README, RECIPES = ROOT / "README.md", ROOT / "recipes/README.md"
FOLDERS = ("slmgrpo", "rewards", "eval")
WIDTH = 34


def file_map() -> str:
    """Every module with its docstring's first line, folder by folder."""
    lines = ["```"]
    for folder in FOLDERS:
        files = sorted((ROOT / folder).rglob("*.py"), key=lambda f: (f.parent.relative_to(ROOT).as_posix(), f.name))
        for file in (f for f in files if f.name != "__init__.py" and not _through_a_link(f)):
            doc = ast.get_docstring(ast.parse(file.read_text())) or ""
            lines.append(f"{file.relative_to(ROOT).as_posix():<{WIDTH}}{doc.splitlines()[0] if doc else ''}".rstrip())
    return "\n".join([*lines, "```"])


def _through_a_link(file: Path) -> bool:
    return any(parent.is_symlink() for parent in file.parents if parent != ROOT and ROOT in parent.parents)


def cli_reference() -> str:
    """Every command with its arguments, options and example, from the help texts."""
    import typer

    from slmgrpo.cli import app

    lines = []
    for path, command in _commands(typer.main.get_command(app), "slmgrpo"):
        doc = " ".join((command.help or "").split())
        lines.append(f"- `{path}{_arguments(command)}`: {doc}")
        for option in (p for p in command.params if p.param_type_name == "option" and p.name != "help"):
            lines.append(f"  - `{option.opts[0]}` {vars(option).get('help') or ''}")
    return "\n".join(lines)


def _commands(command, path: str):
    subcommands = getattr(command, "commands", None)
    if subcommands is None or getattr(command, "invoke_without_command", False):
        yield path, command
    for name, child in (subcommands or {}).items():
        yield from _commands(child, f"{path} {name}")


def _arguments(command) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    names = [(p.metavar or p.name.upper(), p.required) for p in arguments]
    return "".join(f" {name}" if required else f" [{name}]" for name, required in names)


def recipe_keys() -> str:
    """Every key of a recipe with its default and meaning, from the typed sections."""
    from slmgrpo.recipe import Example, Recipe, RewardUse, Source

    items = {
        "A source, in `data.train`, `data.heldout` and `cold_start.data`:": Source,
        "A rule, in `rewards` and in a source's `rewards`:": RewardUse,
        "An example, in `prompt.examples`:": Example,
    }
    head = ["| key | default | |", "|---|---|---|"]
    lines = [*head, *_keys(Recipe, "")]
    for title, section in items.items():
        lines += ["", title, "", *head, *_keys(section, "")]
    return "\n".join(lines)


def _keys(section, prefix: str):
    for name, field in section.model_fields.items():
        key, meaning = f"{prefix}{field.serialization_alias or name}", " ".join((field.description or "").split())
        parts = list(_parts(field.annotation))
        inner = next((part for part in parts if hasattr(part, "model_fields")), None)
        if inner is not None and not any(get_origin(part) is list for part in parts):
            if not field.is_required() and field.default is None:
                yield f"| `{key}` | `null` | {meaning} |"
            yield from _keys(inner, f"{key}.")
            continue
        default = "needed" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
        choices = [value for part in parts for value in get_args(part) if isinstance(value, str)]
        listed = f" One of {', '.join(choices)}." if len(choices) > 1 else ""
        yield f"| `{key}` | {default} | {meaning}{listed} |"


def _parts(annotation):
    """An annotation and what stands in its brackets."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


PARTS = {README: {"file map": file_map, "commands": cli_reference}, RECIPES: {"keys": recipe_keys}}


def generated(file: Path) -> str:
    text = file.read_text()
    for name, make in PARTS[file].items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        assert re.search(pattern, text, re.DOTALL), f"{file.name} has no part `{name}`"
        text = re.sub(pattern, lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text, flags=re.DOTALL)
    return text


@pytest.mark.parametrize("file", PARTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_generated_parts_of_the_documents_are_up_to_date(file: Path) -> None:
    assert file.read_text() == generated(file), "run `python tests/test_readme.py`"


def test_the_readme_has_no_blanks_left() -> None:
    assert not re.findall(r"@[A-Z_]+@", README.read_text())


def test_every_module_says_in_one_line_what_it_is_for() -> None:
    lines = [line for line in file_map().splitlines() if line.endswith(".py")]
    assert not lines


def test_the_readme_holds_exactly_the_two_commands_that_ci_runs() -> None:
    commands = [line for line in README.read_text().splitlines() if line.startswith("python3 -m venv ")]
    assert len(commands) == 2
    start = "python3 -m venv .venv && . .venv/bin/activate && pip install -e "
    assert all(command.startswith(start) for command in commands)


def test_no_tracked_text_names_a_build_machine_or_a_registry_host() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    bad = re.compile(r"(^|[^\w])/(work|farm|opt/venv)/|pypi\.org|files\.pythonhosted|registry\.npmjs|deb\.debian")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        file = ROOT / name
        if file == Path(__file__).resolve() or file.is_symlink() or file.suffix in {".safetensors", ".parquet", ".png"}:
            continue
        found += [f"{name}: {line}" for line in file.read_text().splitlines() if bad.search(line)]
    assert not found


if __name__ == "__main__":
    for document in PARTS:
        document.write_text(generated(document))
