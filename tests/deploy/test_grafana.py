"""The dashboard: every figure is shown, every name in it exists, and Compose puts each file where Grafana looks."""

import json
import re
from typing import Any

import yaml

from dali_pipes.metrics.figures import FIGURES
from tests.deploy.commands import parse_training
from tests.deploy.dockerfile import ROOT
from tests.deploy.test_compose import WATCHERS, compose

FOLDER = ROOT / "deploy" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())


def queries() -> list[str]:
    """Those of all panels, and of the variables."""
    variables = [one["query"] for one in DASHBOARD["templating"]["list"]]
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*shown, *(query["query"] for query in variables if isinstance(query, dict))]


def test_every_figure_is_shown_and_no_other() -> None:
    named = {name for query in queries() for name in re.findall(r"dali_pipes_\w+", query)}
    assert named == {figure.metric for figure in FIGURES}


def test_compose_mounts_the_files_where_the_programs_look() -> None:
    file = compose()
    for name in WATCHERS:
        service = file["services"][name]
        assert service["profiles"] == ["watch"]
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "a version, not the newest"
        for config in service["configs"]:
            assert (ROOT / "deploy" / file["configs"][config["source"]]["file"]).is_file()
    targets = {one["source"]: one["target"] for name in WATCHERS for one in file["services"][name]["configs"]}
    assert f"--config.file={targets['prometheus']}" in file["services"]["prometheus"]["command"]
    (provider,) = yaml.safe_load((FOLDER / "provisioning" / "dashboards.yaml").read_text())["providers"]
    assert targets["dashboard"].startswith(provider["options"]["path"] + "/")


def test_prometheus_asks_where_jobs_answer() -> None:
    """The default port of `serve`, which the composed jobs take."""
    import inspect

    from dali_pipes.metrics.prometheus import serve

    (job,) = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    port = inspect.signature(serve).parameters["port"].default
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]
    for name in ("train", "train-gpu"):
        service = compose()["services"][name]
        assert parse_training(service["command"])[1]["metrics_port"] == port
        assert "metrics" in service["build"]["args"]["EXTRAS"].split(",")
