"""The manifests say what the programs accept, and their numbers add up."""

from __future__ import annotations

import configparser
import json
from typing import Any

import pytest
import yaml

from inference.config import Config
from inference.environ import env_name
from proofs.haproxy import adapt
from sluice.conf import ServerConfig
from sluice.metrics.live import LIVE
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
KNOWN = (
    set(map(env_name, Config.__struct_fields__))
    | set(map(env_name, ServerConfig.__struct_fields__))
    | {"REDIS_URL", "DATABASE_URL", "SECRET_KEY", "SLUICE_LOG_FORMAT", "SLUICE_METRICS_PORT", "SLUICE_METRICS_HOST"}
)


def documents() -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all((DEPLOY / "kubernetes/sluice.yaml").read_text()) if d]


def by_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {d["metadata"]["name"]: d for d in documents() if d["kind"] == kind}


def check(env: dict[str, str]) -> ServerConfig:
    """The settings as the server would read them: no unknown name, no refusal, no warning."""
    assert set(env) <= KNOWN, set(env) - KNOWN
    Config.from_env({k: v for k, v in env.items() if k != "REDIS_URL"})
    config = ServerConfig.from_env(env)
    assert config.warnings() == []
    return config


def test_kubernetes_numbers_add_up() -> None:
    env = by_kind("ConfigMap")["sluice"]["data"]
    config = check(env)
    for name, deployment in by_kind("Deployment").items():
        pod = deployment["spec"]["template"]["spec"]
        grace = pod["terminationGracePeriodSeconds"]
        hook = pod["containers"][0].get("lifecycle", {}).get("preStop", {})
        # Both count against the grace: what the hook waits, and what the drain takes at the very most.
        assert grace >= hook.get("sleep", {}).get("seconds", 0) + config.longest_stop, name
        assert grace >= float(env["SLUICE_DRAIN_TIMEOUT"]) + 10, name
    assert float(env["SLUICE_TERMINATION_GRACE"]) == grace


def test_kubernetes_sets_no_variable_of_ours() -> None:
    """By default the service ``sluice`` gives every pod ``SLUICE_PORT=tcp://...``, and no server starts with that."""
    assert "sluice" in by_kind("Service")
    pods = [d for d in documents() if d["kind"] in ("Deployment", "Job")]
    assert len(pods) == 3
    for document in pods:
        assert document["spec"]["template"]["spec"]["enableServiceLinks"] is False, document["metadata"]["name"]


def test_kubernetes_probes_and_selectors() -> None:
    server = by_kind("Deployment")["sluice-server"]["spec"]
    container = server["template"]["spec"]["containers"][0]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] >= 1
    assert server["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    for deployment in by_kind("Deployment").values():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    selector = by_kind("Service")["sluice"]["spec"]["selector"]
    assert selector.items() <= server["template"]["metadata"]["labels"].items()
    target = by_kind("HorizontalPodAutoscaler")["sluice-pool"]["spec"]["scaleTargetRef"]["name"]
    assert target in by_kind("Deployment")


def test_compose_numbers_add_up() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    env = {k: v for k, v in compose["services"]["server"]["environment"].items() if "${" not in v}
    config = check(env)
    assert float(compose["services"]["server"]["stop_grace_period"].rstrip("s")) >= config.longest_stop


@pytest.mark.parametrize("unit", ["sluice-server", "sluice-pool"])
def test_systemd_numbers_add_up(unit: str) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / f"systemd/{unit}.service")
    service = parser["Service"]
    env = dict(pair.split("=", 1) for pair in service["Environment"].split())
    config = check(env)
    wanted = config.longest_stop if unit == "sluice-server" else float(env["SLUICE_DRAIN_TIMEOUT"]) + 10
    assert float(service["TimeoutStopSec"]) >= wanted
    assert service["KillMode"] == "mixed"


