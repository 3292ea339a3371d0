"""Which layer wins, what is refused, and what --print-config says about it."""

import argparse
import json
from pathlib import Path

import pytest

from qlinear_service import cli
from qlinear_service.config import KernelConfig, LimitsConfig, ServerConfig, size_class
from qlinear_service.config_sources import (
    GROUPS,
    OPTIONS,
    add_flags,
    flag_values,
    format_json,
    format_table,
    resolve,
)
from qlinear_service.errors import ConfigError


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "qlinear.toml"
    path.write_text(text)
    return str(path)


def parse(*words: str) -> dict[str, str | bool]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return flag_values(parser.parse_args(words))


def test_defaults_are_those_of_the_contract() -> None:
    config = resolve().config
    assert (config.server.host, config.server.port) == ("127.0.0.1", 50051)
    assert config.server.metrics_port == 9464
    assert config.limits == LimitsConfig(
        max_request_bytes=32 << 20,
        max_response_bytes=256 << 20,
        max_request_rows=65536,
        max_queue_rows=262144,
        max_queue_bytes=1 << 30,
        max_queue_age_seconds=5.0,
    )
    assert config.batching.max_batch_rows == 1024
    assert config.batching.max_wait_us == 0
    assert config.kernels.cpu_threads >= 1
    assert config.limits.max_message_bytes == 64 << 20


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    path = toml(tmp_path, '[server]\nport = 1\nhost = "::1"\nmetrics_port = 2\n')
    resolved = resolve(
        flags=parse("--port", "3"),
        environ={"QLINEAR_PORT": "4", "QLINEAR_METRICS_PORT": "5", "HOME": "/"},
        config_file=path,
    )
    server = resolved.config.server
    assert (server.port, server.metrics_port, server.host) == (3, 5, "::1")
    assert resolved.origins["port"] == "flag --port"
    assert resolved.origins["metrics_port"] == "environment QLINEAR_METRICS_PORT"
    assert resolved.origins["host"] == f"file {path}"
    assert resolved.origins["device"] == "default"


def test_the_file_can_be_named_by_a_variable_and_a_flag_beats_it(tmp_path: Path) -> None:
    path = toml(tmp_path, "[batching]\nmax_batch_rows = 7\n")
    environ = {"QLINEAR_CONFIG": path}
    assert resolve(environ=environ).config.batching.max_batch_rows == 7
    with pytest.raises(ConfigError, match="cannot read /nowhere"):
        resolve(environ=environ, config_file="/nowhere")


