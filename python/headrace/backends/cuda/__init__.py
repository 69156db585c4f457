"""Kernels in `cuda/` and the calls that launch them. Importing it needs no GPU and no CuPy.

`nvrtc` compiles, `loader` caches and loads, one module a kernel family launches. Each of these
exports `VARIANTS`, the complete list of what it can ask the compiler for.
"""
