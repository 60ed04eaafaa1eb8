"""`plan --budget`: the published fits have their published optima."""

import json

import pytest

from launch import __main__
from launch.estimate import scaling
from zerolm.common.errors import ConfigError
from zerolm.plan import hardware


def test_chinchilla_is_the_optimum_of_its_own_budget():
    """5.76e23 FLOPs: 70B parameters and 1.4T tokens, Hoffmann et al. 2022, section 4."""
    rule, _, refit = scaling.choices(5.76e23)[:3]
    assert rule.parameters == pytest.approx(70e9, rel=0.02)
    assert rule.tokens == pytest.approx(1.4e12, rel=0.02)
    # Besiroglu et al. 2024: their fit agrees with 20 tokens per parameter
    assert 15 < refit.tokens / refit.parameters < 26


def test_hoffmanns_third_approach_gives_smaller_models():
    """Hoffmann et al. 2022, table A3: 40B parameters for 5.76e23 FLOPs; approach 1 gives 67B."""
    assert scaling.HOFFMANN.optimum(5.76e23)[0] == pytest.approx(40e9, rel=0.2)


@pytest.mark.parametrize("fit", [scaling.HOFFMANN, scaling.BESIROGLU])
@pytest.mark.parametrize("flops", [1e19, 1e22, 1e25])
def test_the_optimum_has_the_least_loss(fit, flops):
    parameters, tokens = fit.optimum(flops)
    assert 6 * parameters * tokens == pytest.approx(flops)
    least = fit.loss(parameters, tokens)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert fit.loss(parameters * factor, tokens / factor) > least


def test_overtraining_costs_more_for_smaller_models():
    found = [one for one in scaling.choices(1e22) if one.name.startswith("overtrained")]
    penalties = [one.penalty for one in found]
    assert penalties == sorted(penalties) and penalties[0] > 0
    assert all(0 < one.wasted < 1 for one in found)
    best = scaling.BESIROGLU.loss(*scaling.BESIROGLU.optimum(1e22 * (1 - found[0].wasted)))
    assert best == pytest.approx(found[0].loss, abs=1e-6)


def test_money_and_time_are_converted_to_flops():
    device = hardware.load("H100", {"price_per_hour": 2.0})
    by_time, _ = scaling.flops_of("10d", device, devices=8)
    assert by_time == pytest.approx(8 * 864000 * 989.4e12 * device.attained)
    by_money, derivation = scaling.flops_of("$3,840", device, devices=1)
    assert by_money == pytest.approx(by_time) and "1,920 device-hours" in derivation
    assert scaling.flops_of("1e22", device, devices=1)[0] == 1e22
    for wrong in ("x", "-1", "0", "$", "10y"):
        with pytest.raises(ConfigError, match="not a budget"):
            scaling.flops_of(wrong, device, devices=1)


def test_the_command_prints_the_choices(capsys):
    assert __main__.main(["plan", "--budget", "1e22", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["choices"][0]["name"] == "20 tokens per parameter"
    assert __main__.main(["plan", "--budget", "1e22"]) == 0
    assert "arXiv 2404.10102" in capsys.readouterr().out