def test_names_are_unique_and_every_field_has_its_doc() -> None:
    fields = [item for owner in GROUPS.values() for item in owner.__dataclass_fields__.values()]
    assert len(fields) == len(OPTIONS)
    for option in OPTIONS.values():
        assert option.field.metadata["doc"].endswith("."), option.name


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_takes_its_default_from_every_layer(name: str, tmp_path: Path) -> None:
    option = OPTIONS[name]
    default = option.default
    group = option.group
    text = str(default).lower() if isinstance(default, bool) else str(default)
    quoted = text if isinstance(default, int | float) else json.dumps(text)
    if isinstance(default, bool):
        flags = parse(option.flag if default else "--no-" + option.flag[2:])
    else:
        flags = parse(option.flag, text)
    layered = (
        resolve(flags=flags),
        resolve(environ={option.variable: text}),
        resolve(config_file=toml(tmp_path, f"[{group}]\n{name} = {quoted}\n")),
    )
    for resolved in layered:
        assert resolved.origins[name] != "default"
        assert resolved.config == resolve().config


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"QLINEAR_PROT": "1"}, "QLINEAR_PROT; near: QLINEAR_PORT"),
        ({"QLINEAR_": ""}, "no option has the variable QLINEAR_"),
        ({"QLINEAR_PORT": "x"}, r"port: is 'x'; expected a whole number \(from: environment"),
        ({"QLINEAR_PORT": "65536"}, r"port: is 65536; expected 0 to 65535 \(from: environment"),
        ({"QLINEAR_GRACE_SECONDS": "soon"}, "grace_seconds: is 'soon'; expected a number"),
        ({"QLINEAR_GRACE_SECONDS": "nan"}, "grace_seconds: is nan; expected 0 to 3600"),
        ({"QLINEAR_MAX_QUEUE_AGE": "0"}, "max_queue_age: is 0.0; expected 0.001 to"),
        ({"QLINEAR_TORCH_ONLY": "maybe"}, "torch_only: is 'maybe'; expected true or false"),
        ({"QLINEAR_DEVICE": "gpu"}, "device: is 'gpu'; expected cpu or cuda:N"),
        ({"QLINEAR_HOST": ""}, "host: is ''; expected a name or an address"),
        ({"QLINEAR_LOG_LEVEL": "loud"}, "log_level: is 'loud'; expected debug"),
        ({"QLINEAR_FRONTENDS": "2"}, "frontends: is 2; the split into processes is not built yet"),
        ({"QLINEAR_MAX_WAIT_US": "201"}, "max_wait_us: is 201; expected 0 to 200"),
        ({"QLINEAR_MAX_BATCH_SECONDS": "-1"}, "max_batch_seconds: is -1.0; expected 0 to 86400"),
        ({"QLINEAR_MEASURE_SECONDS": "601"}, "measure_seconds: is 601.0; expected 0 to 600"),
        ({"QLINEAR_CPU_THREADS": "100000"}, "cpu_threads: is 100000; expected 1 to 1024"),
        ({"QLINEAR_CPU_THREADS": "3000000000"}, "cpu_threads: is 3000000000; expected 1 to 1024"),
        ({"QLINEAR_MAX_QUEUE_ROWS": "9"}, r"max_queue_rows: is 9; .*max_request_rows \(65536\)"),
        ({"QLINEAR_MAX_QUEUE_BYTES": "2048"}, "max_queue_bytes: is 2048; expected at least 2684"),
    ],
)
def test_bad_variables_are_refused(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(environ=environ)


@pytest.mark.parametrize("name", [n for n, option in OPTIONS.items() if option.field.type is int])
@pytest.mark.parametrize("value", ["1" + 30 * "0", "-1" + 30 * "0"])
def test_no_whole_number_is_without_bounds(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: is {value}; .*(expected|only 0)"):
        resolve(environ={OPTIONS[name].variable: value})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[server]\nprot = 1\n", r"\[server\] has no key 'prot'; near: port"),
        ("[sever]\nport = 1\n", r"there is no table \[sever\]; near: server"),
        ("port = 1\n", r"there is no table \[port\]"),
        ("[server]\ndevice = 'cpu'\n", r"\[server\] has no key 'device'"),
        ("[server]\nport = '1x'\n", "port: is '1x'; expected a whole number"),
        ("[server]\nport = true\n", "port: is True; expected a whole number"),
        ("[server]\nport = 1.5\n", "port: is 1.5; expected a whole number"),
        ("[server]\nhost = 1\n", "host: is 1; expected text"),
        ("[server\n", "is not TOML"),
    ],
)
def test_bad_files_are_refused(content: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(config_file=toml(tmp_path, content))


def test_a_group_names_the_value_and_the_rule() -> None:
    with pytest.raises(ConfigError, match="port: is -1; expected 0 to 65535"):
        ServerConfig(port=-1)
    for device in ("cuda", "cuda:", "cuda:x", "cpu:0", ""):
        with pytest.raises(ConfigError, match="expected cpu or cuda:N"):
            KernelConfig(device=device)
    assert KernelConfig(device="cuda:3").cuda_ordinals == (3,)
    assert KernelConfig().cuda_ordinals == ()
    assert KernelConfig().device_names == ("auto",)
    assert KernelConfig(device="cpu").device_names == ("cpu",)
    with pytest.raises(ConfigError, match=r"torch_only: is true, .* for the CPU"):
        KernelConfig(device="cuda:0", torch_only=True)


def test_the_largest_slot_holds_the_larger_of_request_and_response() -> None:
    limits = LimitsConfig(max_request_bytes=5000, max_response_bytes=3000)
    assert limits.largest_slot_bytes == 8192
    assert [size_class(n) for n in (0, 1, 1024, 1025, 4096)] == [1024, 1024, 1024, 2048, 4096]


def test_the_table_shows_each_value_and_its_origin(tmp_path: Path) -> None:
    resolved = resolve(environ={"QLINEAR_MAX_BATCH_ROWS": "64"})
    lines = format_table(resolved).splitlines()
    assert len(lines) == len(OPTIONS)
    line = next(line for line in lines if line.startswith("batching.max_batch_rows"))
    assert line.split(maxsplit=2)[1:] == ["64", "environment QLINEAR_MAX_BATCH_ROWS"]
    tree = json.loads(format_json(resolved))
    assert tree["batching"]["max_batch_rows"] == {
        "value": 64,
        "from": "environment QLINEAR_MAX_BATCH_ROWS",
    }
    assert tree["limits"]["max_queue_age"] == {"value": 5.0, "from": "default"}


def test_print_config_needs_no_path_and_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["serve", "--print-config", "--port", "0"]) == 0
    assert "flag --port" in capsys.readouterr().out
    assert cli.main(["serve"]) == 1
    assert "PATH is missing" in capsys.readouterr().err
    assert cli.main(["serve", ""]) == 1  # not the current folder
    assert "PATH is missing" in capsys.readouterr().err
    monkeypatch.setenv("QLINEAR_HSOT", "x")
    assert cli.main(["serve", "--print-config"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("qlinear serve: no option has the variable QLINEAR_HSOT; near: QLINEAR")
    assert "QLINEAR_HOST" in error
    assert error.count("\n") == 1
