"""Kernels in C++ for CPUs: a decoder step in one call."""
