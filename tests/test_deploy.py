"""The composed cluster's file: what would break clients without breaking the cluster. Docker itself is not run here."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

COMPOSE = Path(__file__).parents[1] / "deploy" / "compose.yaml"


def compose(**variables: str) -> dict[str, Any]:
    """The file as ``docker compose`` reads it: ``${NAME:-default}`` filled in, anchors merged."""
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1]) or match[2], COMPOSE.read_text())
    assert "${" not in text
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


@pytest.mark.parametrize(("variables", "host"), [({}, "127.0.0.1"), ({"AIS_HOST": "192.0.2.7"}, "192.0.2.7")])
def test_compose_redirects_lead_to_published_ports(variables: dict[str, str], host: str) -> None:
    """A node is published on the address and the port by which it names itself to clients, and on no other."""
    for service in compose(**variables)["services"].values():
        _, port = service["command"]
        assert service["environment"]["HOSTNAME_LIST"] == host
        assert service["ports"] == [f"{host}:{port}:{port}"]


def test_compose_nodes_find_each_other() -> None:
    """Each is known by its service's name, where the other looks for it; both run one image, whose version is fixed."""
    services = compose()["services"]
    for name, service in services.items():
        assert service["command"][0] == service["hostname"] == name
        assert service["environment"]["HOSTNAME_LIST_INTRA_CONTROL"] == name
        assert service["environment"]["HOSTNAME_LIST_INTRA_DATA"] == name
        assert service["environment"]["AIS_PRIMARY_URL"] == f"http://proxy:{services['proxy']['command'][1]}"
        assert re.fullmatch(r"aistorage/cluster-minimal:v\d+\.\d+", service["image"])
    assert len({service["image"] for service in services.values()}) == 1
    assert compose(AIS_IMAGE="mine:1")["services"]["target"]["image"] == "mine:1"


def test_compose_waits_for_a_cluster_that_is_ready() -> None:
    """``--wait`` returns when the proxy knows the target, and what the target stores outlives its container."""
    file = compose()
    target = file["services"]["target"]
    assert target["healthcheck"]["test"][-1] == f"{target['environment']['AIS_PRIMARY_URL']}/v1/health?prr=true"
    assert target["depends_on"] == {"proxy": {"condition": "service_healthy"}}
    volume, path = target["volumes"][0].split(":")
    assert volume in file["volumes"]
    assert re.fullmatch(r"/ais/\w+", path)  # where the image's entry point looks for disks
