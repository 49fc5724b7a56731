"""Options of the choice of kernels."""

from rayllm.config.option import Kind, Option, State

KERNEL = (
    Option(
        name="ir-op-priority",
        kind=Kind.JSON,
        default={"rms_norm": []},
        keyed=True,
        help="Implementations of operations to try first: of RMS norms native (compiled kernels) or torch. Those of "
        "the platform follow.",
    ),
    Option(
        name="enable-flashinfer-autotune",
        kind=Kind.BOOL,
        state=State.CUDA,
        default=None,
        honoured=(False,),
        help="Tune FlashInfer's kernels at the start.",
    ),
    Option(
        name="moe-backend",
        kind=Kind.ENUM,
        default="auto",
        choices=(
            "aiter",
            "auto",
            "cutlass",
            "deep_gemm",
            "deep_gemm_mega_moe",
            "emulation",
            "flashinfer_cutedsl",
            "flashinfer_cutlass",
            "flashinfer_trtllm",
            "marlin",
            "triton",
        ),
        help="Kernels of experts. On a CPU auto and emulation are the compiled ones, or torch's products where "
        "attention is torch's; others need a GPU.",
    ),
)
