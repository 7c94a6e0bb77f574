"""The image's recipe: what is pinned, who runs, what is copied; and its steps, run in a folder."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.requirements import main as print_requirements
from deploy.requirements import requirements
from tests.deploy.conftest import SHIMS, write_program
from tests.deploy.dockerfile import ROOT, plain_environment, read_stages, run_steps

ARGUMENTS, STAGES = read_stages(ROOT / "Dockerfile")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lint(tool: str, *paths: Path) -> None:
    """A linter finds nothing; it comes with the extra ``dev``."""
    program = Path(sys.executable).parent / tool
    assert program.exists(), f"{tool} is not installed: pip install '.[dev]'"
    done = subprocess.run([program, *paths], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


def test_shell_scripts_pass_shellcheck() -> None:
    scripts = sorted({*ROOT.glob("deploy/**/*.sh"), *ROOT.glob("deploy/**/*.sbatch"), ROOT / ".ci" / "run"})
    assert len(scripts) >= 5
    lint("shellcheck", *scripts)


def test_dockerfiles_pass_hadolint() -> None:
    lint("hadolint", ROOT / "Dockerfile", ROOT / "deploy" / "etl" / "Dockerfile")


def test_images_are_pinned_and_run_as_nobody_special() -> None:
    """Base images by digest, a user that is not root, and a process 1 that passes signals on."""
    for path in (ROOT / "Dockerfile", ROOT / "deploy" / "etl" / "Dockerfile"):
        arguments, stages = read_stages(path)
        assert any(re.search(r"@sha256:[0-9a-f]{64}$", value) for value in arguments.values()), path
        assert list(stages.values())[-1].texts("USER") == ["10001:10001"], path
    (entrypoint,) = map(json.loads, STAGES["runtime"].texts("ENTRYPOINT"))
    assert entrypoint[:2] == ["/usr/bin/tini", "--"]
    assert entrypoint[2].endswith("deploy/entrypoint.sh")
    for name in ("entrypoint.sh", "prune.sh", "slurm/node.sh"):  # COPY keeps modes, and srun starts files
        assert os.access(ROOT / "deploy" / name, os.X_OK), name


def test_whatever_is_copied_gets_past_dockerignore() -> None:
    """The list says what goes in, so that data and secrets of a checkout cannot: a new source has to be named."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = [line[1:] for line in lines if line.startswith("!")]
    copied = [words.split()[:-1] for stage in STAGES.values() for words in stage.texts("COPY")]
    sources = {source for words in copied if not words[0].startswith("--from") for source in words if source != "."}
    etl = re.findall(r"^COPY (.*) \S+$", (ROOT / "deploy/etl/Dockerfile").read_text(), re.MULTILINE)
    sources |= {source for words in etl for source in words.split()}
    assert {"prep", "dali_pipes", "bench", "examples", "constraints.txt"} <= sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, name) or source.startswith(f"{name}/") for name in allowed), source
    for name in (".git", "runs", "data", ".env"):
        assert name not in allowed


def test_both_builds_of_dali_are_pinned_to_the_same_versions() -> None:
    """constraints.txt has the build for CUDA 12; a forgotten line beside it would let pip take any version."""

    def pins(path: Path) -> dict[str, str]:
        found = re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(), re.MULTILINE)
        return {re.sub(r"(-cu12|-cu13|120|130)$", "", name): version for name, version in found}

    main, other = pins(ROOT / "constraints.txt"), pins(ROOT / "deploy" / "cuda13.txt")
    assert len(other) == 6
    for name, version in other.items():
        # nvJPEG belongs to CUDA, and has its number.
        assert name == "nvidia-nvjpeg" or main[name] == version, name


def test_requirements_refuses_what_there_is_not() -> None:
    project = {"name": "p", "dependencies": ["nvidia-dali-cuda120>=2"], "optional-dependencies": {"a": ["x"]}}
    with pytest.raises(ValueError, match=r"'nonsense', which pyproject.toml does not have \(found: a\)"):
        requirements(project, extras=["nonsense"], cuda="13")
    with pytest.raises(ValueError, match=r"--cuda must be one of 12, 13, 12\+13, none, got '11'"):
        requirements(project, extras=[], cuda="11")


