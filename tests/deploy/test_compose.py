"""The composed cluster and the dashboard beside it."""

import json
import re
from importlib import resources
from typing import Any

import jsonschema
import yaml

from dali_pipes.metrics.figures import FIGURES
from tests.deploy.commands import parse_training
from tests.deploy.dockerfile import ROOT

COMPOSE = ROOT / "deploy" / "compose.yaml"
FOLDER = ROOT / "deploy" / "grafana"


def compose(**variables: str) -> dict[str, Any]:
    """The file as ``docker compose`` reads it: ``${NAME:-default}`` filled in, anchors merged."""
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1]) or match[2], COMPOSE.read_text())
    assert "${" not in text
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


def test_compose_file_is_valid() -> None:
    """By the Compose specification's schema, which check-jsonschema brings along."""
    schema = json.loads(
        resources.files("check_jsonschema.builtin_schemas.vendor").joinpath("compose-spec.json").read_text()
    )
    jsonschema.validate(compose(), schema)


def test_compose_redirects_lead_to_published_ports() -> None:
    """A node is published on the address and port by which it names itself to clients; jobs start at the proxy's."""
    services = compose(AIS_HOST="192.0.2.7")["services"]
    for name in ("proxy", "target"):
        _, port = services[name]["command"]
        assert services[name]["environment"]["HOSTNAME_LIST"] == "192.0.2.7"
        assert services[name]["ports"] == [f"192.0.2.7:{port}:{port}"]
    for name in ("prep", "train", "train-gpu", "bench"):
        assert services[name]["environment"]["AIS_ENDPOINT"] == f"http://192.0.2.7:{services['proxy']['command'][1]}"
        # Anywhere else 127.0.0.1, to which the proxy sends them, is the container itself.
        assert services[name]["network_mode"] == "host"
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "pid", "ipc"} & service.keys(), name
        assert not [volume for volume in service.get("volumes", []) if volume.startswith(("/", "."))], name


def test_every_figure_is_shown_and_no_other() -> None:
    """The panels and variables of the dashboard name every figure, and no other."""
    dashboard: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [one["query"] for one in dashboard["templating"]["list"]]
    queries += [query["query"] for query in variables if isinstance(query, dict)]
    named = {name for query in queries for name in re.findall(r"dali_pipes_\w+", query)}
    assert named == {figure.metric for figure in FIGURES}


def test_compose_mounts_the_files_where_the_programs_look() -> None:
    file = compose()
    watchers = ("prometheus", "grafana")
    for name in watchers:
        service = file["services"][name]
        assert service["profiles"] == ["watch"]
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "a version, not the newest"
        for config in service["configs"]:
            assert (ROOT / "deploy" / file["configs"][config["source"]]["file"]).is_file()
    targets = {one["source"]: one["target"] for name in watchers for one in file["services"][name]["configs"]}
    assert f"--config.file={targets['prometheus']}" in file["services"]["prometheus"]["command"]
    (provider,) = yaml.safe_load((FOLDER / "provisioning" / "dashboards.yaml").read_text())["providers"]
    assert targets["dashboard"].startswith(provider["options"]["path"] + "/")


def test_prometheus_asks_where_jobs_answer() -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    for name in ("train", "train-gpu"):
        service = compose()["services"][name]
        port = parse_training(service["command"])[1]["metrics_port"]
        assert job["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]
        assert "metrics" in service["build"]["args"]["EXTRAS"].split(",")
