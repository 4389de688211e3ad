"""Every family is read to its place on a mesh of eight devices, and computes there what it computes
on one."""

from pathlib import Path

import pytest
from devices import on_devices
from oracles import KINDS, random_model, short

import policy
from policy import families

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("loading_on_a_mesh")]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[str, dict]:
    """What load_on_mesh.py says of a directory of each kind."""
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        policy.save(random_model(families.read(short(kind))), root / kind)
    directories = {kind: str(root / kind) for kind in KINDS}
    said = on_devices(8, Path(__file__).with_name("load_on_mesh.py"), *directories.values())
    return {kind: said[directory] for kind, directory in directories.items()}


def test_weights_are_cut_and_have_the_bits_of_one_device(loaded):
    for kind, each in loaded.items():
        assert each["same"], kind
        assert each["cut"] >= each["weights"] // 3, (
            f"{kind}: {each['cut']} of {each['weights']} weights are cut"
        )


def test_logits_equal_those_of_one_device(loaded):
    for kind, each in loaded.items():
        assert each["difference"] < 1e-4, kind
