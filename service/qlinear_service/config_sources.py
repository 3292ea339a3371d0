"""Layers flags over QLINEAR_ environment over a TOML file over defaults, and remembers which won.

Everything here is generated from the dataclasses of `config.py`: an option's name, type, default
and help are written there and nowhere else. Reads no environment itself; it is handed one.
"""

import argparse
import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

from qlinear_service.config import (
    BatchingConfig,
    KernelConfig,
    LimitsConfig,
    OptionError,
    ServerConfig,
    ServiceConfig,
)
from qlinear_service.config_tracing import TracingConfig
from qlinear_service.errors import ConfigError

__all__ = ["Resolved", "add_flags", "flag_values", "format_json", "format_table", "resolve"]

ENVIRONMENT_PREFIX = "QLINEAR_"
CONFIG_VARIABLE = "QLINEAR_CONFIG"
GROUPS: dict[str, type[Any]] = {
    "server": ServerConfig,
    "limits": LimitsConfig,
    "batching": BatchingConfig,
    "kernels": KernelConfig,
    "tracing": TracingConfig,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    group: str
    name: str
    """As in the TOML file; the flag has dashes, the variable is upper case."""
    field: Field[Any]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def unit(self) -> str:
        """What a value is called."""
        return self.field.metadata.get("unit") or self.field.name.rpartition("_")[2].upper()

    @property
    def default(self) -> Any:
        if self.field.default_factory is not MISSING:
            return self.field.default_factory()
        return self.field.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The configuration and, for each option by name, the words for where its value came from."""

    config: ServiceConfig
    origins: Mapping[str, str]


def _options() -> Iterator[_Option]:
    for group, owner in GROUPS.items():
        for item in fields(owner):
            name = item.metadata.get("name") or item.name
            yield _Option(group=group, name=name, field=item)


OPTIONS: dict[str, _Option] = {option.name: option for option in _options()}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add --config and one flag for each option; a flag that is not given stays None."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"TOML file with the tables {', '.join(f'[{group}]' for group in GROUPS)}; also "
        f"{CONFIG_VARIABLE}",
    )
    for group in GROUPS:
        section = parser.add_argument_group(f"{group} options")
        for option in OPTIONS.values():
            if option.group != group:
                continue
            text = f"{option.field.metadata['doc']} [{_shown(option.default)}]".replace("%", "%%")
            if option.field.type is bool:
                section.add_argument(
                    option.flag, action=argparse.BooleanOptionalAction, default=None, help=text
                )
            else:
                section.add_argument(option.flag, metavar=option.unit, help=text)


def flag_values(args: argparse.Namespace) -> dict[str, str | bool]:
    """Return the options that were given as flags, by name, unconverted."""
    given = {name: getattr(args, name) for name in OPTIONS}
    return {name: value for name, value in given.items() if value is not None}


def resolve(
    *,
    flags: Mapping[str, str | bool] | None = None,
    environ: Mapping[str, str] | None = None,
    config_file: str | None = None,
) -> Resolved:
    """Return the configuration that results from all layers.

    Args:
        flags: option name -> what the command line said.
        environ: the environment; names without the prefix QLINEAR_ are ignored.
        config_file: a TOML file; without one QLINEAR_CONFIG is looked at.

    Raises:
        ConfigError: a name is unknown or a value cannot be used; the text says where it stands.
    """
    environ = environ or {}
    values: dict[str, Any] = {}
    origins = dict.fromkeys(OPTIONS, "default")
    layers = (
        _from_file(config_file or environ.get(CONFIG_VARIABLE)),
        _from_environment(environ),
        {name: (raw, f"flag {OPTIONS[name].flag}") for name, raw in (flags or {}).items()},
    )
    for layer in layers:
        for name, (raw, origin) in layer.items():
            values[name] = _convert(OPTIONS[name], raw, origin)
            origins[name] = origin
    try:
        groups = {group: _build(group, values) for group in GROUPS}
        return Resolved(config=ServiceConfig(**groups), origins=origins)
    except OptionError as error:
        raise ConfigError(f"{error} (from: {origins[error.option]})") from None


def _build(group: str, values: Mapping[str, Any]) -> Any:
    given = {
        option.field.name: values[name]
        for name, option in OPTIONS.items()
        if option.group == group and name in values
    }
    return GROUPS[group](**given)


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    found: dict[str, tuple[object, str]] = {}
    by_variable = {option.variable: name for name, option in OPTIONS.items()}
    for variable, raw in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable not in by_variable:
            known = [*by_variable, CONFIG_VARIABLE]
            raise ConfigError(f"no option has the variable {variable}; {_near(variable, known)}")
        found[by_variable[variable]] = (raw, f"environment {variable}")
    return found


def _from_file(path: str | None) -> dict[str, tuple[object, str]]:
    if path is None:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    found: dict[str, tuple[object, str]] = {}
    for group, table in tables.items():
        if group not in GROUPS or not isinstance(table, dict):
            raise ConfigError(f"{path}: there is no table [{group}]; {_near(group, GROUPS)}")
        names = [name for name, option in OPTIONS.items() if option.group == group]
        for name, raw in table.items():
            if name not in names:
                raise ConfigError(f"{path}: [{group}] has no key {name!r}; {_near(name, names)}")
            found[name] = (raw, f"file {path}")
    return found


def _near(word: str, known: Iterable[str]) -> str:
    listed = list(known)
    near = difflib.get_close_matches(word, listed, n=3)
    return f"near: {', '.join(near)}" if near else f"known: {', '.join(listed)}"


def _convert(option: _Option, raw: object, origin: str) -> Any:
    """Return `raw` as the option's type: text from flags and variables, TOML's own types else."""
    kind = option.field.type
    problem = f"{option.name}: is {raw!r}; expected %s (from: {origin})"
    if kind is bool:
        words = {"true": True, "1": True, "false": False, "0": False}
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str) and raw.lower() in words:
            return words[raw.lower()]
        raise ConfigError(problem % "true or false")
    if kind in (int, float):
        of_kind = isinstance(raw, (str, int) if kind is int else (str, int, float))
        try:
            if of_kind and not isinstance(raw, bool):
                return kind(raw)
        except ValueError:
            pass
        raise ConfigError(problem % ("a whole number" if kind is int else "a number"))
    if not isinstance(raw, str):
        raise ConfigError(problem % "text")
    return Path(raw).expanduser() if kind is Path else raw


def _rows(resolved: Resolved) -> Iterator[tuple[_Option, Any, str]]:
    for name, option in OPTIONS.items():
        group = getattr(resolved.config, option.group)
        yield option, getattr(group, option.field.name), resolved.origins[name]


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_table(resolved: Resolved) -> str:
    """Return one line for each option: name, value, where it came from."""
    rows = [
        (f"{option.group}.{option.name}", _shown(value), origin)
        for option, value, origin in _rows(resolved)
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(
        f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows
    )


def format_json(resolved: Resolved) -> str:
    """Return {group: {name: {"value": ..., "from": ...}}} as text."""
    tree: dict[str, dict[str, dict[str, object]]] = {group: {} for group in GROUPS}
    for option, value, origin in _rows(resolved):
        plain = str(value) if isinstance(value, Path) else value
        tree[option.group][option.name] = {"value": plain, "from": origin}
    return json.dumps(tree, indent=2)
