"""Settings: sizes, sources and their order, and errors that name the setting and where it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l3store.backend import Ack
from l3store.config import ConfigError, default_data_dir, load_settings, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200G", 200 * 1000**3), ("200GB", 200 * 1000**3), ("200g", 200 * 1000**3), ("1Gi", 1 << 30), ("1GiB", 1 << 30),
        ("1.5Ti", 3 << 39), ("64 MiB", 64 << 20), ("10k", 10_000), ("7", 7), (" 7B ", 7), ("0", 0), (12, 12),
        ("9007199254740993", 9007199254740993), ("2P", 2 * 1000**5),
    ],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "1X", "1i", "1.G", "1e9", "0x10", "1GiG", "٣", "1,5G", "nan", "9" * 40]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: write 200G"):
        parse_size(text)


@given(st.integers(0, 10**18))
def test_a_number_is_itself(number: int) -> None:
    assert parse_size(str(number)) == number


def test_defaults() -> None:
    settings = load_settings({}, {}, None)
    assert (settings.host, settings.port, settings.ack, settings.capacity) == ("127.0.0.1", 9460, Ack.FILE, None)
    assert settings.data_dir == default_data_dir()


def test_the_data_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / "l3store"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_data_dir() == tmp_path / "home" / ".cache" / "l3store"
    assert load_settings({"data_dir": "~/kv"}, {}, None).data_dir == tmp_path / "home" / "kv"


def test_flags_win_over_the_environment_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    config = tmp_path / "l3store.toml"
    config.write_text('port = 1\ncapacity = "1Gi"\nack = "fsync"\nlog-level = "debug"\ndata-dir = "here"\n')
    environ = {"L3STORE_PORT": "2", "L3STORE_CAPACITY": "2Gi", "L3STORE_DATA_DIR": "there", "OTHER": "x"}
    flags = {"port": "3", "capacity": None, "host": None}
    settings = load_settings(flags, environ, config)
    assert settings.port == 3
    assert settings.capacity == 2 << 30
    assert settings.ack is Ack.FSYNC
    assert settings.log_level == "debug"
    assert settings.data_dir == Path("there")
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("flags", "environ", "toml", "words"),
    [
        ({"port": "x"}, {}, "", r"port \(from the command line\): .*integer"),
        ({"port": "65536"}, {}, "", r"port \(from the command line\)"),
        ({}, {"L3STORE_CAPACITY": "lots"}, "", r"capacity \(from the environment\): 'lots' is not a size"),
        ({}, {"L3STORE_CAPACITY": "0"}, "", r"capacity \(from the environment\): .*greater than or equal to 1"),
        ({}, {"L3STORE_ACK": "maybe"}, "", r"ack \(from the environment\): .*'file' or 'fsync'"),
        ({}, {}, 'log_level = "loud"', r"log_level \(from .*l3store.toml\)"),
        ({}, {}, "capacity = true", r"capacity \(from .*l3store.toml\)"),
        ({}, {}, "colour = 1", r"colour \(from .*l3store.toml\): Extra"),
        ({}, {}, "[serve]\nport = 1", r"serve \(from .*l3store.toml\): Extra"),
        ({}, {}, "port = ", r"l3store.toml is not TOML"),
    ],
)
def test_errors_name_the_setting_and_its_source(
    tmp_path: Path, flags: dict[str, str], environ: dict[str, str], toml: str, words: str
) -> None:
    config = tmp_path / "l3store.toml"
    config.write_text(toml)
    with pytest.raises(ConfigError, match=words):
        load_settings(flags, environ, config)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        load_settings({}, {}, tmp_path / "none.toml")
