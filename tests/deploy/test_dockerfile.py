"""The Dockerfiles: pinned images and packages, the user, the files that are copied."""

import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.requirements import hashed
from tests.deploy.dockerfile import ROOT, read_stages

ARGUMENTS, STAGES = read_stages(ROOT / "Dockerfile")


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
    """An image installs only packages with hashes. `make constraints` writes versions and hashes."""
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
