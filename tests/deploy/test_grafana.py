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
LABELS = {"data_set", "loader", "rank", "instance"}


def queries() -> list[str]:
    """Those of all panels, and of the variables."""
    variables = [one["query"] for one in DASHBOARD["templating"]["list"]]
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*shown, *(query["query"] for query in variables if isinstance(query, dict))]


def test_every_figure_is_shown_and_no_other() -> None:
    named = {name for query in queries() for name in re.findall(r"dali_pipes_\w+", query)}
    assert named == {figure.metric for figure in FIGURES}


def test_counters_are_shown_as_rates_or_sums_and_gauges_as_they_are() -> None:
    """A gauge's rate means nothing, and neither does a counter's bare value, except for the few bad samples."""
    for figure in FIGURES:
        for query in queries():
            if figure.metric in re.findall(r"dali_pipes_\w+", query):
                is_rate = re.search(rf"(rate|increase)\({figure.metric}\b", query) is not None
                assert is_rate == (figure.is_counter and "bad" not in query and "substituted" not in query), query


def test_queries_use_labels_that_series_have() -> None:
    for query in queries():
        used = {name for group in re.findall(r"by \(([^)]*)\)", query) for name in group.split(", ")}
        used |= set(re.findall(r'(\w+)=~"', query)) | set(re.findall(r"label_values\(\w+, (\w+)\)", query))
        assert used, query
        assert used <= LABELS
        assert query.count("(") == query.count(")")
        assert query.count("{") == query.count("}")
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used == variables | {"__rate_interval", "__all"}


def test_panels_are_as_grafana_wants_them() -> None:
    """Each with a number of its own, inside 24 columns, none over another, and its queries told apart."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
        assert panel["type"] in {"timeseries", "stat", "gauge"}
        assert panel["title"]
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids)
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["uid"] == DASHBOARD["title"] == "dali-pipes"


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


def test_both_answer_this_machine_only_and_find_each_other() -> None:
    """Neither asks for a password."""
    services = compose()["services"]
    (listening,) = [word for word in services["prometheus"]["command"] if "listen-address" in word]
    (source,) = yaml.safe_load((FOLDER / "provisioning" / "datasource.yaml").read_text())["datasources"]
    assert (
        listening
        == f"--web.listen-address={source['url'].removeprefix('http://')}"
        == "--web.listen-address=127.0.0.1:9090"
    )
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


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
