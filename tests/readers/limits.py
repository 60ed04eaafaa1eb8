"""Why a reader's outcome is its own limit: {"reader family": reason, and how that is known}."""

LIMITS: dict[str, str] = {
    "transformers granitemoehybrid": "the cache of version 4 needs a layer of attention; the toy "
    "has none",
    "transformers jamba": "version 4 needs a GPU unless `use_mamba_kernels` is false; published "
    "files have it true",
    "llama_cpp gemma2": "its converter wants the SentencePiece model of the published files",
    "llama_cpp glm4_moe": "its converter wants special tokens of the published tokenizer",
    "llama_cpp cohere2": "its converter writes no period of windows; llama.cpp takes that of the "
    "published models, 4 (cohere2.cpp), and the toy has 2: with 4, transformers computes the same",
    "llama_cpp gemma3_text": "its converter writes no period of windows; llama.cpp takes that of "
    "the published models, 6 (gemma3.cpp), and the toy has 2: with 6, transformers computes the "
    "same",
    "llama_cpp exaone4": "llama.cpp has sliding windows in EXAONE 4 only for 64 layers "
    "(exaone4.cpp): without windows, transformers computes the same",
    "llama_cpp qwen3_moe": "llama.cpp divides the scores of the chosen experts by their sum "
    "(qwen3moe.cpp), whatever `norm_topk_prob` is; published models have true, and the toy has the "
    "default of transformers, false: with true, transformers computes the same, except for one "
    "token whose second and third expert have nearly equal scores",
    "llama_cpp dbrx": "the fp16 cache: 1e-03; with keys and values in fp32 1e-06",
    "llama_cpp falcon": "its converter takes 4 times the hidden size for `ffn_hidden_size` "
    "(falcon.py), which published models have",
    "ctranslate2 gemma2": "ctranslate2 has no sliding windows and no caps of logits in Gemma 2 "
    "(its Gemma2Loader): without both, transformers computes the same",
    **dict.fromkeys(
        ("ctranslate2 gemma3_text", "ctranslate2 mistral"),
        "ctranslate2 fails on an input that is longer than the sliding window: 40 tokens, window 8",
    ),
    "ctranslate2 phi": "ctranslate2 expects the keys and weights of Phi's own older code, such as "
    "`n_layer` (its PhiLoader)",
    "ctranslate2 phi3": "ctranslate2 expects rotary embeddings in each layer, as older versions of "
    "transformers have (its Phi3Loader)",
    "mlx gemma2": "mlx-lm has no sliding windows in Gemma 2 (no such word in its gemma2.py)",
    "mlx mistral": "mlx-lm gives Mistral a sliding window only by `layer_types`, a key that its "
    "published files do not have and of which transformers warns (its llama.py)",
    "mlx jamba": "mlx-lm normalizes the scores of Jamba's chosen experts, transformers does not "
    "(its jamba.py: softmax after the choice)",
    "mlx glm": "mlx-lm rotates whole heads, whatever `partial_rotary_factor` is (its glm.py)",
    "mlx deepseek_v2": "mlx-lm needs `rope_scaling` to be a dictionary (deepseek_v2.py)",
    "mlx gpt2": "mlx-lm expects the oldest names of weights, without `transformer.`",
    "mlx gpt_neox": "mlx-lm takes 4 times the hidden size for `intermediate_size` (gpt_neox.py), "
    "which published models have",
    "mlx gpt_bigcode": "mlx-lm fails to build the model, before it reads weights",
    "mlx gpt_oss": "mlx-lm expects the quantized experts of the published files",
    "mlx olmo": "mlx-lm needs the package ai2-olmo",
}  # fmt: skip
