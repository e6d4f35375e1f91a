"""The files by which others take part: they name what there is."""

import tomllib

import yaml
from conftest import ROOT

import toolkit


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == toolkit.__version__
    assert citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")[:200]


def test_hooks_run_tools_that_make_install_brings() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    commands = [hook["entry"].split()[0] for repo in hooks for hook in repo["hooks"]]
    checks = (ROOT / "Makefile").read_text("utf-8").split("\ncheck:")[1].split("\n\n")[0]
    for command in commands:
        assert command.replace(".venv", "$(VENV)").replace("$(VENV)/bin", "$(BIN)") in checks


def test_the_workflow_runs_what_ci_runs_on_a_python_that_is_allowed() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    steps = workflow["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    (version,) = [step["with"]["python-version"] for step in steps if "with" in step]
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]
    assert ruff["target-version"] == f"py{version.replace('.', '')}"
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
