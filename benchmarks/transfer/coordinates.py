"""Coordinate check: the size of activations after 1, 5 and 10 steps, by width and by depth.

    python -m benchmarks.transfer.coordinates --output coordinates.md --plot coordinates.png

A Llama with heads of 16 trains on random tokens on the CPU, in float32, by torch's AdamW without
clipping, with the initial values and parameter groups that `--parametrization completep` gives, and
with the standard ones. Its base has a hidden size of 64 and 2 layers. The figures are means of
absolute values: of the embedding, of the outputs of attention and MLP, which are summed over the
blocks, of what all blocks have changed in the residual stream, and of the logits; and the largest
one of the sizes divided by the smallest, after 10 steps. If the parametrization transfers, the
sizes stay flat: the ratio is near 1.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import tables
from benchmarks.machine import processor
from benchmarks.transfer.optima import COMPLETEP, STANDARD
from zerolm.features.completep import Completep
from zerolm.model.model import Model
from zerolm.optim.parameter_groups import parameter_groups

BASE_WIDTH, BASE_LAYERS, HEAD, VOCABULARY = 64, 2, 16, 512
WIDTHS, DEPTHS = (64, 128, 256, 512, 1024), (2, 4, 8, 16)
STEPS, SHOWN = 10, (1, 5, 10)
OPTIONS = {"lr": 2.0**-7, "eps": 1e-8}
KINDS = ("embedding", "attention, summed", "MLP, summed", "change of the residual stream", "logits")


Panels = dict[tuple[str, str], tuple[list[int], list[dict[int, dict[str, float]]]]]


def main() -> None:
    parser = tables.parser(__doc__ or "")
    parser.add_argument("--plot", type=Path, help="also draw the sizes after the last step as PNG")
    arguments = parser.parse_args()
    paragraphs, panels = [], Panels()
    for name, sizes in (
        ("hidden size", [(width, BASE_LAYERS) for width in WIDTHS]),
        ("layers", [(BASE_WIDTH, layers) for layers in DEPTHS]),
    ):
        rows = []
        varied = [size[name == "layers"] for size in sizes]
        for parametrization in (STANDARD, COMPLETEP):
            curves = [measure(*size, parametrization) for size in sizes]
            panels[parametrization, name] = varied, curves
            for kind in KINDS:
                for step in SHOWN:
                    values = [curve[step][kind] for curve in curves]
                    ratio = f"{max(values) / min(values):.2f}"
                    figures = [f"{value:.3g}" for value in values]
                    rows.append([parametrization, kind, step, *figures, ratio])
        head = ["parametrization", "activation", "step", *map(str, varied), "largest / smallest"]
        paragraphs += [f"By {name}:", tables.table(head, rows)]
    if arguments.plot:
        plot(panels, arguments.plot)
    tables.show(paragraphs, processor(), arguments.output)


def plot(panels: Panels, path: Path) -> None:
    """Draw the activations after the last step over width and depth, one panel for each column."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 7), sharey=True, sharex="row")
    for place, ((parametrization, name), (sizes, curves)) in enumerate(panels.items()):
        axis = axes.flat[place]
        for kind in KINDS:
            axis.plot(sizes, [curve[STEPS][kind] for curve in curves], marker=".", label=kind)
        axis.set(xscale="log", yscale="log", title=parametrization, xlabel=name, xticks=sizes)
        axis.set_xticks(sizes, labels=map(str, sizes), minor=False)
        axis.minorticks_off()
    axes[0, 0].set_ylabel("mean absolute value")
    axes[1, 0].set_ylabel("mean absolute value")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def measure(width: int, layers: int, parametrization: str) -> dict[int, dict[str, float]]:
    """Train a model; return {step: {kind: mean absolute value}} after the steps of `SHOWN`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // HEAD, num_key_value_heads=width // HEAD,
        vocab_size=VOCABULARY, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    factors: Any = {}
    if parametrization == COMPLETEP:
        settings = SimpleNamespace(base_hidden_size=BASE_WIDTH, base_layers=BASE_LAYERS)
        plan: Any = SimpleNamespace(model=Model.from_config(config), settings=settings)
        feature = Completep(plan)
        factors = feature.option_factors()
        with torch.no_grad():
            for name, factor in feature.initial_factors().items():
                model.get_parameter(name).mul_(factor)
    groups = parameter_groups(model, 0.1, OPTIONS, factors)
    optimizer = torch.optim.AdamW(groups, **OPTIONS, betas=(0.9, 0.95))
    tokens = torch.randint(0, VOCABULARY, (8, 64), generator=torch.manual_seed(1))
    found = {}
    for step in range(1, STEPS + 1):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in SHOWN:
            found[step] = activations(model, tokens)
    return found


@torch.no_grad()
def activations(model: Any, tokens: torch.Tensor) -> dict[str, float]:
    """Return the mean absolute value of each kind of activation."""
    outputs: dict[str, list[torch.Tensor]] = {"self_attn": [], "mlp": []}
    streams: list[torch.Tensor] = []
    hooks = [model.model.norm.register_forward_pre_hook(lambda _, given: streams.append(given[0]))]
    for layer in model.model.layers:
        for part, kept in outputs.items():
            hooks.append(layer.get_submodule(part).register_forward_hook(
                lambda _, given, output, kept=kept: kept.append(
                    output[0] if isinstance(output, tuple) else output
                )
            ))  # fmt: skip
    logits = model(input_ids=tokens).logits
    for hook in hooks:
        hook.remove()
    embedding = model.model.embed_tokens(tokens)
    values = {
        "embedding": embedding.abs().mean(),
        "attention, summed": sum(output.abs().mean() for output in outputs["self_attn"]),
        "MLP, summed": sum(output.abs().mean() for output in outputs["mlp"]),
        "change of the residual stream": (streams[0] - embedding).abs().mean(),
        "logits": logits.abs().mean(),
    }
    return {kind: float(value) for kind, value in values.items()}


if __name__ == "__main__":
    main()
