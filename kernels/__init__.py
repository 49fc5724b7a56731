"""Compute kernels: one table of operations, chosen by platform with `select`.

Every operation has a reference in plain torch with the signature that all its versions share; its docstring there is
the contract. Faster versions replace entries of the table and are tested against the reference.
"""

from rayllm_kernels.batch import AttentionBatch
from rayllm_kernels.table import REFERENCE, Ops, select

__all__ = ["REFERENCE", "AttentionBatch", "Ops", "select"]
