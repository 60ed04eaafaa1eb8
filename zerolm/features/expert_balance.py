"""Mixture-of-experts routers: metrics, balancing with biases, and router losses."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from zerolm.config.flag import real, switch
from zerolm.features.feature import Batch, Case, Feature, Row, RunParts, StepInputs
from zerolm.run_dir.metrics import Z_LOSS, Metric, Panel

ROUTER_CHOICE = Panel(
    "Router choice",
    smooth=True,
    about="Entropy of the routers' probabilities, divided by that of a uniform choice, and "
    "the share of experts that received no token in the step.",
)


class ExpertBalance(Feature):
    """Drives `Routing` (zerolm/routers/routing.py) in every run whose model has routers."""

    name = "expert_balance"
    SECTION = "Routers"
    METRICS = (
        Metric(
            "train/router_z_loss",
            "nats",
            Z_LOSS,
            "with `--router_z_loss`: the routers' weighted z-loss; not included in `train/loss`",
        ),
        Metric(
            "router/load_imbalance",
            "",
            Panel(
                "Router balance",
                smooth=True,
                about="Tokens routed to the busiest expert, divided by the mean over all experts; "
                "averaged over the routers. 1 is balanced.",
            ),
            "mixture of experts: tokens routed to the busiest expert, divided by the mean over all "
            "experts; averaged over the routers. 1 is balanced",
        ),
        Metric(
            "router/load_imbalance/router.<n>",
            "",
            Panel(
                "Balance by router",
                many=True,
                ordered=True,
                smooth=True,
                about="From the first router (blue) to the last (yellow).",
            ),
            "the same for one router, numbered from 0 in model order",
        ),
        Metric(
            "router/entropy",
            "share",
            ROUTER_CHOICE,
            "mean entropy of the routers' probabilities for a token, divided by the entropy of "
            "a uniform choice",
        ),
        Metric(
            "router/unused_experts",
            "share",
            ROUTER_CHOICE,
            "share of experts that received no token in the step",
        ),
    )

    @dataclass(frozen=True)
    class Flags:
        balance_rate: float = real(
            "model",
            "mixture of experts: after each step, raise the routing bias of experts below the mean "
            "load by X, and lower the others'; 0.001 is typical, 0: off",
            default=0.0,
            changes_curve=True,
        )
        global_router_loss: bool = switch(
            "model",
            "mixture of experts: compute the router loss over the global batch instead of each "
            "micro-batch",
            changes_curve=True,
        )
        router_z_loss: float = real(
            "model",
            "mixture of experts: weight of the routers' mean squared log-partition; 0.001 is "
            "typical, 0: off",
            default=0.0,
            changes_curve=True,
        )

    @classmethod
    def problems(cls, case: Case) -> Iterable[str]:
        settings, name, path = case.settings, case.config.model_type, case.settings.model_config
        if settings.balance_rate:
            from zerolm.routers import biased_routers

            where = f"{settings.where('balance_rate')}: {settings.balance_rate:g}"
            if why := biased_routers.unsupported_reason(case.config):
                yield (
                    f"{where}, but {why} ({path}). Remove the flag, or use a model such as "
                    f"deepseek_v3."
                )
            if settings.compile:
                yield (
                    f"{where} is not supported together with --compile: a compiled block does not "
                    f"count the tokens of its experts. Remove one of the flags."
                )
        if not (settings.global_router_loss or settings.router_z_loss):
            return
        from zerolm.model.architecture import experts_per_token, router_loss_coefficient

        coefficient, top_k = router_loss_coefficient(case.config), experts_per_token(case.config)
        if settings.global_router_loss and not (coefficient and top_k):
            yield (
                f"{settings.where('global_router_loss')}: true, but {name} computes no router "
                f"loss: that needs output_router_logits true, a coefficient above 0, and a model "
                f"type with such a loss ({path}). Correct the model config, or remove the flag."
            )
        if settings.router_z_loss and coefficient is None:
            yield (
                f"{settings.where('router_z_loss')}: {settings.router_z_loss:g}, but {name} "
                f"returns no router logits: that needs output_router_logits true, and a model type "
                f"with a router loss ({path}). Correct the model config, or remove the flag."
            )

    @classmethod
    def notices(cls, case: Case) -> Iterable[str]:
        """Report that a router loss depends on the micro-batch size, because the loss multiplies
        means over a micro-batch.
        """
        from zerolm.model.architecture import router_loss_coefficient

        if router_loss_coefficient(case.config) and not case.settings.global_router_loss:
            yield (
                f"{case.settings.model_config}: output_router_logits is true: the router loss "
                f"averages over a micro-batch, so the loss curve depends slightly on "
                f"--micro_batch_size and the world size (1e-3 in the gradient norm); "
                f"--global_router_loss avoids that"
            )

    @classmethod
    def summary(cls, plan: Any) -> Mapping[str, str]:
        settings, lines = plan.settings, {}
        losses = ["of the global batch"] if settings.global_router_loss else []
        losses += [f"z-loss {settings.router_z_loss:g}"] if settings.router_z_loss else []
        if losses:
            lines["router losses"] = ", ".join(losses)
        if settings.balance_rate:
            lines["experts"] = f"balanced by a bias, {settings.balance_rate:g} a step"
        return lines

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        from zerolm.model.architecture import experts_per_token

        config = plan.model.config
        return experts_per_token(config) is not None or _has_biased_routers(config)

    def change_model(self, model: Any) -> None:
        from zerolm.routers import biased_routers

        if self.settings.balance_rate:
            biased_routers.move_biases_to_buffers(model)

    def attach(self, run: RunParts) -> None:
        from zerolm.plan.exchange import num_layers
        from zerolm.plan.rank_share import shapes_of_stages
        from zerolm.routers.routing import Routing

        layout, ds = run.layout, self.plan.ds
        self.contributes = layout.axis("tensor", run.rank).index == 0
        first, routers, biased = 0, None, False
        if layout.stages > 1:
            biased = not self.settings.compile and _has_biased_routers(self.plan.model.config)
            stages = shapes_of_stages(self.plan.model.shapes, ds.stage_layers)
            counts = [num_layers(shapes) for shapes in stages]
            first, routers = sum(counts[: layout.axis("stages", run.rank).index]), sum(counts)
        self.routing = Routing(
            run.engine.module,
            interval=self.settings.log_interval,
            balance_rate=self.settings.balance_rate,
            compiled=self.settings.compile,
            global_loss=self.settings.global_router_loss,
            z_loss=self.settings.router_z_loss,
            first=first,
            routers=routers,
            biased=biased,
        )

    def loaded(self, state: dict[str, Any]) -> None:
        self.routing.state = self.state = state

    def begin(self, step: StepInputs) -> None:
        self.routing.begin(step.number)

    def forward(self, batch: Batch) -> AbstractContextManager[None]:
        return self.routing.observing()

    def block_losses(self, outputs: Any, tokens: int) -> Mapping[str, Any]:
        self.routing.observe(outputs)
        return self.routing.losses(tokens)

    def sums(self, losses: Sequence[Any]) -> Mapping[str, Any]:
        return {
            group: {name: each * self.contributes for name, each in figures.items()}
            for group, figures in self.routing.sums().items()
        }

    def summed(self, figures: Mapping[str, Mapping[str, Any]]) -> None:
        self.metrics = self.routing.row(figures)

    def after(self, step: StepInputs, result: Any) -> None:
        self.routing.end_step(result.applied)
        self.state = self.routing.state

    def row(self, result: Any) -> Row:
        return self.metrics


def _has_biased_routers(config: Any) -> bool:
    from zerolm.model.architecture import ConfigKey, meta_model
    from zerolm.routers.biased_routers import biased_routers

    return bool(biased_routers(meta_model(ConfigKey.of(config).config)))
