"""Settings of the service: defaults, then a TOML file, then ``L3STORE_...`` variables, then flags."""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from l3store.backend import Ack

ENV_PREFIX = "L3STORE_"
DEFAULT_PORT = 9460
MAX_DEFAULT_RAM = 2 << 30
MIN_RAM = 1 << 20
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*(?:([kmgtp])(i?))?b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


class ConfigError(ValueError):
    """A setting that cannot be used: which, where it was given, and what would be right."""


def parse_size(text: str | int) -> int:
    """Bytes of ``200G`` (powers of 1000), ``1Gi`` (powers of 1024) or a plain number. Raises ValueError."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write 200G, 1Gi or a number of bytes")
    base = 1024 if match[3] else 1000
    return int(Decimal(match[1]) * base ** _POWERS[(match[2] or "").lower()])


Amount = Annotated[int, BeforeValidator(parse_size, json_schema_input_type=int | str), Field(ge=0)]
Size = Annotated[Amount, Field(ge=1)]


def default_data_dir() -> Path:
    """The user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "l3store"


class Settings(BaseModel):
    """One service."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    data_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        default_factory=default_data_dir, description="folder for objects and registrations"
    )
    capacity: Size | None = Field(
        None, description="bytes of files to keep, as 200G, 1Gi or a number; default 80% of what the disk has for us"
    )
    ram: Annotated[Size, Field(ge=MIN_RAM)] | None = Field(
        None, description="bytes of memory for bodies and hot cells; default a quarter of the machine's, 2Gi at most"
    )
    hot: Amount | None = Field(
        None, description="bytes of that for cells which may be asked for again; default what bodies leave free"
    )
    ack: Ack = Field(
        Ack.FILE,
        description="answer a write from memory (ram), once its file is complete, or once it is on the disk (fsync)",
    )
    loop: Literal["auto", "asyncio", "uvloop"] = Field(
        "auto", description="event loop; auto is uvloop where it is installed"
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="what to log")


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | None) -> Settings:
    """Put the sources together; later ones win. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    from_env = {n: environ[ENV_PREFIX + n.upper()] for n in Settings.model_fields if ENV_PREFIX + n.upper() in environ}
    for name, source in (
        (str(config), {} if config is None else _read_toml(config)),
        ("the environment", from_env),
        ("the command line", {n: v for n, v in flags.items() if v is not None}),
    ):
        values.update(source)
        origin.update(dict.fromkeys(source, name))
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        what = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{field} (from {origin.get(field, 'the defaults')}): {what}") from error


def default_ram() -> int:
    """A quarter of the memory that we may use, `MAX_DEFAULT_RAM` at most."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        # A container's own limit; "max" where it has none.
        memory = min(memory, int(_CGROUP_LIMIT.read_text()))
    return max(MIN_RAM, min(memory // 4, MAX_DEFAULT_RAM))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return {name.replace("-", "_"): value for name, value in values.items()}
