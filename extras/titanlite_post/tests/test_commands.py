"""What the commands print and log."""

from __future__ import annotations

import pytest

from titanlite.train import main as train
from titanlite_post.commands.dpo import DPOConfig
from titanlite_post.commands.grpo import GRPOConfig, rollout_fields
from titanlite_post.grpo import GRPOSection


@pytest.mark.parametrize(("name", "config"), [("dpo", DPOConfig), ("grpo", GRPOConfig)])
def test_help_names_the_command_and_every_key_of_its_section_with_a_meaning(name, config, capsys):
    assert train(["--help"], config) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert f"-m titanlite_post {name} " in first
    keys = [at for at, line in enumerate(lines) if line.startswith(f"  --{name}.")]
    assert keys and all(lines[at + 1].startswith("      ") for at in keys)


def test_the_line_of_a_rollout_has_what_the_settings_measure():
    statistics, means = {"reward": 0.5, "failed_rewards": 1.0}, [0.0, 0.1, 0.2, 0.3]
    assert rollout_fields(GRPOSection(), statistics, means) == {"reward": 0.5, "sampler_gap": 0.3}
    all_options = GRPOSection(failed_reward="skip", kl_weight=0.1, steps_per_rollout=2)
    measured = {"kl": 0.1, "clipped": 0.2, "sampler_gap": 0.3}
    assert rollout_fields(all_options, statistics, means) == {**statistics, **measured}
