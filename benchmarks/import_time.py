"""CPU time of ``import agl_meta`` over a bare interpreter, and what it loads.

python benchmarks/import_time.py
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys

from side_by_side import machine

ROUNDS = 15
HEAVY = ("torch", "verl", "ray", "agentlightning", "numpy", "pydantic")


def cpu_seconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def main() -> None:
    print(machine())
    differences = [cpu_seconds("import agl_meta") - cpu_seconds("pass") for _ in range(ROUNDS)]
    loaded = subprocess.run(
        [sys.executable, "-c", "import agl_meta, sys; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    heavy = sorted({name.split(".")[0] for name in loaded} & set(HEAVY))
    print(f"import agl_meta: {statistics.median(differences):.3f} s of CPU time more than nothing")
    print(f"loaded of {', '.join(HEAVY)}: {', '.join(heavy) or 'none'}")


if __name__ == "__main__":
    main()
