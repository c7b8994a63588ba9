"""rot.py, losses.py and metrics.py work alone: each is copied into an empty folder and its docstring example is run there."""
import ast
import itertools
import subprocess
import sys
import textwrap

import pytest
from conftest import PATIENCE, REPO

ALLOWED = {"rot": {"math", "torch", "typing", "warnings"}, "losses": {"torch"}, "metrics": {"numpy", "scipy", "sklearn"}}


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_runs_alone(name, tmp_path):
    source = (REPO / f"{name}.py").read_text()
    tree = ast.parse(source)
    parts = ast.get_docstring(tree).split("\n\n")[1:]
    example = "\n\n".join(itertools.takewhile(lambda part: part.startswith("    "), parts))
    (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "example.py").write_text(textwrap.dedent(example))
    assert "import" in example and 5 <= len(example.splitlines()) <= 12
    done = subprocess.run([sys.executable, "-I", "-c", "import sys; sys.path.insert(0, '.'); exec(open('example.py').read())"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or name == "losses"


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_imports_nothing_but_the_named_packages(name):
    tree = ast.parse((REPO / f"{name}.py").read_text())
    found = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert found <= ALLOWED[name], found - ALLOWED[name]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
