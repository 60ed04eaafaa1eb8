"""Why a reader's outcome is its own limit: {"reader family": reason, and how that is known}."""

ROBERTA = (
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xmod",
)  # fmt: skip
LIMITS: dict[str, str] = {
    **dict.fromkeys(
        ("transformers bamba", "transformers granitemoehybrid"),
        "the cache of version 4 needs a layer of attention; the toy has none: with one, this "
        "version computes the same",
    ),
    **dict.fromkeys(
        ("transformers jamba", "transformers zamba"),
        "version 4 needs a GPU unless `use_mamba_kernels` is false, with which it computes the "
        "same; published files have it true",
    ),
    "transformers blt": "version 4 has no windows in BLT's patcher (modeling_blt.py), and the "
    "caches of both versions fail: without windows and cache, both compute the same",
    "transformers doge": "the cache of version 4 turns off the mask that hides later tokens, "
    "unless `attn_implementation` is eager (modeling_doge.py): with eager it computes the same",
    "transformers gemma3n_text": "version 4 shares keys and values of layers only by its cache "
    "(modeling_gemma3n.py): with the cache, its logits are the same",
    "transformers modernbert-decoder": "version 4 has one base of rotary embeddings for all "
    "layers (modeling_modernbert_decoder.py): with one base, this version computes the same",
    "transformers moshi": "the mask of version 4 has a window only in `generate`, and version 5 "
    "has it only in its cache: with a window of 64 tokens, all compute the same",
    "transformers recurrent_gemma": "version 4 has the window only in its cache "
    "(`_update_causal_mask`): with a window of 64 tokens, this version computes the same",
    "transformers xlstm": "version 4 computes rows of several chunks only with the package xlstm "
    "(modeling_xlstm.py divides by the wrong number): with a chunk of 64 tokens, its logits are "
    "the same; `generate` fails in both versions",
    "transformers zamba2": "without the package mamba_ssm, version 4 computes later chunks of a "
    "row wrongly: with a chunk of 64 tokens, this version computes the same",
    **dict.fromkeys(
        (f"transformers {name}" for name in ROBERTA),
        "`generate` of versions 4 and 5 alike counts positions from 0, the model itself from "
        "`pad_token_id` + 1: without `generate`, version 4 computes the same tokens",
    ),
    **dict.fromkeys(
        (f"llama_cpp {name}" for name in ("ernie4_5", "gemma", "gemma2", "minicpm3", "nemotron")),
        "its converter wants the SentencePiece model of the published files: with the toy's "
        "tokenizer instead, llama.cpp computes the same",
    ),
    "llama_cpp phi3": "its converter wants the SentencePiece model of the published files "
    "(phi.py)",
    "llama_cpp ernie4_5_moe": "its converter wants the SentencePiece model of the published files, "
    "and takes `intermediate_size` / `num_key_value_heads` for the size of shared experts "
    "(ernie.py): with another tokenizer and these sizes equal, llama.cpp computes the same",
    **dict.fromkeys(
        (f"llama_cpp {name}" for name in ("glm4", "glm4_moe", "glm4_moe_lite", "solar_open")),
        "its converter wants special tokens of the published tokenizer: with the toy's tokenizer "
        "instead, llama.cpp computes the same",
    ),
    "llama_cpp glm": "its converter wants special tokens of the published tokenizer, and writes "
    "1e-5 for the epsilon of norms (chatglm.py): with another tokenizer 1e-03, the same tokens",
    "llama_cpp hunyuan_v1_moe": "its converter wants the ranks of the published tokenizer's own "
    "code (hunyuan.py): with another tokenizer, llama.cpp computes the same",
    "llama_cpp jamba": "its converter wants a BPE tokenizer with `byte_fallback`, as the published "
    "one (vocab.py of gguf): with the toy's instead, llama.cpp computes the same",
    **dict.fromkeys(
        (f"llama_cpp {name}" for name in ("gemma4", "gemma4_text", "gemma4_unified")),
        "its converter wants a BPE tokenizer with `byte_fallback`, as the published one (vocab.py "
        "of gguf): with the toy's instead 1e-02 (not explained), the same tokens",
    ),
    **dict.fromkeys(
        ("llama_cpp deepseek_v32", "llama_cpp glm_moe_dsa"),
        "its converter wants BOS or special tokens of the published tokenizer (deepseek.py, "
        "glm.py), and llama.cpp crashes unless `index_head_dim` is a multiple of 64, as published "
        "models have: with another tokenizer, 64 and an `index_topk` of all tokens, it computes "
        "the same",
    ),
    **dict.fromkeys(
        ("llama_cpp dots3_note", "llama_cpp dots3_note_text"),
        "its converter wants `<|endofassistant|>` of the published tokenizer, and loses the base "
        "of full layers where `rope_parameters` has kinds of layers (base.py): with another "
        "tokenizer, base 10000 and an `index_head_dim` of 64, transformers computes the same",
    ),
    **dict.fromkeys(
        ("llama_cpp granite", "llama_cpp granite_swa", "llama_cpp granitemoe",
         "llama_cpp granitemoe_swa", "llama_cpp granitemoeshared", "llama_cpp youtu"),
        "the fp16 cache: up to 4e-03; with keys and values in fp32 4e-06 at most",
    ),
    "llama_cpp ministral3": "the fp16 cache: 1e-03; with keys and values in fp32 1e-06",
    "llama_cpp afmoe": "llama.cpp has full attention in each fourth layer and scales the "
    "embeddings, whatever the config says (afmoe.cpp): with both, transformers computes the same",
    "llama_cpp gemma3": "its converter writes no period of windows; llama.cpp takes that of the "
    "published models, 6 (gemma3.cpp), and the toy has 2: with 6, transformers computes the same",
    "llama_cpp gpt_oss": "llama.cpp rounds the limits of YaRN (`ggml_rope_yarn_corr_dims`), "
    "whatever `truncate` is, and published models have false: with true, transformers computes the "
    "same",
    "llama_cpp laguna": "its converter writes no kinds of layers; llama.cpp takes windows in three "
    "of four layers (laguna.cpp), the toy has none: with them, transformers computes the same",
    "llama_cpp mistral": "llama.cpp has no sliding windows in Mistral (llama.cpp of src/models): "
    "without the window, transformers computes the same",
    "llama_cpp smollm3": "its converter writes no `no_rope_layers`; llama.cpp rotates all but each "
    "fourth layer (smollm3.cpp), as published models: with that, transformers computes the same",
    "llama_cpp mellum": "llama.cpp crashes if no layer has a window but the config does, and has "
    "one base for all layers (mellum.cpp): with a window in one layer and one base, transformers "
    "computes the same",
    "llama_cpp bamba": "the toy has no layer of attention, which the converter wants; with one, it "
    "permutes whole heads, of which Bamba rotates half (granite.py), so llama.cpp rotates other "
    "numbers: with those, transformers computes the same",
    "llama_cpp granitemoehybrid": "llama.cpp crashes without a layer of attention, and the toy has "
    "none: with one, it computes the same",
    **dict.fromkeys(
        ("llama_cpp llama4", "llama_cpp llama4_text"),
        "llama.cpp has chunks of 8192 tokens and rotates all but each fourth layer (llama4.cpp), "
        "and crashes with fewer layers: with four and a chunk of all tokens, it computes the same",
    ),
    "llama_cpp nemotron_h": "its converter takes a dense layer beside experts for one of Mamba "
    "(nemotron.py): without such a layer, it computes the same",
    **dict.fromkeys(
        ("llama_cpp dots1", "llama_cpp olmoe"),
        "llama.cpp wants as many key heads as heads (dots1.cpp, olmoe.cpp), which published models "
        "have: with them, it computes the same",
    ),
    "llama_cpp phi": "its converter takes 4 times the hidden size for `intermediate_size`, and as "
    "many key heads as heads (phi.py), which published models have: with both, it computes the "
    "same",
    "llama_cpp gemma3n_text": "llama.cpp has sizes and sparsity of the published models in its "
    "code, and keys and values in layers of the first 20 (gemma3n.cpp): with these, 3e-02 (not "
    "explained), the same tokens",
    "llama_cpp bitnet": "its converter has neither an untied `lm_head` nor `ffn_sub_norm` of "
    "transformers' BitNet (tensor_mapping.py of gguf)",
    "llama_cpp hy_v4": "its converter does not map the bias of `indexer.k_norm` in this version "
    "(tensor_mapping.py of gguf), nor a tokenizer without BOS",
    "llama_cpp deepseek_v4": "its converter wants the keys, names and MXFP4 experts of DeepSeek's "
    "own files (deepseek.py), which transformers does not write",
    "llama_cpp mimo_v2_flash": "its converter wants the share of rotated numbers outside "
    "`rope_parameters`, or there without kinds of layers (mimo.py), and llama.cpp an even number: "
    "without `rope_parameters` and with half of a head, it computes the same",
    **dict.fromkeys(
        (f"llama_cpp {name}" for name in ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
                                           "qwen3_5_text")),
        "its converter wants layers that predict several tokens, or its option no-mtp (qwen.py), "
        "and llama.cpp crashes with a head of less than 32 numbers: with its option no-mtp and 64, "
        "it computes the same",
    ),
    "llama_cpp qwen3_next": "its converter wants layers that predict several tokens, or its "
    "option no-mtp (qwen.py): with its option no-mtp, llama.cpp computes the same",
    **dict.fromkeys(
        ("llama_cpp qwen4_exp", "llama_cpp qwen4_exp_text"),
        "llama.cpp crashes with a head of less than 32 numbers, and has sigmoid gates "
        "(qwen4exp.cpp): with 64, a quarter of it rotated, sigmoid and an `indexer_budget` of all "
        "tokens, transformers computes the same",
    ),
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
        ("ctranslate2 gemma3", "ctranslate2 gemma3_text", "ctranslate2 mistral"),
        "ctranslate2 fails on an input that is longer than the sliding window: 40 tokens, window 8",
    ),
    **dict.fromkeys(
        (f"ctranslate2 {name}" for name in ("bart", "marian", "mbart", "pegasus", "whisper")),
        "ctranslate2 converts the whole encoder-decoder (`architecture_name` of its loaders); an "
        "export has the decoder only",
    ),
    **dict.fromkeys(
        (f"ctranslate2 {name}" for name in ("bert", "camembert", "roberta", "xlm-roberta")),
        "ctranslate2 has this family as an encoder only (its BertLoader and RobertaLoader)",
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
    "mlx bailing_hybrid": "mlx-lm knows it by the published `architectures` only (its utils.py): "
    "with them it computes the same",
    "mlx bitnet": "mlx-lm expects the packed weights of the published files (bitlinear_layers.py)",
    **dict.fromkeys(
        ("mlx deepseek_v32", "mlx glm_moe_dsa"),
        "scores of the indexer are equal, 0, where it chooses tokens, and mlx-lm then chooses "
        "others: with numbers that make such scores unequal, both compute the same",
    ),
    **dict.fromkeys(
        ("mlx llama4", "mlx llama4_text"),
        "mlx-lm has dense layers only, without chunks of attention (its llama4_text.py): for a "
        "model of such layers with tied embeddings, transformers computes the same",
    ),
    "mlx longcat_flash": "transformers has matrices of the experts that compute nothing: without "
    "them, mlx-lm computes the same",
    "mlx mimo_v2_flash": "mlx-lm fails on an odd number of rotated pairs, which the toy has; with "
    "another, its window is one token shorter (mimo_v2_flash.py): with one more, it computes the "
    "same",
    "mlx minicpm3": "mlx-lm needs the longrope scaling of published models, and scales logits of "
    "untied embeddings only (minicpm3.py): with both, transformers computes the same",
    "mlx minimax": "mlx-lm has MiniMax-M2 under this name, without linear attention (minimax.py)",
    "mlx nanochat": "mlx-lm expects the names of nanochat's own code (nanochat.py): with them, it "
    "computes the same",
    "mlx olmo_hybrid": "transformers gives norms of two kinds of layers one name, and splits the "
    "convolutions of queries, keys and values in three equal parts: with the names that mlx-lm "
    "expects and parts that are equal, it computes the same",
    "mlx phimoe": "mlx-lm expects the biases of the published models (phimoe.py): with them, "
    "transformers computes the same",
    "mlx recurrent_gemma": "mlx-lm has one key head (recurrent_gemma.py), as published models "
    "have: with one, transformers computes the same",
    "mlx deepseek_v2": "mlx-lm needs `rope_scaling` to be a dictionary (deepseek_v2.py)",
    **dict.fromkeys(
        ("mlx gpt2", "mlx gpt-sw3"),
        "mlx-lm expects the oldest names of weights, without `transformer.`",
    ),
    "mlx gpt_neox": "mlx-lm takes 4 times the hidden size for `intermediate_size` (gpt_neox.py), "
    "which published models have",
    "mlx gpt_bigcode": "mlx-lm fails to build the model, before it reads weights",
    "mlx gpt_oss": "mlx-lm expects the quantized experts of the published files",
    "mlx olmo": "mlx-lm needs the package ai2-olmo",
}  # fmt: skip
