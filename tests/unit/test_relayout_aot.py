"""The kernel compiled for GPUs that are not here: it builds, and its accesses are as wide as rows allow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Its own process: one in which Triton interprets has no kernel to compile.
_COMPILE = r"""
import collections, json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from l3client.relayout.triton_kernel import relayout_kernel

arch = int(sys.argv[1])
pointers = {"pages": "*u8", "page_ids": "*i64", "pointers": "*i64"}
found = []
for row_bytes, vector in ((256, 16), (656, 16), (24, 8), (6, 2), (7, 1)):
    for to_pool in (True, False):
        constants = {
            "TABLE_COLUMNS": 2, "COMPONENTS": 2, "PAGE_SIZE": 64, "FIRST_HEAD": 1, "HEADS": 3, "GROUP_HEADS": 2,
            "ROW": row_bytes // vector, "VECTOR_BYTES": vector, "BLOCK": 1024, "TO_POOL": to_pool,
        }
        # Nothing is promised of the integers: a stride need not be a multiple of anything.
        signature = {n: pointers.get(n, "constexpr" if n in constants else "i64") for n in relayout_kernel.arg_names}
        source = ASTSource(fn=relayout_kernel, signature=signature, constexprs=constants)
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32))
        accesses = re.findall(r"(?:ld|st)\.global[.\w:]*", built.asm["ptx"])
        found.append({
            "row_bytes": row_bytes, "vector": vector, "to_pool": to_pool, "shared": built.metadata.shared,
            "elf": built.asm["cubin"][:4].hex(), "accesses": collections.Counter(accesses),
        })
print(json.dumps(found))
"""


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_kernel_compiles_to_wide_accesses(arch: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _COMPILE, str(arch)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 10
    for built in found:
        assert built["elf"] == b"\x7fELF".hex()
        # Bytes go from memory to registers to memory: nothing is passed between threads.
        assert built["shared"] == 0
        accesses = built["accesses"]
        # The id of the page and the address of the tensor, one number each; everything else is the bytes.
        assert accesses.pop("ld.global.b64") >= 2
        if built["vector"] == 16:
            assert set(accesses) <= {f"{op}.global.{kind}" for op in ("ld", "st") for kind in ("v2.b64", "v4.b32")}
            assert sum(n for access, n in accesses.items() if access.startswith("ld")) == 8
            assert sum(n for access, n in accesses.items() if access.startswith("st")) == 8
        elif built["vector"] == 8:
            assert accesses == {"st.global.b64": 8}
        else:
            assert accesses == {f"{op}.global.b{8 * built['vector']}": 8 for op in ("ld", "st")}
