"""Why a reader's outcome is its own limit: {"reader family": reason, and how that is known}."""

LIMITS: dict[str, str] = {
    "transformers granitemoehybrid": "the cache of version 4 needs a layer of attention; the toy "
    "has none",
    "transformers jamba": "version 4 needs a GPU unless `use_mamba_kernels` is false; published "
    "files have it true",
    "llama_cpp gemma2": "its converter wants the SentencePiece model of the published files",
    "llama_cpp glm4_moe": "its converter wants special tokens of the published tokenizer",
    "llama_cpp cohere2": "its converter writes no period of windows; llama.cpp takes that of the "
    "published models, 4 (cohere2.cpp); the toy has 2",
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
