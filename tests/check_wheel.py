"""Run by `make wheel` inside a clean environment: the installed wheel imports and is complete."""

import sys
import time
from importlib.metadata import files
from pathlib import Path

start = time.perf_counter()
import headrace  # noqa: E402

elapsed = time.perf_counter() - start
heavy = {"torch", "cupy", "numpy"} & set(sys.modules)
assert not heavy, f"import headrace pulls in {heavy}"
assert headrace.SlotAllocator(2).allocate(5) == 0
names = {str(path) for path in files("headrace") or ()}
for needed in ("headrace/py.typed", "headrace/_core.pyi", "headrace/__init__.py"):
    assert needed in names, f"{needed} is not in the wheel"
sources = Path(__file__).parents[1] / "python" / "headrace" / "cuda"
kernels = {f"headrace/cuda/{path.name}" for path in sources.glob("*.cu*")}
assert kernels, "no kernels in the repository"
assert kernels <= names, f"{sorted(kernels - names)} are not in the wheel"
print(f"wheel {headrace.__version__}: {len(names)} files, import took {elapsed * 1e3:.0f} ms")
