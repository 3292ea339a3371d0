"""Dockerfile and compose files name only what there is: paths, options, ports, users, versions."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from source_tree import ROOT

from qlinear_service.config import ServerConfig
from qlinear_service.config_sources import OPTIONS, resolve

DOCKERFILE = (ROOT / "Dockerfile").read_text()
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
GPU = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
VARIABLES = {option.variable for option in OPTIONS.values()}
PORTS = {ServerConfig().port, ServerConfig().metrics_port}
UID = "10001:10001"


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, continued lines joined: [("FROM", "a AS b"), ...]."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word, rest)
        for word, _, rest in (line.partition(" ") for line in joined.splitlines())
        if word
    ]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Each stage by name, with what stands in it and in the stages that it is made from."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions(DOCKERFILE):
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            own = list(found.get(base, []))
            found[name] = own
        elif found:
            own.append((word, rest))
    return found


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_a_target_runs_as_nobody_and_is_probed_stopped_and_labelled(target: str) -> None:
    words = dict(stages()[target])  # the last of each kind counts
    assert words["USER"] == UID
    assert words["STOPSIGNAL"] == "SIGTERM"
    assert words["ENTRYPOINT"] == '["qlinear"]'  # exec form: process 1 gets the signal
    assert words["CMD"] == '["serve", "/models"]'
    assert words["HEALTHCHECK"].endswith('CMD ["qlinear", "doctor", "--health"]')
    assert {int(port) for port in words["EXPOSE"].split()} == PORTS
    assert words["COPY"] == f"--from={target}-environment /opt/qlinear /opt/qlinear"
    assert "org.opencontainers.image.version" in words["LABEL"]


def test_bases_are_arguments_with_tags_and_no_digest_is_made_up() -> None:
    arguments = dict(
        rest.split("=", 1)
        for word, rest in instructions(DOCKERFILE)
        if word == "ARG" and "=" in rest
    )
    bases = [rest.split(" AS ")[0] for word, rest in instructions(DOCKERFILE) if word == "FROM"]
    outside = {base for base in bases if base not in stages()}
    assert outside == {"${CUDA_BUILDER}", "${CPU_BUILDER}", "${RUNTIME}"}
    for base in outside:
        assert re.fullmatch(r"[\w/.-]+:[\w.-]+", arguments[base.strip("${}")])
    release = {
        re.search(r"ubuntu[:]?([\d.]+)$", arguments[base.strip("${}")])[1] for base in outside
    }
    assert len(release) == 1, "kernels would meet another C library than they were built with"
    assert re.search(r"cuda:12\.\d+\.\d+-devel", arguments["CUDA_BUILDER"])
    assert "sha256:" not in DOCKERFILE


def test_nothing_of_a_compiler_is_in_what_runs() -> None:
    for target in ("cpu", "gpu"):
        text = " ".join(rest for word, rest in stages()[target] if word == "RUN")
        assert "apt-get" in text
        assert not re.search(r"g\+\+|gcc|build-essential|devel", text)


def test_files_that_the_build_asks_for_are_sent_to_it() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in sent)
    packed = {
        "pyproject.toml",
        "setup.py",
        "LICENSE",
        "README.md",
        "proto",
        "service",
        "client",
        "csrc",
    }
    assert sent == packed | {"deploy/requirements"}
    assert "*" in lines
    assert "service/qlinear_service/prebuilt" in lines  # never a library from the work tree


def test_the_image_repeats_no_version_and_installs_what_is_locked() -> None:
    assert "ARG VERSION\n" in DOCKERFILE
    assert not re.search(r"VERSION=\d", DOCKERFILE)
    assert "==" not in DOCKERFILE
    commands = [
        command.split()
        for word, rest in instructions(DOCKERFILE)
        if word == "RUN"
        for command in rest.split(" && ")
    ]
    installs = [words for words in commands if words[0].endswith("/pip") and words[1] == "install"]
    assert len(installs) == 10
    for words in installs:
        own = words[-1] == "." or words[-1].startswith("/wheels/qlinear-")
        assert "--no-deps" in words if own else "--require-hashes" in words, words
        assert own or (ROOT / "deploy" / words[-1].removeprefix("deploy/").lstrip("/")).exists()


def test_variables_of_the_image_and_of_compose_are_options_of_the_server() -> None:
    named = set(re.findall(r"\bQLINEAR_\w+(?==)", DOCKERFILE))
    for file in (COMPOSE, GPU):
        named |= file["services"]["qlinear"]["environment"].keys()
    assert named >= {"QLINEAR_HOST", "QLINEAR_CACHE_DIR", "QLINEAR_DEVICE"}
    assert named - VARIABLES == set()
    environment: dict[str, Any] = COMPOSE["services"]["qlinear"]["environment"]
    resolve(flags={}, environ=environment | GPU["services"]["qlinear"]["environment"])


def test_compose_locks_the_server_down_and_shows_it_on_this_machine_only() -> None:
    server = COMPOSE["services"]["qlinear"]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    assert {int(port.split(":")[-1]) for port in server["ports"]} == PORTS
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    config = ServerConfig()
    assert int(server["stop_grace_period"].removesuffix("s")) > (
        config.drain_delay_seconds + config.grace_seconds
    )
    targets = {
        COMPOSE["services"]["qlinear"]["build"]["target"],
        GPU["services"]["qlinear"]["build"]["target"],
    }
    assert targets <= stages().keys()


def test_paths_that_compose_mounts_exist() -> None:
    mounts = [mount for service in COMPOSE["services"].values() for mount in service["volumes"]]
    sources = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", mount).split(":")[0] for mount in mounts]
    paths = [source for source in sources if source.startswith(".")]
    assert len(paths) == 4
    assert [path for path in paths if not (DEPLOY / path).exists()] == []
    assert {source for source in sources if not source.startswith(".")} == COMPOSE["volumes"].keys()


def test_prometheus_and_grafana_find_what_they_watch() -> None:
    prometheus, grafana = COMPOSE["services"]["prometheus"], COMPOSE["services"]["grafana"]
    (config,) = [word for word in prometheus["command"] if word.startswith("--config.file=")]
    inside = Path(config.partition("=")[2])
    mounted = dict(mount.split(":")[:2][::-1] for mount in prometheus["volumes"])
    here = yaml.safe_load((DEPLOY / mounted[str(inside.parent)] / inside.name).read_text())
    (job,) = here["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"qlinear:{ServerConfig().metrics_port}"]}]
    alone = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    job["static_configs"] = alone["scrape_configs"][0]["static_configs"]
    assert here == alone, "the two configurations differ in more than the server's name"
    assert grafana["environment"]["PROMETHEUS_URL"] == "http://prometheus:9090"
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/qlinear.yml").read_text())
    folders = dict(mount.split(":")[:2][::-1] for mount in grafana["volumes"])
    assert folders[provider["providers"][0]["options"]["path"]] == "./grafana/dashboards"
    assert folders["/etc/grafana/provisioning"] == "./grafana/provisioning"
