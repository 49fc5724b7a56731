"""Compute kernels: one table of operations, chosen by platform with `select`.

Every operation has a reference in plain torch with the signature that all its versions share; its docstring there is
the contract. Faster versions are registered in `table`, and all are tested against the same formulas.
"""

from rayllm_kernels.batch import AttentionBatch, SharedPrefix
from rayllm_kernels.experts import ExpertWeights
from rayllm_kernels.table import REFERENCE, Needs, Ops, choose, explain, select

__all__ = [
    "REFERENCE", "AttentionBatch", "ExpertWeights", "Needs", "Ops", "SharedPrefix", "choose", "explain", "select",
]  # fmt: skip
