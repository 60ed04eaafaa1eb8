"""Maps options of HF Trainer, nanoGPT, torchtitan, Megatron-LM and litgpt to our flags."""

from zerolm.parts.settings import FLAGS

TOKENIZE = "zerolm data tokenize"
# (our flag, the difference, names in other programs without the section: `steps` for
# `training.steps`)
OTHER_NAMES = (
    ("--learning_rate", "the peak of the schedule", "lr peak_lr max_lr"),
    ("--min_learning_rate", "a rate, not a ratio",
     "min_lr min_lr_factor min_lr_ratio lr_min end_lr"),
    ("--schedule", "by name", "lr_scheduler_type lr_scheduler lr_schedule lr_decay_style decay_lr "
     "decay_type"),
    ("--warmup_tokens", "steps * --batch_tokens, or the ratio * --total_tokens",
     "warmup warmup_steps warmup_iters warmup_ratio num_warmup_steps lr_warmup_steps "
     "lr_warmup_iters lr_warmup_fraction lr_warmup_samples"),
    ("--decay_tokens", "steps * --batch_tokens, or the ratio * --total_tokens",
     "decay_steps decay_ratio lr_decay_iters lr_decay_steps lr_decay_samples lr_wsd_decay_iters"),
    ("--total_tokens", "steps * --batch_tokens",
     "steps max_steps num_steps train_steps total_steps training_steps max_train_steps max_iters "
     "train_iters num_iterations train_samples max_tokens train_tokens"),
    ("--total_tokens", "epochs * tokens in the data; --max_epochs limits the epochs per source",
     "epochs num_epochs n_epochs num_train_epochs"),
    ("--batch_tokens", "sequences per step on all devices * --seq_len",
     "batch_size global_batch_size train_batch_size total_batch_size"),
    ("--batch_tokens", "accumulation follows from it, --micro_batch_size and the devices",
     "gradient_accumulation_steps gradient_accumulation_iters grad_accum_steps "
     "accumulate_grad_batches"),
    ("--micro_batch_size", "sequences per device", "per_device_train_batch_size local_batch_size "
     "per_device_eval_batch_size device_batch_size train_micro_batch_size_per_gpu"),
    ("--batch_ramp_start", "in tokens, with --batch_ramp_tokens", "rampup_batch_size"),
    ("--seq_len", "tokens per sequence", "block_size seq_length max_seq_length max_seq_len "
     "sequence_length max_length context_length"),
    ("--data", f"token shards, which `{TOKENIZE}` writes from text",
     "dataset dataset_name dataset_path train_file train_data data_path data_dir train_data_path"),
    ("--val_data", f"token shards, which `{TOKENIZE}` writes from text",
     "validation_file val_data_path valid_data_path eval_data eval_dataset"),
    ("--model_config", "a Hugging Face config.json", "config_name model model_name model_type"),
    ("--init_from", "only for existing weights; --model_config alone starts from random ones",
     "model_name_or_path pretrained_model_name_or_path initial_checkpoint_dir checkpoint_dir"),
    ("a key of --model_config", "the architecture is in that config.json",
     "n_layer n_head n_embd num_layers hidden_size num_attention_heads num_query_groups dropout "
     "max_position_embeddings ffn_hidden_size attention_dropout hidden_dropout num_experts "
     "init_method_std vocab_size rotary_base swiglu"),
    ("--deepspeed_config", "ZeRO stage and offload are in that JSON",
     "deepspeed zero_stage fsdp fsdp_config use_distributed_optimizer data_parallel_shard_degree"),
    ("gradient_clipping in --deepspeed_config", "it is DeepSpeed's key",
     "max_grad_norm grad_clip clip_grad max_norm gradient_clip_val gradient_clipping"),
    ("optimizer in --deepspeed_config", "DeepSpeed's key with type and params",
     "optim optimizer adam_epsilon adam_eps eps"),
    ("--beta1", "for every optimizer", "adam_beta1"),
    ("--beta2", "for every optimizer", "adam_beta2"),
    ("tensor_parallel in --deepspeed_config", "docs/parallelism.md",
     "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size"),
    ("sequence_parallel_size in --deepspeed_config", "docs/parallelism.md",
     "context_parallel_size context_parallel_degree sequence_parallel"),
    ("pipeline.stages in --deepspeed_config", "docs/parallelism.md",
     "pipeline_model_parallel_size pipeline_parallel_degree"),
    ("--precision", "bf16, fp16 or fp32", "bf16 fp16 fp32 dtype mixed_precision torch_dtype"),
    ("--float32_matmul", "high is TF32", "tf32"),
    ("--fp8", "a switch", "fp8_format"),
    ("--compile", "a switch", "torch_compile"),
    ("--gradient_checkpointing", "full, selective or off", "activation_checkpointing "
     "activation_checkpoint recompute_activations recompute_granularity checkpoint_activations"),
    ("--attn_implementation", "a kernel by name", "use_flash_attn flash_attn attention_backend"),
    ("--document_mask", "a switch", "reset_attention_mask"),
    ("--run_dir", "contains checkpoints, logs and reports", "output_dir out_dir save dump_folder "
     "save_dir save_path"),
    ("--run_dir", "the same command resumes a run; --branch RUN@STEP starts another run from it",
     "resume resume_from_checkpoint resume_from load load_path overwrite_output_dir"),
    ("--checkpoint_interval", "in steps", "save_steps save_interval save_every save_strategy"),
    ("--checkpoint_keep", "the newest N", "save_total_limit keep_latest_k"),
    ("--log_interval", "in steps", "logging_steps log_freq log_every log_every_n_steps"),
    ("--eval_interval", "in steps", "eval_steps eval_every eval_freq eval_strategy "
     "evaluation_strategy val_check_interval"),
    ("--eval_tokens", "steps * --batch_tokens", "eval_iters eval_max_iters val_steps"),
    ("--num_workers", "per rank", "dataloader_num_workers"),
    ("--stop_after", "a duration: 3h50m", "exit_duration_in_mins max_time time_limit"),
    ("--profile", "FIRST:LAST, in steps", "enable_profiling profiler"),
    ("--wandb", "auto, online, offline or off", "report_to wandb_log use_wandb enable_wandb "
     "logger_name"),
    ("--wandb_name", "default: the name of --run_dir", "run_name wandb_run_name wandb_exp_name"),
    ("--tensorboard", "a switch", "tensorboard_dir logging_dir enable_tensorboard"),
    ("--settings", "a JSON file", "config config_file"),
    (f"{TOKENIZE} --tokenizer", "a run uses its shards' tokenizer", "tokenizer "
     "tokenizer_name tokenizer_path tokenizer_dir tokenizer_type tokenizer_model vocab_file"),
    (f"{TOKENIZE} --val_fraction", "documents are split before the run", "split"),
    ("zerolm export", "a command after the run", "push_to_hub"),
    ("--num_gpus", "a flag of the launcher, before pretrain.py", "nproc_per_node devices "
     "num_processes gpus"),
    ("--num_nodes", "a flag of the launcher, before pretrain.py", "nnodes num_machines"),
    ("the default", "remove it", "do_train do_eval device backend always_save_checkpoint"),
)  # fmt: skip
BY_NAME = {name: (ours, why) for ours, why, names in OTHER_NAMES for name in names.split()}


def answer_for(name: str) -> str:
    """Return ' Here it is FLAG: DIFFERENCE.' for an option name from another program, or an empty
    string for an unknown name.
    """
    section, _, last = name.partition(".")
    for candidate in (name.replace(".", "_"), last, section):
        if candidate in BY_NAME:
            ours, why = BY_NAME[candidate]
            return f" Here it is {ours}: {why}."
        if candidate in FLAGS:
            return f" Here it is --{candidate}."
    return ""
