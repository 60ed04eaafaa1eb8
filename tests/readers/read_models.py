"""Computes exported models with one other program, in an environment that has no zerolm.

    python read_models.py READER MODELS OUT.json [FAMILY ...]

Writes {family: {"logits": rows, "greedy": ids} or {"refused": reason}} after each model, so that
what a crash leaves is known. MODELS/ids.json has the prompt.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

NEW_TOKENS = 8


def transformers(directory, ids):
    import torch
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        inputs = torch.tensor([ids])
        logits = model(input_ids=inputs, use_cache=False).logits[0].float().tolist()
        generated = model.generate(
            inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=3
        )
    return logits, generated[0, len(ids) :].tolist()


def mlx(directory, ids):
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(directory), lazy=True)
    logits = model(mx.array([ids]))[0].astype(mx.float32).tolist()
    cache, found = make_prompt_cache(model), []
    inputs = mx.array([ids])
    for _ in range(NEW_TOKENS):
        found.append(int(model(inputs, cache=cache)[0, -1].argmax()))
        inputs = mx.array([[found[-1]]])
    return logits, found


def ctranslate2(directory, ids):
    import tempfile

    import ctranslate2
    import numpy as np

    with tempfile.TemporaryDirectory() as scratch:
        converter = ctranslate2.converters.TransformersConverter(str(directory))
        converter.convert(f"{scratch}/model", quantization="float32", force=True)
        # A tokenizer without BOS gives null there, which the library does not load.
        config = Path(scratch, "model", "config.json")
        values = json.loads(config.read_text())
        config.write_text(
            json.dumps({k: v or "" if k.endswith("_token") else v for k, v in values.items()})
        )
        generator = ctranslate2.Generator(f"{scratch}/model", compute_type="float32")
        logits = np.array(generator.forward_batch([ids]))[0].tolist()
        found = list(ids)
        for _ in range(NEW_TOKENS):
            found.append(int(np.array(generator.forward_batch([found]))[0, -1].argmax()))
    return logits, found[len(ids) :]


def llama_cpp(directory, ids):
    """Convert with the lines of docs/readers.md and the user's converter, compute with libllama."""
    import numpy as np
    from llama_cpp import Llama

    file = Path(directory).parent / f"{Path(directory).name}.gguf"
    done = subprocess.run(
        [*json.loads(os.environ["READERS_CONVERT"]), str(directory), "llama-bpe",
         "--outtype", "f32", "--outfile", str(file)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    model = Llama(str(file), n_ctx=64, logits_all=True, verbose=False, n_threads=1, n_batch=64)
    model.eval(ids)
    logits = np.array(model.scores[: len(ids)]).tolist()
    found = [int(np.argmax(logits[-1]))]
    for _ in range(NEW_TOKENS - 1):
        model.eval([found[-1]])
        found.append(int(np.argmax(model.scores[model.n_tokens - 1])))
    file.unlink()
    return logits, found


READERS = {each.__name__: each for each in (transformers, mlx, ctranslate2, llama_cpp)}


def main(reader, models, out, *families):
    ids = json.loads((Path(models) / "ids.json").read_text())
    results = {}
    for directory in sorted(each for each in Path(models).iterdir() if each.is_dir()):
        if families and directory.name not in families:
            continue
        results[directory.name] = {"refused": "the process ended"}
        Path(out).write_text(json.dumps(results))
        try:
            with contextlib.redirect_stdout(sys.stderr):
                logits, greedy = READERS[reader](directory, ids)
            results[directory.name] = {"logits": logits, "greedy": greedy}
        except BaseException as error:  # mlx-lm exits where a package is missing
            if isinstance(error, KeyboardInterrupt):
                raise
            text = " ".join(f"{type(error).__name__}: {error}".split())
            results[directory.name] = {"refused": text[:200]}
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
