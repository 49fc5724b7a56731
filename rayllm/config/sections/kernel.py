"""Options of the choice of kernels."""

from rayllm.config.option import Kind, Option, State

KERNEL = (
    Option(
        name="ir-op-priority",
        kind=Kind.JSON,
        state=State.PLANNED,
        default={"rms_norm": []},
        keyed=True,
        help="Order in which implementations of operations are tried.",
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
        state=State.CUDA,
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
        honoured=("emulation",),
        help="Kernels of experts.",
    ),
)
