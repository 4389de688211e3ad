"""SFT, then GRPO, of tiny models whose mixers keep what other layers or later tokens read: killed
and continued, they end with the bits of a run that nothing disturbed."""

import launch
import pytest
import yaml
from oracles import random_model, short

import policy
from policy import families


def written(kind, directory) -> list[str]:
    """The arguments of a run of a tiny model with random weights, without its directory."""
    policy.save(random_model(families.read(short(kind)), seed=4), directory / "model")
    config = yaml.safe_load(launch.SMALL.read_text())
    config["model"] = {"source": str(directory / "model")}
    config |= {"evaluation": None, "stages": config["stages"][:2]}
    file = directory / "run.yml"
    file.write_text(yaml.safe_dump(config))
    return [str(file)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "KimiLinear",
        "GlmMoeDsa",
        "Lfm2",
        "Lfm2Moe",
        "NemotronH",
        "OlmoHybrid",
        "FalconH1",
        "DeepseekV4",
        "Qwen4Exp",
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(kind, tmp_path):
    given = written(kind, tmp_path)
    undisturbed, directory = tmp_path / "undisturbed", tmp_path / "run"
    code, _, errors = launch.finish(launch.process(*given, f"run.dir={undisturbed}"))
    assert code == 0, errors
    arguments = [*given, f"run.dir={directory}"]
    assert launch.killed(
        arguments, (directory / "checkpoints" / "0000000006").exists
    )  # after two steps of grpo
    assert not (directory / "export").exists()
    code, _, errors = launch.finish(launch.process(*arguments))
    assert code == 0, errors
    launch.assert_same_run(directory, undisturbed)
    assert (
        any(row.get("reward") for row in launch.trained(directory)) and launch.lines(directory) > 4
    )
