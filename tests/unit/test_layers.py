"""The one import direction of ARCHITECTURE: every room imports only from rooms before it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "agentspec"

# ARCHITECTURE's list, with the parts of the entry points spelled out. Rooms of one tuple may import
# each other (not in a circle, Python sees to that).
LAYERS = (
    ("types", "progress"),
    ("settings",),
    ("configuration",),
    ("rng", "mesh", "metrics", "collapse", "workdir"),
    ("tokens",),
    ("rewards",),
    ("tasks",),
    ("model",),
    ("rollout",),
    ("envs",),
    ("speculation",),
    ("losses",),
    ("phases", "optim", "state", "update", "checkpoint"),
    ("job",),
    ("collect", "scoring", "stage"),
    ("imitate",),
    ("chips", "costs", "plan_programs", "plan_sampling", "plan_report"),
    ("entry", "train", "evaluate", "export", "plan"),
    ("report", "report_data", "report_charts", "report_page"),
)
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
NO_JAX = ("types", "settings", "configuration", "rewards", "tasks", "envs")
FORBIDDEN_NAMES = {"util", "utils", "common", "core", "helper", "helpers", "manager", "managers"}
MAX_LINES = 500


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The room of a file: its top-level package, or its own name at the top level."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_names(tree: ast.AST, path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, also those inside functions; relative ones resolved."""
    package = ("agentspec", *path.relative_to(PACKAGE).parts[:-1])
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *base.split(".")])
                base = base.strip(".")
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def violations(source: str, path: Path) -> list[str]:
    own = room_of(path)
    bad = []
    for line, name in imported_names(ast.parse(source), path):
        parts = name.split(".")
        if parts[0] != "agentspec" or len(parts) < 2:
            continue
        other = parts[1]
        if other not in RANK:
            bad.append(f"{path.name}:{line}: {name} belongs to no room in LAYERS")
        elif other != own and RANK[other] > RANK[own]:
            bad.append(f"{path.name}:{line}: {own} imports {other}, which comes after it")
    return bad


def test_every_file_belongs_to_a_room():
    rooms = {room_of(path) for path in modules()} - {"__init__"}
    assert rooms <= set(RANK), f"add to LAYERS: {sorted(rooms - set(RANK))}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_from_rooms_before(path):
    if room_of(path) == "__init__":
        names = imported_names(ast.parse(path.read_text(encoding="utf-8")), path)
        assert not [name for _, name in names if name.startswith("agentspec")]
        return
    assert violations(path.read_text(encoding="utf-8"), path) == []


@pytest.mark.parametrize(
    ("room", "source", "expected"),
    [
        ("tokens/x.py", "from agentspec.types import ToolCall", 0),
        ("tokens/x.py", "from agentspec.model import weights", 1),
        ("tokens/x.py", "import agentspec.train", 1),
        ("tokens/x.py", "def f():\n    from agentspec import update", 1),
        ("tokens/x.py", "from . import chat\nfrom .parse import parse_turn", 0),
        ("tokens/x.py", "from ..envs import base", 1),
        ("speculation/speculators/x.py", "from ...train import main", 1),
        ("speculation/speculators/x.py", "from ..clock import SimulatedLoop", 0),
        ("train.py", "from agentspec.losses.policy import policy_loss", 0),
        ("types.py", "from agentspec.configuration import Config", 1),
    ],
)
def test_the_rule_itself(room, source, expected):
    assert len(violations(source, PACKAGE / room)) == expected


@pytest.mark.parametrize(
    "path",
    [p for p in modules() if room_of(p) in NO_JAX],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_host_side_rooms_do_not_import_jax(path):
    names = imported_names(ast.parse(path.read_text(encoding="utf-8")), path)
    roots = {name.split(".")[0] for _, name in names}
    assert roots.isdisjoint({"jax", "flax", "optax", "torch"})


def test_only_entry_points_see_the_config():
    allowed = {"configuration", "train", "evaluate", "export", "plan"}
    for path in modules():
        names = imported_names(ast.parse(path.read_text(encoding="utf-8")), path)
        if "ml_collections" in {name.split(".")[0] for _, name in names}:
            assert room_of(path) in allowed, path


def test_torch_is_for_tests_only():
    for path in modules():
        names = imported_names(ast.parse(path.read_text(encoding="utf-8")), path)
        assert "torch" not in {name.split(".")[0] for _, name in names}, path


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_house_rules_of_files(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert not FORBIDDEN_NAMES & {part.removesuffix(".py") for part in path.parts[-3:]}
    assert ast.get_docstring(ast.parse(text)), "a module docstring is missing"


def test_median_file_is_short():
    lengths = sorted(len(p.read_text(encoding="utf-8").splitlines()) for p in modules())
    assert lengths[len(lengths) // 2] < 200
