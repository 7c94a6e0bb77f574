"""The image's recipe: what is pinned, who runs, what is copied; and its steps, run in a folder."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.requirements import hashed
from tests.deploy.conftest import write_program
from tests.deploy.dockerfile import ROOT, plain_environment, read_stages, run_steps

ARGUMENTS, STAGES = read_stages(ROOT / "Dockerfile")
TAG = "{}{}".format(*sys.version_info[:2])


def test_shell_scripts_and_dockerfiles_pass_their_linters() -> None:
    """The extra ``dev`` installs the linters shellcheck and hadolint."""
    scripts = sorted({*ROOT.glob("deploy/**/*.sh"), *ROOT.glob("deploy/**/*.sbatch"), ROOT / ".ci" / "run"})
    assert len(scripts) >= 5
    for tool, paths in (
        ("shellcheck", scripts),
        ("hadolint", [ROOT / "Dockerfile", ROOT / "deploy" / "etl" / "Dockerfile"]),
    ):
        program = Path(sys.executable).parent / tool
        done = subprocess.run([program, *paths], capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == ("", 0)


def test_images_are_pinned_and_run_as_nobody_special() -> None:
    """Base images by digest, a user that is not root, and a process 1 that passes signals on."""
    for path in (ROOT / "Dockerfile", ROOT / "deploy" / "etl" / "Dockerfile"):
        arguments, stages = read_stages(path)
        assert any(re.search(r"@sha256:[0-9a-f]{64}$", value) for value in arguments.values()), path
        assert list(stages.values())[-1].texts("USER") == ["10001:10001"], path
    (entrypoint,) = map(json.loads, STAGES["runtime"].texts("ENTRYPOINT"))
    assert entrypoint[:2] == ["/usr/bin/tini", "--"]
    assert entrypoint[2].endswith("deploy/entrypoint.sh")
    for name in ("entrypoint.sh", "prune.sh", "slurm/node.sh"):  # COPY keeps the mode, and programs start these files
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


def test_all_that_is_pinned_has_hashes() -> None:
    """An image installs nothing else: `make constraints` writes the hashes after the versions."""
    files = [ROOT / "constraints.txt", ROOT / "deploy" / "cuda12.txt", ROOT / "deploy" / "cuda13.txt"]
    pinned = [line.split()[0] for path in files for line in path.read_text().splitlines() if line[0] != "#"]
    report = {
        "install": [{"metadata": dict(zip(("name", "version"), line.split("=="), strict=True))} for line in pinned]
    }
    known = (ROOT / "deploy" / "hashes.txt").read_text()
    assert all(" --hash=sha256:" in line for line in hashed(report, known))
    report["install"][0]["metadata"]["version"] = "0"
    with pytest.raises(ValueError, match=r"no hashes of .*==0; run: make constraints"):
        hashed(report, known)


COMPILED = {"ATen.h", "c_api.h", "libcudart_static.a", "backend_impl.cpython-39-x86_64-linux-gnu.so"}
INSTALLED = (
    "torch/lib/libtorch_cuda.so torch/include/ATen.h nvidia/cu13/lib/libcudart_static.a nvidia/dali/include/c_api.h "
    "nvidia/dali/backend_impl.cpython-39-x86_64-linux-gnu.so "
    f"nvidia/dali/backend_impl.cpython-{TAG}-x86_64-linux-gnu.so"
)
"""Some files that the real packages install."""


@pytest.mark.parametrize(
    ("arguments", "dali"),
    [
        ({"CUDA": "12"}, "nvidia-dali-cuda120>=2.4,<3"),
        ({"CUDA": "none", "TORCH_INDEX": "http://torch"}, "nvidia-dali-cuda120>=2.4,<3"),
        ({"WITH_COMPILE": "1", "EXTRAS": "bench,demo"}, "nvidia-dali-cuda130>=2.4,<3"),
    ],
)
def test_build_steps_ask_pip_for_what_the_arguments_say(tmp_path: Path, arguments: dict[str, str], dali: str) -> None:
    """All of them but apt's, by /bin/sh, with a pip that only writes down what it is asked for."""
    log = tmp_path / "pip.log"
    report = {"install": [{"metadata": {"name": "Braceexpand", "version": "0.1.7"}}]}
    (tmp_path / "pip.py").write_text(
        f"import json, sys\nopen({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"if '--report' in sys.argv: open('report.json', 'w').write({json.dumps(report)!r})\n"
    )
    write_program(
        tmp_path / "python3",
        f"#!/bin/sh\nset -e\n"
        f'if [ "$1 $2" != "-m venv" ]; then exec {sys.executable} "$@"; fi\n'
        f'{sys.executable} -m venv --without-pip "$3"\n'
        f'packages=$("$3/bin/python3" -c "import sysconfig; print(sysconfig.get_path(\'purelib\'))")\n'
        f'for file in {INSTALLED}; do mkdir -p "$packages/${{file%/*}}"; touch "$packages/$file"; done\n'
        f'cp {tmp_path}/pip.py "$packages/pip.py"\n'
        f'printf \'#!/bin/sh\\nexec "%s/bin/python3" -m pip "$@"\\n\' "$3" > "$3/bin/pip"\n'
        f'chmod +x "$3/bin/pip"\n',
    )
    environment = plain_environment(tmp_path / "root/opt/venv/bin", tmp_path)
    run_steps(STAGES["build"], tmp_path / "root", arguments=arguments, environment=environment, skip="apt-get")
    asked = log.read_text().splitlines()
    installs = [line for line in asked if line.startswith("install ")]
    assert installs == [
        *["install --no-deps --index-url http://torch -c pins.txt torch torchvision"] * ("TORCH_INDEX" in arguments),
        "install --dry-run --quiet --report report.json -c pins.txt -r requirements.txt",
        "install --require-hashes --only-binary :all: --no-deps -r hashed.txt",
        "install --no-cache-dir --no-deps --no-build-isolation .",
    ]
    build = tmp_path / "root" / "build"
    assert re.fullmatch(r"braceexpand==0\.1\.7.*( --hash=sha256:[0-9a-f]{64})+\n", (build / "hashed.txt").read_text())
    lines = (build / "requirements.txt").read_text().splitlines()
    assert dali in lines
    assert ("scikit-image>=0.25" in lines) == ("demo" in arguments.get("EXTRAS", ""))
    torch = "2.10.0" if arguments.get("CUDA") == "12" else "2.15.0"
    assert re.findall(r"^torch==([0-9.]+)", (build / "pins.txt").read_text(), re.MULTILINE) == [torch]
    left = {path.name for path in (tmp_path / "root/opt/venv").rglob("*") if path.is_file()}
    assert {"libtorch_cuda.so", f"backend_impl.cpython-{TAG}-x86_64-linux-gnu.so"} <= left
    assert COMPILED & left == (COMPILED if "WITH_COMPILE" in arguments else set())
    assert ("uninstall --quiet --yes triton" in asked) == ("WITH_COMPILE" not in arguments)


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
