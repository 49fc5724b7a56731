"""Options that hold many settings, as JSON."""

from rayllm.config.option import Kind, Option, State

SYSTEM = (
    Option(
        name="speculative-config", kind=Kind.JSON, state=State.PLANNED, aliases=("-sc",), help="Speculative decoding."
    ),
    Option(
        name="kv-transfer-config", kind=Kind.JSON, state=State.PLANNED, help="Transfer of KV blocks between instances."
    ),
    Option(
        name="kv-events-config", kind=Kind.JSON, state=State.PLANNED, help="Publishing of what happens to KV blocks."
    ),
    Option(
        name="ec-transfer-config",
        kind=Kind.JSON,
        state=State.PLANNED,
        help="Transfer of encoders' outputs between instances.",
    ),
    Option(
        name="compilation-config",
        kind=Kind.JSON,
        state=State.PLANNED,
        default={
            "mode": None,
            "debug_dump_path": None,
            "cache_dir": "",
            "compile_cache_save_format": "binary",
            "backend": "inductor",
            "custom_ops": [],
            "ir_enable_torch_wrap": None,
            "splitting_ops": None,
            "compile_mm_encoder": False,
            "cudagraph_mm_encoder": False,
            "encoder_cudagraph_token_budgets": [],
            "encoder_cudagraph_max_vision_items_per_batch": 0,
            "encoder_cudagraph_max_frames_per_batch": None,
            "compile_sizes": None,
            "compile_ranges_endpoints": None,
            "inductor_compile_config": {
                "enable_auto_functionalized_v2": False,
                "combo_kernels": True,
                "benchmark_combo_kernel": True,
            },
            "inductor_passes": {},
            "cudagraph_mode": None,
            "cudagraph_num_of_warmups": 0,
            "cudagraph_capture_sizes": None,
            "cudagraph_copy_inputs": False,
            "cudagraph_specialize_lora": True,
            "use_inductor_graph_partition": None,
            "pass_config": {},
            "max_cudagraph_capture_size": None,
            "dynamic_shapes_config": {"type": "backed", "evaluate_guards": False, "assume_32_bit_indexing": False},
            "local_cache_dir": None,
            "fast_moe_cold_start": None,
            "static_all_moe_layers": [],
        },
        aliases=("-cc",),
        keyed=True,
        honoured=(("mode", 0), ("cudagraph_mode", "NONE")),
        cure="leave it out: a CPU runs compiled kernels of its own",
        help="torch.compile and CUDA graphs.",
    ),
    Option(
        name="attention-config",
        kind=Kind.JSON,
        state=State.CUDA,
        default={
            "backend": None,
            "flash_attn_version": None,
            "use_prefill_decode_attention": False,
            "flash_attn_max_num_splits_for_cuda_graph": 32,
            "tq_max_kv_splits_for_cuda_graph": 32,
            "use_cudnn_prefill": False,
            "use_trtllm_ragged_deepseek_prefill": False,
            "use_trtllm_attention": None,
            "disable_flashinfer_prefill": True,
            "disable_flashinfer_q_quantization": False,
            "use_prefill_query_quantization": False,
            "use_fp4_indexer_cache": False,
        },
        aliases=("-ac",),
        keyed=True,
        help="Attention; but for backend, which is --attention-backend, of GPU kernels.",
    ),
    Option(
        name="reasoning-config",
        kind=Kind.JSON,
        help="Reasoning. reasoning_parser is --reasoning-parser. Without one, reasoning_start_str and "
        "reasoning_end_str are the marks that it stands between. With one, reasoning_end_str is what ends reasoning "
        "that has spent its thinking_token_budget: it may say more than the mark that it ends with.",
    ),
    Option(
        name="kernel-config",
        kind=Kind.JSON,
        default={"ir_op_priority": {"rms_norm": []}, "enable_flashinfer_autotune": None, "moe_backend": "auto"},
        keyed=True,
        help="Kernels: --ir-op-priority, --moe-backend and --enable-flashinfer-autotune as keys of one option.",
    ),
    Option(name="additional-config", kind=Kind.JSON, state=State.PLANNED, default={}, help="Settings of the platform."),
    Option(
        name="structured-outputs-config",
        kind=Kind.JSON,
        default={
            "backend": "auto",
            "disable_any_whitespace": False,
            "disable_additional_properties": False,
            "reasoning_parser": "",
            "reasoning_parser_plugin": "",
            "enable_in_reasoning": False,
        },
        keyed=True,
        help="Structured outputs. backend: guidance (llguidance), xgrammar, outlines, or auto, which is guidance where "
        "it can. The two disable_ keys are for requests that do not say. enable_in_reasoning: the form holds for the "
        "reasoning too.",
    ),
    Option(
        name="profiler-config",
        kind=Kind.JSON,
        default={
            "profiler": None,
            "torch_profiler_dir": "",
            "torch_profiler_with_stack": True,
            "torch_profiler_with_flops": False,
            "torch_profiler_use_gzip": True,
            "torch_profiler_dump_cuda_time_total": True,
            "torch_profiler_record_shapes": False,
            "torch_profiler_with_memory": False,
            "ignore_frontend": False,
            "delay_iterations": 0,
            "max_iterations": 0,
            "warmup_iterations": 0,
            "active_iterations": 5,
            "wait_iterations": 0,
        },
        keyed=True,
        help="Profiles of the engines, with profiler torch and a torch_profiler_dir: POST /start_profile begins one, "
        "/stop_profile writes its trace. The CUDA times are of GPUs only.",
    ),
    Option(
        name="optimization-level",
        kind=Kind.INT,
        default=2,
        aliases=("-O",),
        minimum=0,
        maximum=3,
        help="0: nothing is compiled, for the fastest start on a machine that has no compiled kernels yet; steps are "
        "many times slower. 1 to 3, alike on a CPU: compiled kernels, made once a machine. --attention-backend wins.",
    ),
    Option(
        name="performance-mode",
        kind=Kind.ENUM,
        default="balanced",
        choices=("balanced", "interactivity", "throughput"),
        help="What --max-num-batched-tokens and --max-num-seqs are set for where they are left open: each request's "
        "latency (128 and 64 on a CPU), all requests' throughput (2048 and 1024), or both (512 and 256).",
    ),
    Option(
        name="weight-transfer-config", kind=Kind.JSON, state=State.PLANNED, help="Transfer of weights from a trainer."
    ),
)
