"""On every mesh a decoder computes what it computes on one device: values, gradients, updates,
completions."""

import itertools
import json
from pathlib import Path

import pytest
from devices import on_devices

from rl.config.stage import OPTIMIZERS

MESHES = {
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "fsdp4_tensor2": {"fsdp": 4, "tensor": 2},
    "fsdp2_expert4": {"fsdp": 2, "expert": 4},
    "data2_fsdp2_tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp2_context4": {"fsdp": 2, "context": 4},
    "tensor8": {"tensor": 8},
}
CONTEXT = MESHES["fsdp2_context4"]
SCHEMES = ("all_gather", "ring", "ulysses")


MODES = ("auto", "explicit")


def run(*cases: list, devices: int = 8) -> list[dict]:
    return on_devices(devices, Path(__file__).with_name("meshes.py"), json.dumps(cases))


def in_mode(mode: str, degrees: dict) -> dict:
    return degrees | {"explicit": True} if mode == "explicit" else degrees


def check(*cases: list, devices: int = 8) -> None:
    """Attention, entropies and log-probabilities within 2e-5, gradients within 2e-5 of their
    largest number: sums over devices round otherwise, and each layer makes more of it. With shared
    keys one norm takes up to 3.5e-5 on CPUs with AVX-512, with compressed attention one scale of
    the hyper-connections up to 2.4e-5."""
    for case, result in zip(cases, run(*cases, devices=devices), strict=True):
        if case[0] == "attention":
            assert result["difference"] < 2e-5, (case, result)
        elif case[0] == "products":
            assert result["products"].keys() == {"Explicit", "Manual"} and result["carried"] == [
                "P('fsdp', None, None)"
            ], result
        else:
            bound = 5e-5 if case[1] in ("shared_keys", "compressed") else 2e-5
            assert result["logp"] < 2e-5 and result["gradient"] < bound, (case, result)


@pytest.mark.slow
def test_sequences_that_are_cut():
    """Packed and padded rows; grouped heads, also where the axis tensor cuts queries only; 13
    tokens, which 4 does not divide.
    """
    few = {"window": 5, "softcap": 2.0, "sinks": True, "queries": 4}
    cases = [
        ["attention", {"fsdp": 2, "context": 4}, "all_gather", few],
        ["attention", {"fsdp": 2, "context": 4}, "ring", few],
        [
            "attention",
            {"tensor": 2, "context": 4},
            "ring",
            {"kv_heads": 3, "heads": 6, "balance": True},
        ],
        [
            "attention",
            {"tensor": 4, "context": 2},
            "ulysses",
            {"kv_heads": 2, "heads": 8, "sinks": True},
        ],
        ["attention", {"fsdp": 2, "context": 4}, "ulysses", {"kv_heads": 1, "window": 5}],
        ["decoder", "dense", CONTEXT, {"context_parallel": "ring", "context_load_balance": True}],
    ]
    check(*cases)


@pytest.mark.slow
def test_explicit_shardings():
    """The same numbers, and no product of which the partitioner decides how it is cut."""
    dense, experts = (
        {"fsdp": 2, "tensor": 2, "explicit": True},
        {"fsdp": 2, "expert": 2, "explicit": True},
    )
    quick = {"remat": "none"}
    cases = [
        ["decoder", "dense", dense, quick],
        ["products", "dense", dense, {}],
        ["decoder", "experts", experts, quick],
    ]
    check(*cases, devices=4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_copies_of_weights_put_nothing_together(mode):
    """Along `data`, which slices may be joined by, gradients are summed; no device asks the other
    four for their tokens.
    """
    assert run(["largest_all_gather", "dense", in_mode(mode, {"data": 2, "fsdp": 4}), {}]) == [
        {"devices": 4}
    ]


@pytest.mark.slow
def test_attention_of_every_kind():
    kinds = [
        {},
        {"window": 5, "sinks": True},
        {"softcap": 2.0, "kv_heads": 4},
        {"chunk": 4, "sinks": True},
    ]
    kinds += [kind | {"balance": True} for kind in kinds]
    meshes = itertools.cycle(
        [
            {"context": 8},
            {"fsdp": 2, "context": 4},
            {"tensor": 2, "context": 4},
            {"data": 4, "context": 2},
        ]
    )
    cases = [
        ["attention", mesh, scheme, kind]
        for kind, mesh in zip(kinds, meshes, strict=False)
        for scheme in SCHEMES[:2]
    ]
    cases += [["attention", {"data": 4, "context": 2}, "ulysses", kind] for kind in kinds[:4]]
    kernels = [{"kernel": True, "window": 200}, {"kernel": True, "balance": True, "sinks": True}]
    cases += [["attention", {"data": 2, "context": 4}, "all_gather", kind] for kind in kernels]
    cases += [["attention", {"data": 4, "context": 2}, "ulysses", kernels[0]]]
    check(*cases)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "kind",
    [
        "dense",
        "experts",
        "latent",
        "compressed",
        "recurrent",
        "channel_decays",
        "short_conv",
        "groups_of_states",
        "shared_keys",
    ],
)
def test_every_mesh_of_the_list(kind, mode):
    check(*(["decoder", kind, in_mode(mode, degrees), {}] for degrees in MESHES.values()))


