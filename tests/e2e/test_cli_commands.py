"""The commands: what they print, and how they exit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from l3store import __version__
from l3store.cli import main
from tests.support import Client, Pages, Service, launch, tiny

Start = Callable[..., Service]


def l3store(*args: str | Path, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("L3STORE_")}
    command = [sys.executable, "-m", "l3store", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, env=environ)


def test_help_names_every_command_and_version_the_version() -> None:
    done = l3store("--help")
    assert done.returncode == 0
    for command in ("serve", "demo", "plan", "check", "bench", "schemas"):
        assert command in done.stdout
    assert l3store("--version").stdout == f"l3store {__version__}\n"


def test_no_command_and_an_unknown_one_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["fetch"], ["serve", "--colour", "red"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
        assert "usage: l3store" in capsys.readouterr().err


def test_serve_help_has_every_setting_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    for flag in ("host", "port", "data-dir", "capacity", "ram", "hot", "ack", "loop", "log-level", "config"):
        assert f"--{flag}" in printed
        assert f"L3STORE_{flag.replace('-', '_').upper()}" in printed
    assert "80% of what the disk has" in printed


def test_serve_says_where_and_how_much(start_service: Start, tmp_path: Path) -> None:
    service = start_service(tmp_path / "data", "--capacity", "200G", "--ram", "500M", "--ack", "fsync")
    lines = [line for line in service.log.splitlines() if line.startswith("l3store ")]
    where = f"l3store {__version__} on {service.url}, data in {service.data_dir}"
    expected = f"{where}: 0.0 GB of up to 200.0 GB, 0.5 GB of RAM, ack fsync"
    assert lines == [expected]


def test_serve_takes_its_settings_from_the_environment_and_a_file(start_service: Start, tmp_path: Path) -> None:
    (tmp_path / "l3store.toml").write_text('capacity = "3G"\nram = "500M"\nack = "fsync"\n')
    env = {"L3STORE_CONFIG": str(tmp_path / "l3store.toml"), "L3STORE_CAPACITY": "7G"}
    service = start_service(tmp_path / "data", env=env)
    assert "of up to 7.0 GB, 0.5 GB of RAM, ack fsync" in service.log


def test_serve_without_a_port_prints_the_one_it_took(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "l3store", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:([0-9]+)", line)
            assert found is not None
            assert int(found[1]) > 0
        finally:
            process.terminate()
        assert process.wait(20) == 0


def test_settings_that_cannot_be_used_are_one_clear_line(tmp_path: Path) -> None:
    done = l3store("serve", "--capacity", "lots", "--data-dir", tmp_path / "data")
    assert done.returncode == 2
    assert done.stderr == (
        "l3store: capacity (from the command line): 'lots' is not a size: write 200G, 1Gi or a number of bytes\n"
    )
    (tmp_path / "file").write_bytes(b"")
    done = l3store("serve", "--port", "0", "--data-dir", tmp_path / "file")
    assert done.returncode == 1
    assert re.fullmatch(r"l3store: cannot use .*file: Not a directory\n", done.stderr)


def test_plan_recommends_the_grid_that_every_topology_can_write(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "tp4/pp2", "tp2", "--layers", "60", "--kv-heads", "8", "--head-dim", "128"]
    assert main(argv) == 0
    assert capsys.readouterr().out.splitlines() == [
        "layer_partition 30, head_group 2: 8 objects of up to 1,966,080 bytes for a page of 15,728,640",
        "  TP4/PP2                      writes 8 objects a page, all on the grid",
        "  TP2/PP1                      writes 8 objects a page, all on the grid",
    ]
    assert main([*argv, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["layer_partition"], plan["head_group"], plan["objects_per_page"]) == (30, 2, 8)
    assert plan["object_bytes"] == 30 * 64 * 2 * 2 * 128 * 2
    assert [t["refused"] for t in plan["topologies"]] == [None, None]
    namespace = tiny(
        "model", layers=60, heads=8, head_group=2, partition=30, page_size=64, head_dim=128
    )  # fmt: skip
    assert plan["digest"] == namespace.digest


def test_plan_takes_uneven_stages_replicated_heads_and_mla(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--layers", "61", "--head-dim", "576"]
    assert main(["plan", "tp8/pp3:19+22+20", "tp4", *common, "--mla", "--json"]) == 0
    mla = json.loads(capsys.readouterr().out)
    assert mla["head_group"] == 0
    assert [t["topology"] for t in mla["topologies"]] == ["TP8/PP3 (19+22+20 layers)", "TP4/PP1"]
    assert main(["plan", "TP16", "tp2", *common, "--kv-heads", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["head_group"] == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["four"], "is not a topology: write tp4/pp2"),
        (["tp4/pp2:30"], "2 stages, but layers for 1"),
        (["tp4/pp2:30+29"], "ends at layer 59, the model at 60"),
        (["tp0"], "1 to 4096 ranks"),
        (["tp800000000"], "1 to 4096 ranks"),
        (["tp4/pp61"], "61 pipeline stages for 60 layers"),
        (["tp3"], "do not divide"),
        (["tp4", "--dtype", "torch.bfloat16"], "dtype"),
        (["tp4", "--kv-heads", "-8"], "total_kv_heads"),
    ],
)
def test_plan_refuses_in_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert main(["plan", "--layers", "60", "--kv-heads", "8", "--head-dim", "128", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("l3store")
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pages]:
    """A data folder with 8 objects, its service stopped."""
    folder = tmp_path_factory.mktemp("check") / "data"
    service = launch(folder)
    client = Client(service.url)
    pages = Pages(tiny("org/check"), "check", 2)
    client.register(pages.namespace)
    for page in range(2):
        client.put_page(pages, page, [(0, 3), (3, 6)])
    client.close()
    # Not while the service has the folder.
    done = l3store("check", folder)
    assert done.returncode == 2
    assert "in use by another l3store" in done.stderr
    service.stop()
    return folder, pages


@pytest.mark.parametrize("damage", ["none", "flipped", "truncated", "longer", "foreign"])
def test_check_finds_what_is_damaged_and_changes_nothing(
    kept: tuple[Path, Pages], capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    folder, pages = kept
    key = pages.key(1, 3, 6, 1)
    [path] = folder.rglob(key)
    data = path.read_bytes()
    bad = {
        "none": data,
        "flipped": data[:200] + bytes([data[200] ^ 1]) + data[201:],
        "truncated": data[:-1],
        "longer": data + b"x",
        "foreign": data[:-8] + b"FOREIGN!",
    }[damage]
    path.write_bytes(bad)
    try:
        status = main(["check", str(folder), "--json"])
        report = json.loads(capsys.readouterr().out)
        assert path.read_bytes() == bad
        clean = damage == "none"
        assert status == (0 if clean else 1)
        assert (report["objects"], report["bytes"], report["clean"]) == (8, pages.array.size, clean)
        assert report["wrong_size"] == ([key] if damage in {"truncated", "longer"} else [])
        assert report["bad_sums"] == ([key] if damage in {"flipped", "foreign"} else [])
        assert main(["check", str(folder)]) == status
        printed = capsys.readouterr().out.splitlines()
        assert printed[-1] == f"8 objects, {pages.array.size} bytes: {'clean' if clean else 'damaged'}"
        assert clean or printed[0].endswith(key)
    finally:
        path.write_bytes(data)


def test_check_of_what_is_no_data_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert "is not a data folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_schemas_writes_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schemas", str(tmp_path / "new")]) == 0
    names = ["config.schema.json", "namespace.schema.json", "openapi.json"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
    assert len(capsys.readouterr().out.splitlines()) == 3
    for name in names:
        assert isinstance(json.loads((tmp_path / "new" / name).read_text()), dict)
