def translate(args):
    args.transformer_impl = "local"
    args.gradient_accumulation_fusion = False
    args.masked_softmax_fusion = False
    args.apply_rope_fusion = False
    args.no_persist_layer_norm = True
    args.distributed_backend = "gloo"
    args.moe_grouped_gemm = False
    return []