def test_requirements_are_those_of_the_project_and_its_extras(capsys: pytest.CaptureFixture[str]) -> None:
    """Extras of extras, too, each line once, and one build of DALI."""
    assert print_requirements(["--extras", "dev", "--cuda", "13"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(set(lines)) == len(lines)
    assert [line for line in lines if "dali" in line] == ["nvidia-dali-cuda130>=2.4,<3"]
    optional = PROJECT["optional-dependencies"]
    everything = [*PROJECT["dependencies"], *(line for lines in optional.values() for line in lines)]
    wanted = {line for line in everything if not line.startswith(("dali-pipes[", "nvidia-dali"))}
    assert wanted - set(lines) <= {line for extra in set(optional) - {"dev"} for line in optional[extra]}
    assert set(lines) - wanted == {"nvidia-dali-cuda130>=2.4,<3"}


@pytest.mark.parametrize(
    ("arguments", "dali", "num_installs"),
    [
        ({"CUDA": "12"}, "nvidia-dali-cuda120>=2.4,<3", 2),
        ({"CUDA": "none", "TORCH_INDEX": "https://download.pytorch.org/whl/cpu"}, "nvidia-dali-cuda120>=2.4,<3", 3),
        ({"WITH_COMPILE": "1", "EXTRAS": "bench,demo"}, "nvidia-dali-cuda130>=2.4,<3", 2),
    ],
)
def test_build_steps_ask_pip_for_what_the_arguments_say(
    tmp_path: Path, arguments: dict[str, str], dali: str, num_installs: int
) -> None:
    """All of them but apt's, by /bin/sh, with a pip that only writes down what it is asked for."""
    log = tmp_path / "pip.log"
    write_program(
        tmp_path / "python3",
        f"#!/bin/sh\nset -e\n"
        f'if [ "$1 $2" != "-m venv" ]; then exec {sys.executable} "$@"; fi\n'
        f'{sys.executable} -m venv --without-pip "$3"\n'
        f'packages=$("$3/bin/python3" -c "import sysconfig; print(sysconfig.get_path(\'purelib\'))")\n'
        f'cp {SHIMS / "pip.py"} "$packages/pip.py"\n'
        f'printf \'#!/bin/sh\\nexec "%s/bin/python3" -m pip "$@"\\n\' "$3" > "$3/bin/pip"\n'
        f'chmod +x "$3/bin/pip"\n',
    )
    environment = plain_environment(tmp_path / "root/opt/venv/bin", tmp_path) | {"PIP_LOG_OF_TEST": str(log)}
    run_steps(STAGES["build"], tmp_path / "root", arguments=arguments, environment=environment, skip="apt-get")
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    installs = [words for words in asked if words[0] == "install"]
    assert len(installs) == num_installs
    assert installs[-1] == ["install", "--no-cache-dir", "--no-deps", "."]
    for words in installs[:-1]:
        assert words[words.index("-c") + 1] == "pins.txt"
    build = tmp_path / "root" / "build"
    lines = (build / "requirements.txt").read_text().splitlines()
    assert dali in lines
    torch = "2.10.0" if arguments.get("CUDA") == "12" else "2.15.0"
    assert re.findall(r"^torch==([0-9.]+)", (build / "pins.txt").read_text(), re.MULTILINE) == [torch]
    assert ("scikit-image>=0.25" in lines) == ("demo" in arguments.get("EXTRAS", ""))
    if "TORCH_INDEX" in arguments:
        assert installs[0][1:4] == ["--no-deps", "--index-url", arguments["TORCH_INDEX"]]
        assert installs[0][-2:] == ["torch", "torchvision"]
    left = {path.name for path in (tmp_path / "root/opt/venv").rglob("*") if path.is_file()}
    compiled = {"ATen.h", "cuda.h", "c_api.h", "libcudart_static.a", "backend_impl.cpython-39-x86_64-linux-gnu.so"}
    assert {"libtorch_cuda.so", "libcudart.so.13"} <= left
    assert sum(name.startswith("backend_impl") for name in left) == (2 if "WITH_COMPILE" in arguments else 1)
    assert compiled & left == (compiled if "WITH_COMPILE" in arguments else set())
    assert (["uninstall", "--quiet", "--yes", "triton"] in asked) == ("WITH_COMPILE" not in arguments)


def test_prune_refuses_another_environment() -> None:
    """What it removes would not be what it thinks."""
    done = subprocess.run([ROOT / "deploy/prune.sh", "/usr"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no torch and no nvidia/dali" in done.stderr


@pytest.mark.nightly
@pytest.mark.skipif("BUILD_IMAGE_IN" not in os.environ, reason="downloads 3 GB: BUILD_IMAGE_IN=DIR names where to")
def test_build_steps_make_an_environment_that_trains() -> None:
    """The real thing, by hand: the build stage's steps below a directory with 12 GB, then a training from it."""
    folder = Path(os.environ["BUILD_IMAGE_IN"])
    (folder / "tmp").mkdir(parents=True)
    environment = plain_environment(folder / "opt/venv/bin") | {"TMPDIR": str(folder / "tmp"), "HOME": str(folder)}
    run_steps(STAGES["build"], folder, arguments={"EXTRAS": "bench,demo"}, environment=environment, skip="apt-get")
    shutil.copytree(ROOT / "examples", folder / "examples")
    for words in (
        ["prep", "pack", "demo", "ais://demo", "--count", "60", "--max-count", "20"],
        ["prep", "index", "ais://demo/samples-"],
        ["python3", "examples/segmentation.py", "--shards", "ais://demo/samples-", "--out", "run", "--epochs", "1"],
    ):
        subprocess.run([ROOT / "deploy/entrypoint.sh", *words], cwd=folder, env=environment, check=True)