@pytest.mark.slow
def test_explicit_shardings_of_other_decoders():
    """Decoders with an indexer of keys, alone or for two layers, or of blocks between gated
    streams, with states of biased projections, two mixers a layer, several streams, and with
    matrices whose outputs are sharded and the stream is not."""
    meshes = [MESHES["fsdp4_tensor2"], CONTEXT]
    kinds = (
        "indexed",
        "shared_index",
        "blocks_of_keys",
        "biased_states",
        "two_mixers",
        "streams",
        "square",
    )
    check(
        *(
            ["decoder", kind, in_mode("explicit", degrees), {}]
            for kind in kinds
            for degrees in meshes
        )
    )


@pytest.mark.slow
def test_tables_of_ngrams_and_blocks_of_keys():
    check(*(["decoder", "ngrams", degrees, {}] for degrees in (MESHES["fsdp4_tensor2"], CONTEXT)))


INDEXED = ("indexed", "shared_index", "blocks_of_keys")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (kind, "auto")
        for kind in ("dense", "windows", "sinks", "latent", *INDEXED, "recurrent", "shared_keys")
    ]
    + [(kind, "explicit") for kind in ("windows", "sinks", "latent")],
)
def test_every_way_of_attention(kind, mode):
    ways = [{"context_parallel": "all_gather"}, {"context_parallel": "ring"}]
    ways += [way | {"context_load_balance": True} for way in ways]
    if kind == "recurrent":
        ways = ways[:2]
    if kind in INDEXED:
        ways = ways[:1]
    cases = [["decoder", kind, in_mode(mode, CONTEXT), way] for way in ways]
    if kind not in INDEXED:
        cases.append(
            [
                "decoder",
                kind,
                in_mode(mode, {"fsdp": 4, "context": 2}),
                {"context_parallel": "ulysses"},
            ]
        )
    check(*cases)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_moments_cut_over_copies_of_the_weights(mode):
    cases = [
        ["moments", {"data": 8}, {}],
        ["moments", {"data": 2, "fsdp": 2, "tensor": 2}, {"dropout": 0.2}],
    ]
    cases = [[what, in_mode(mode, degrees), options] for what, degrees, options in cases]
    for case, result in zip(cases, run(*cases), strict=True):
        assert result["weights"] < 1e-4 and result["metrics"] < 1e-4, (case, result)
        assert result["share"] < 0.17 and result["same"], (case, result)


@pytest.mark.slow
def test_steps_of_every_optimizer():
    """Those of one device, within rounding, from moments that are cut; the means of Adafactor are
    over dimensions that are cut, so a device has more of them."""
    meshes = {"fsdp": 8}, {"fsdp": 2, "tensor": 2, "expert": 2}, {"data": 4, "tensor": 2}
    cases = [["optimizer", each, {"name": name}] for name in OPTIMIZERS for each in meshes]
    for case, result in zip(cases, run(*cases), strict=True):
        assert result["weights"] < 1e-4 * result["change"], (case, result)
        assert result["share"] < (0.7 if "adafactor" in case[2].values() else 0.2), (case, result)