def test_haproxy_is_what_is_proved() -> None:
    """The proofs run this very file; what they need of it, and what would cut the streams of a drain."""
    text = (DEPLOY / "haproxy.cfg").read_text()
    lines = [line.strip() for line in text.splitlines() if not line.strip().startswith("#")]
    assert any("/readyz" in line for line in lines if line.startswith("http-check send"))
    assert not any("on-marked-down" in line for line in lines)
    seconds = {line.split()[1]: line.split()[2] for line in lines if line.startswith("timeout")}
    config, core = ServerConfig.from_env({}), Config.from_env({})
    for name in ("client", "server", "tunnel"):
        longest = max(core.ping_interval, config.ws_ping_interval + config.ws_ping_timeout)
        assert float(seconds[name].rstrip("s")) > longest, name
    adapted = adapt(text, socket=DEPLOY / "x", bind="127.0.0.1:1", servers=["a 1:1", "b 1:2"], inter="7s", retries=0)
    assert [line.split()[1] for line in adapted.splitlines() if line.startswith("    server ")] == ["a", "b"]
    assert "inter 7s" in adapted
    changed = {line.split()[0] for line in set(adapted.splitlines()) ^ set(text.splitlines())}
    assert changed <= {"stats", "maxconn", "retries", "bind", "default-server", "server"}
    with pytest.raises(ValueError, match="retries"):
        adapt(text.replace("retries 2", ""), socket=DEPLOY, bind="", servers=[], inter="", retries=0)


def test_kubernetes_names_lead_somewhere() -> None:
    """What one object calls by name exists: ports, volumes, claims, config maps, selectors, metrics."""
    for document in documents():
        assert document["apiVersion"]
        assert document["metadata"]["name"]
    deployments = by_kind("Deployment")
    for name, deployment in deployments.items():
        pod = deployment["spec"]["template"]["spec"]
        volumes = {v["name"] for v in pod.get("volumes", [])}
        claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
        assert claims <= set(by_kind("PersistentVolumeClaim")), name
        for container in pod["containers"]:
            ports = {p["name"] for p in container["ports"]}
            assert {m["name"] for m in container["volumeMounts"]} <= volumes, name
            probes = [container[k]["httpGet"] for k in container if k.endswith("Probe")]
            assert {p["port"] for p in probes} <= ports, name
            maps = {e["configMapRef"]["name"] for e in container["envFrom"] if "configMapRef" in e}
            assert maps <= set(by_kind("ConfigMap")), name
            check({e["name"]: e["value"] for e in container.get("env", [])})
    server = deployments["sluice-server"]["spec"]["template"]["spec"]["containers"][0]
    target = by_kind("Service")["sluice"]["spec"]["ports"][0]["targetPort"]
    assert target in {p["name"] for p in server["ports"]}
    for name, budget in by_kind("PodDisruptionBudget").items():
        labels = deployments[name]["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert budget["spec"]["minAvailable"] < deployments[name]["spec"]["replicas"]
    for metric in by_kind("HorizontalPodAutoscaler")["sluice-pool"]["spec"]["metrics"]:
        assert metric["external"]["metric"]["name"] in LIVE


def test_kubernetes_prepares_as_compose_does() -> None:
    """Without it a new database has no tables, and a new volume no model."""
    pod = by_kind("Job")["sluice-prepare"]["spec"]["template"]["spec"]
    server = by_kind("Deployment")["sluice-server"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert container["command"] == compose["services"]["prepare"]["entrypoint"]
    for name in ("image", "envFrom", "volumeMounts"):
        assert container[name] == server["containers"][0][name], name
    for name in ("volumes", "securityContext"):
        assert pod[name] == server[name], name


def test_compose_names_lead_somewhere() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        assert set(service.get("depends_on", {})) <= set(compose["services"]), name
        assert {v.split(":")[0] for v in service.get("volumes", [])} <= set(compose["volumes"]), name
        assert ("image" in service) != ("build" in service), name
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def test_the_image_hands_signals_on_and_is_not_root() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    said = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line[:1].isupper() and " " in line}
    # Exec form: a shell in between would not hand on SIGTERM, and nothing would drain.
    assert json.loads(said["ENTRYPOINT"])[-1] == "manage.py"
    assert json.loads(said["CMD"])[0] == "serve"
    security = by_kind("Deployment")["sluice-server"]["spec"]["template"]["spec"]["securityContext"]
    text = (DEPLOY / "Dockerfile").read_text()
    assert str(security["runAsUser"]) in text
    assert "USER" in said
    assert said.get("STOPSIGNAL", "SIGTERM") == "SIGTERM"
