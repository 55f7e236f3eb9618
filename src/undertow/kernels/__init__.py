"""Kernels, one package a family. `spec` is what a kernel declares of itself, `alloc` the only allocator."""