@pytest.mark.slow
def test_a_device_has_its_matrices_in_full():
    """Devices exchange matrices before and after the iteration of Muon, and gather none, also where
    their number does not divide that of the layers, and where a matrix is alone."""
    query = [["layers", "embed", "q_heads", "kv"], [1], [6, 16, 4, 8]]
    experts = [["layers", "exp", "embed_moe", "mlp_moe"], [2], [4, 4, 8, 16]]
    output = [["layers", "heads", "kv", "embed"], [1, 2], [4, 4, 8, 16]]
    alone = [["embed", "mlp"], [0], [16, 32]]
    meshes = {"fsdp": 4, "tensor": 2}, {"fsdp": 2, "tensor": 2, "expert": 2}
    meshes = (*meshes, {"data": 2, "fsdp": 2, "tensor": 2})
    weights = query, experts, output, alone
    cases = [["orthogonal", degrees, *each] for degrees in meshes for each in weights]
    for case, result in zip(cases, run(*cases), strict=True):
        assert result["collectives"] == ["all-to-all"], (case, result)
        assert result["difference"] < 1e-5, (case, result)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_completions_where_devices_share_the_rows(mode):
    cases = [
        ["completions", kind, in_mode(mode, CONTEXT), {}]
        for kind in ("dense", "latent", "recurrent")
    ]
    paged = {"cache": "paged", "page_size": 4, "prefill_chunk": 4}
    cases.append(["completions", "latent", in_mode(mode, {"expert": 2, "context": 4}), paged])
    for case, result in zip(cases, run(*cases), strict=True):
        assert result["equal"] and result["logprobs"] < 1e-4 and result["parts"] == 8, (
            case,
            result,
        )


# Rules that keep rows where training has them, and cut what is multiplied over the axes that are
# left.
OWN = {
    "embed": [],
    "embed_vocab": [],
    "mlp": ["fsdp", "tensor"],
    "heads": ["fsdp", "tensor"],
    "q_heads": ["fsdp", "tensor"],
}
OWN |= {"vocab": ["tensor", "fsdp"], "batch": ["data", "expert"], "cache_batch": ["data", "expert"]}


EVERY, STATIONARY = {"fsdp": 2, "tensor": 2, "expert": 2}, {"rules": "stationary"}
PAGED = STATIONARY | {"cache": "paged", "page_size": 4, "prefill_chunk": 4}
RESHARDED = {
    "dense": [
        [MESHES["fsdp4_tensor2"], STATIONARY],
        [MESHES["data2_fsdp2_tensor2"], {"rules": OWN}],
        [EVERY, PAGED],
    ],
    "experts": [
        [EVERY, STATIONARY, {"expert_parallel": scheme}] for scheme in ("all_to_all", "hidden")
    ],
    "latent": [
        [EVERY, PAGED],
        [CONTEXT, STATIONARY],
        [EVERY, STATIONARY | {"weights": "int8"}],
    ],
    "indexed": [[MESHES["fsdp4_tensor2"], STATIONARY], [EVERY, PAGED]],
    "shared_index": [[EVERY, PAGED]],
    "blocks_of_keys": [[MESHES["fsdp4_tensor2"], STATIONARY], [EVERY, PAGED]],
    "ngrams": [[MESHES["fsdp4_tensor2"], STATIONARY], [EVERY, PAGED]],
    "recurrent": [[MESHES["fsdp4_tensor2"], STATIONARY]],
    "channel_decays": [[MESHES["fsdp4_tensor2"], STATIONARY]],
    "short_conv": [[MESHES["fsdp4_tensor2"], STATIONARY]],
    "groups_of_states": [[MESHES["fsdp4_tensor2"], STATIONARY]],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RESHARDED)
def test_completions_with_weights_resharded_for_decoding(kind):
    cases = [["completions", kind, *way] for way in RESHARDED[kind]]
    for case, result in zip(cases, run(*cases), strict=True):
        assert result["equal"] and result["logprobs"] < 1e-4, (case, result)


# Queries, new keys and values to the rows of the cache, the results of attention; sums behind two
# products. Latents come from products that are cut too: those of queries and of keys are put
# together.
FLOOR = {
    "dense": {"all-to-all": 4, "all-reduce": 2},
    "latent": {"all-gather": 2, "all-to-all": 2, "all-reduce": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FLOOR)
def test_a_decoded_token_sends_nothing_but_what_changes_places(kind):
    """A slice of TPUs waits some microseconds for each, 61 layers of them for a token of
    DeepSeek-V3."""
    meshes = [{"data": 2, "fsdp": 4}, {"fsdp": 2, "expert": 4}]
    assert run(*(["sent", kind, mesh] for mesh in meshes)) == [FLOOR[kind]] * 2
