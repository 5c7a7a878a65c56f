"""make test: files only; Kustomize and the check by the schemas take two seconds.

ops/kubernetes, as `kubectl kustomize` resolves it: valid, and without a right or a secret that a pod does not need."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from typer.testing import CliRunner

from infra.processes.supervisor import GRACE_S
from infra.settings import PREFIX, Settings
from tools.cli import build
from tools.testing.fixtures import ROOT

OVERLAY = ROOT / "ops" / "kubernetes" / "production"
COMPONENT, VERSION = "app.kubernetes.io/component", "app.kubernetes.io/version"
POSTGRES_ROLES = {
    **{name: name for name in ("migrator", "operator", "handler", "agent", "api")},
    "policies": "policy",
    "publisher": "policy",
    "exporter": "api",
}
"""Of each secret (docs/database-roles.md)."""
JOBS = {"migrate": "migrator", "rebuild": "operator"}
"""The secrets of those that have other names than their component."""
TARGETED = "1.30", "1.37"
"""The oldest Kubernetes that has all that is used, and the newest one."""


def kustomized(overlay: Path) -> list[dict[str, Any]]:
    kubectl = Path(sys.executable).parent / "kubectl"
    done = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


OBJECTS = kustomized(OVERLAY)
WORKLOADS = {one["metadata"]["labels"][COMPONENT]: one for one in OBJECTS if one["kind"] in ("Deployment", "Job")}
PODS: dict[str, dict[str, Any]] = {name: one["spec"]["template"] for name, one in WORKLOADS.items()}
[SETTINGS] = [one for one in OBJECTS if one["kind"] == "ConfigMap"]


def container(name: str) -> dict[str, Any]:
    [found] = PODS[name]["spec"]["containers"]
    return dict(found)


def secret(name: str) -> str:
    """The one whose files are in the pod."""
    [found] = [one["secret"] for one in PODS[name]["spec"]["volumes"] if "secret" in one]
    assert found["defaultMode"] == 0o440
    return str(found["secretName"])


def environment(name: str) -> dict[str, str]:
    """A container's, with `secret/key` where the value is a secret's."""
    found: dict[str, str] = {}
    for source in container(name).get("envFrom", []):
        assert source == {"configMapRef": {"name": SETTINGS["metadata"]["name"]}}
        found |= SETTINGS["data"]
    for one in container(name)["env"]:
        reference = one.get("valueFrom", {}).get("secretKeyRef")
        found[one["name"]] = f"{reference['name']}/{reference['key']}" if reference else one["value"]
    return found


@pytest.mark.parametrize("version", TARGETED)
def test_each_object_is_what_kubernetes_takes_and_there_is_one_of_each_process(version: str) -> None:
    for one in OBJECTS:
        kubernetes_validate.validate(one, version, strict=True)
    assert PODS.keys() == {*JOBS, "handler", "agent", "policies", "publisher", "exporter", "api", "operator"}


@pytest.mark.parametrize("name", PODS)
def test_a_containers_command_and_settings_exist(name: str, tmp_path: Path) -> None:
    """Parsed by the command line itself, options too; `--help` at the end keeps it from being run."""
    done = CliRunner().invoke(build(), [*container(name).get("args", []), "--help"])
    assert done.exit_code == 0, done.output
    (tmp_path / "file").write_text("secret")
    found = {key.removeprefix(PREFIX).lower(): value for key, value in environment(name).items()}
    Settings(**{key: str(tmp_path / "file") if key.endswith("_file") else value for key, value in found.items()})


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_no_right_that_it_does_not_need(name: str) -> None:
    pod = PODS[name]["spec"]
    assert (pod["enableServiceLinks"], pod["automountServiceAccountToken"]) == (False, False)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "runAsUser" not in pod["securityContext"], "any user will do"
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    mounts = {one["mountPath"]: one for one in container(name)["volumeMounts"]}
    assert {path for path, one in mounts.items() if not one.get("readOnly")} == {"/tmp"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


@pytest.mark.parametrize("name", PODS)
def test_a_pod_gets_its_own_secret_as_files_and_no_other(name: str) -> None:
    own = JOBS.get(name, name)
    assert secret(name) == own
    found = environment(name)
    assert found["SAMEFOLD_DATABASE_URL_FILE"] == "/run/secrets/samefold/database_url"
    references = {key: value for key, value in found.items() if value.startswith(f"{own}/")}
    assert references == ({} if name == "migrate" else {"SAMEFOLD_KAFKA_SASL_USERNAME": f"{own}/kafka_sasl_username"})
    assert [one for one in found if "PASSWORD" in one] == (
        [] if name == "migrate" else ["SAMEFOLD_KAFKA_SASL_PASSWORD_FILE"]
    )


def test_the_names_of_a_release_are_its_own_and_the_service_leads_to_all() -> None:
    """So that two releases run side by side, and one of them can be deleted."""
    [version] = {pod["metadata"]["labels"][VERSION] for pod in PODS.values()}
    of_release = [*WORKLOADS.values(), SETTINGS]
    assert {one["metadata"]["labels"][VERSION] for one in of_release} == {version}
    assert {one["metadata"]["name"] for one in WORKLOADS.values()} == {f"{name}-{version}" for name in WORKLOADS}
    assert SETTINGS["metadata"]["name"].startswith(f"settings-{version}-")
    assert {container(name)["image"].rpartition(":")[2] for name in PODS} == {version}
    for one in WORKLOADS.values():
        if one["kind"] == "Deployment":
            assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
    shared = [one for one in OBJECTS if one not in of_release]
    assert {one["kind"] for one in shared} == {"Service", "PodDisruptionBudget", "NetworkPolicy"}
    assert not [one for one in shared if VERSION in str(one) or COMPONENT in one["metadata"]["labels"]]
    selectors = [
        one["spec"]["selector"].get("matchLabels", one["spec"]["selector"])
        for one in shared
        if "selector" in one["spec"]
    ]
    found = [
        [name for name, pod in PODS.items() if selector.items() <= pod["metadata"]["labels"].items()]
        for selector in selectors
    ]
    assert sorted(found) == [["agent"], ["api"], ["api"], ["handler"], ["policies"]]


def test_a_stopping_pod_has_the_time_that_its_processes_take() -> None:
    waits = container("api")["lifecycle"]["preStop"]["sleep"]["seconds"]
    for name in PODS:
        assert PODS[name]["spec"]["terminationGracePeriodSeconds"] >= waits + GRACE_S + 5


def test_probes_ask_ports_and_paths_that_there_are() -> None:
    for name in PODS:
        ports = {one["name"]: one["containerPort"] for one in container(name).get("ports", [])}
        probes = [value["httpGet"] for key, value in container(name).items() if key.endswith("Probe")]
        assert {one["port"] for one in probes} <= ports.keys()
        own = (
            {"http": Settings().api_port}
            if name == "api"
            else {"metrics": int(SETTINGS["data"]["SAMEFOLD_METRICS_PORT"])}
        )
        assert ports == ({} if name in {*JOBS, "operator"} else own)
    paths = {name: [key for key in container(name) if key.endswith("Probe")] for name in PODS}
    assert {name for name, found in paths.items() if "livenessProbe" in found} == {"api"}


PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def test_the_page_reads_a_namespace_that_kubernetes_takes_in_a_service_of_two_words(tmp_path: Path) -> None:
    """Kubernetes takes no underscore there."""
    copier = yaml.safe_load((ROOT / "copier.yml").read_text())
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(ROOT), **copier["_envops"])
    file = tmp_path / OVERLAY.relative_to(ROOT) / "kustomization.yaml"
    file.parent.mkdir(parents=True)
    template = templates.get_template(str((OVERLAY / f"{file.name}.jinja").relative_to(ROOT)))
    file.write_text(template.render(name="hotel_bookings"))
    [reads] = re.findall(r"^namespace=\$\((.*)\)$", PAGE, re.MULTILINE)
    told = subprocess.run(reads, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert told == "hotel-bookings\n"
    assert not re.findall(r"namespace[= ]samefold|api\.samefold", PAGE)


def test_the_pages_steps_start_readers_first_and_an_api_for_other_states_before_their_switch() -> None:
    steps = re.findall(rf"^release '?{COMPONENT}(?:=| in \()(\w+(?:, \w+)*)", PAGE, re.MULTILINE)
    assert [name for step in steps for name in step.split(", ")] == [
        *("migrate", "agent", "handler", "api", "rebuild", "handler"),
        *("policies", "publisher", "exporter", "api", "operator"),
    ]
    [version] = {pod["metadata"]["labels"][VERSION] for pod in PODS.values()}
    assert f"delete deployments,jobs,configmaps -l {VERSION}={version}\n" in PAGE


def test_the_pages_patch_gives_policies_one_more_file_and_no_other_pod(tmp_path: Path) -> None:
    [patch] = re.findall(r"```yaml\n(patches:.*?)```", PAGE, re.DOTALL)
    overlay = Path(shutil.copytree(OVERLAY.parent, tmp_path / "kubernetes")) / OVERLAY.name
    with (overlay / "release" / "kustomization.yaml").open("a") as file:
        file.write(patch)
    before, after = ({str(one) for one in objects} for objects in (OBJECTS, kustomized(overlay)))
    [changed] = after - before
    assert (len(before - after), "'name': 'policies-1'" in changed) == (1, True)
    assert "{'name': 'SAMEFOLD_WEBHOOKS_FILE', 'value': '/run/secrets/samefold/webhooks'}" in changed
