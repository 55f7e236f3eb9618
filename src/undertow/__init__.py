"""Fused attention backward for AMD and NVIDIA GPUs and the CPU, and the instruments that prove it right."""
