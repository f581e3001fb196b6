"""The coordinate check accepts muP, and rejects the model without it and with a missing rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titanlite.errors import ConfigError
from titanlite.job import read_job
from titanlite.optim import OPTIMIZERS
from titanlite_lab.commands import check_mup
from titanlite_lab.mup.check import CoordinateCheck, measure_widths

MODEL = [
    *("--model.n_layers=1", "--model.dim=32", "--model.n_heads=2", "--model.n_kv_heads=1"),
    *("--model.hidden_dim=96", "--model.vocab_size=128"),
    *("--optimizer.lr=2e-3", "--training.mixed_precision_param=float32"),
]
SGD = ["--optimizer.name=SGD", "--training.max_norm=0", "--optimizer.lr=0.5"]


def check(*arguments: str, **options) -> CoordinateCheck:
    job = read_job([*MODEL, *arguments], 1, here=False)
    return CoordinateCheck(job, factors=(1, 2, 4), steps=5, seeds=2, **options)


def use_rule(monkeypatch, rule) -> None:
    """Give AdamW another rule for muP."""
    adamw, build = OPTIMIZERS["AdamW"], OPTIMIZERS["AdamW"].build_recipe
    monkeypatch.setattr(
        adamw, "build_recipe", lambda self, lr: replace(build(self, lr), mup_rule=rule)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "wider_heads"),
    [
        ([], False),
        (["--model.tied_embeddings=true", "--model.qk_norm=true"], True),
        ([*SGD, "--model.tied_embeddings=true"], True),
        (["--optimizer.name=Lion", "--optimizer.lr=1e-3"], False),
        (["--optimizer.name=Muon"], False),
        (["--optimizer.name=Adafactor", "--optimizer.scale_parameter=false"], False),
    ],
)
def test_activations_are_flat_with_mup_and_grow_without_it(arguments, wider_heads):
    one = check(*arguments, wider_heads=wider_heads)
    assert measure_widths(one, mup=True).steep == []
    without = measure_widths(one, mup=False)
    grow = [module for module in without.steep if without.slope(module) > 0.5]
    assert {"output", "layers.0.feed_forward"} <= set(grow)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda scale: scale.multiplier,  # the learning rate is not scaled
        lambda scale: scale.multiplier / scale.fan_in**0.5,
        lambda scale: scale.multiplier / scale.larger_fan**2,  # everything learns too slowly
    ],
)
def test_a_wrong_rule_for_the_learning_rate_is_found(wrong, monkeypatch):
    use_rule(monkeypatch, wrong)
    assert measure_widths(check(), mup=True).steep


def test_an_optimizer_without_a_rule_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="Adam adds optimizer.weight_decay = 0.1"):
        measure_widths(check("--optimizer.name=Adam"), mup=True)
    for settings in (["Muon", "--optimizer.muon_per_head=true"], ["Adafactor"], ["SOAP"]):
        with pytest.raises(ConfigError, match=f"{settings[0]} with these settings"):
            measure_widths(check("--optimizer.name", *settings), mup=True)
    use_rule(monkeypatch, None)
    with pytest.raises(
        ConfigError, match="no rule for the learning rate of optimizer.name = AdamW"
    ):
        measure_widths(check(), mup=True)


def test_the_script_prints_slopes_draws_the_curves_and_exits_with_the_result(
    tmp_path, monkeypatch, capsys
):
    argv = [*MODEL, "--factors=1,4", "--steps=2", "--seeds=1", f"--out={tmp_path / 'check.png'}"]
    assert check_mup.main(argv) == 0
    assert "layers.0.attention logits" in capsys.readouterr().out
    assert (tmp_path / "check.png").stat().st_size
    assert check_mup.main([*argv, "--optimizer.name=Adam"]) == 2
    assert "Adam adds" in capsys.readouterr().err
    use_rule(monkeypatch, lambda scale: 1.0)
    assert check_mup.main(argv) == 2
    assert "outside -0.75 … 0.25" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--steps=0", "--seeds=0"])
def test_a_check_without_steps_or_models_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        check_mup.main([*MODEL, option])
    assert "must be at least 1" in capsys.readouterr().err
