"""pyproject.toml, requirements.lock and environment.yml say the same, and it is what runs here."""

import re
import sys
import sysconfig
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# A package that environment.yml names, perhaps commented out, with why it is there.
CONDA_LINE = re.compile(r"^ +(?:# )?- (?P<name>[\w.-]+)==(?P<version>\S+)(?:  # (?P<why>.+))?$")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def direct() -> dict[str, Requirement]:
    """Every dependency that pyproject.toml names, those of the extras too."""
    lines = project()["dependencies"] + sum(project()["optional-dependencies"].values(), [])
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


@cache
def lock() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line]
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert len(dict(pins)) == len(pins), "a package is pinned twice"
    return dict(pins)


@cache
def conda() -> dict[str, re.Match]:
    lines = (ROOT / "environment.yml").read_text().splitlines()
    found = [match for line in lines if (match := CONDA_LINE.match(line))]
    return {match["name"]: match for match in found}


@pytest.mark.parametrize("name", direct())
def test_every_direct_dependency_is_pinned(name):
    assert name in lock(), "run `make lock`"
    assert direct()[name].specifier.contains(lock()[name])


@pytest.mark.parametrize("name", direct())
def test_the_conda_road_has_the_same_pin_and_says_why(name):
    assert name in conda(), "name it in environment.yml"
    assert conda()[name]["version"] == lock()[name]
    assert conda()[name]["why"], "say why it is there"


def test_the_conda_road_has_nothing_else():
    assert set(conda()) == set(direct())


def test_conda_reads_what_the_lines_say():
    yaml = pytest.importorskip("yaml")
    (pip,) = [
        entry["pip"]
        for entry in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
        if isinstance(entry, dict)
    ]
    extras = project()["optional-dependencies"]
    peers = {canonicalize_name(Requirement(line).name) for line in extras["peers"]}
    pinned = [f"{name}=={lock()[name]}" for name in direct() if name not in peers]
    assert sorted(pip) == sorted(["-c requirements.lock", "-e .", *pinned])


def test_pins_work_on_any_machine():
    for name, pinned in lock().items():
        assert name == canonicalize_name(name)
        assert re.fullmatch(r"\d[\w.]*", pinned), f"{name}: no build of one machine, such as +cpu"


def test_what_is_installed_here_is_what_is_pinned():
    # Where pip installs; setuptools, once imported, adds the copies that it brings to sys.path.
    here = distributions(path=[sysconfig.get_path("purelib")])
    installed = {canonicalize_name(d.name): d.version.split("+")[0] for d in here}
    assert "torch" in installed
    other = {n: v for n, v in installed.items() if n in lock() and v != lock()[n]}
    assert other == {}, "repeat the set-up, or run `make lock`"


@pytest.mark.skipif(sys.platform != "linux", reason="the lock is made on Linux")
def test_what_the_dependencies_need_in_turn_is_pinned():
    needed, todo = set(), ["sharded-training-course"]
    while todo:
        name = todo.pop()
        for requirement in _needs(name, extra="dev" if name == "sharded-training-course" else ""):
            if requirement not in needed:
                needed.add(requirement)
                todo.append(requirement)
    unpinned = {n for n in needed - set(lock()) if not n.startswith(("nvidia", "cuda", "triton"))}
    assert unpinned == set()


def _needs(name: str, extra: str) -> set[str]:
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return set()
    found = map(Requirement, lines)
    return {
        canonicalize_name(r.name)
        for r in found
        if r.marker is None or r.marker.evaluate({"extra": extra})
    }
