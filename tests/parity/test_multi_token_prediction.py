"""The prediction modules against `transformers.modeling_layers.MtpModel`, weights read from files
in the released layout.
"""

import functools

import numpy as np
import pytest
from oracles import KINDS, configuration, oracle, random_model, reload, saved, tokens
from safetensors.numpy import load_file

import policy
from policy import families
from policy.huggingface import model_directory
from policy.modes import make_step

torch = pytest.importorskip("torch")

DEPTH, LAYERS = 2, 2
KINDS_HERE = ["DeepseekV3", "Llama"]
BY_COST = ["DeepseekV3", pytest.param("Llama", marks=pytest.mark.slow)]
ROWS, WIDTH = 4, 16
SECTION = {"multi_token_prediction": {"depth": DEPTH}}


@functools.cache
def oracles(kind):
    """(main model, MtpModel) of transformers, every norm and bias moved away from its first
    value."""
    from transformers.modeling_layers import MtpModel

    main = oracle(kind, **KINDS[kind].standard | {"num_hidden_layers": LAYERS})
    main.config.num_mtp_layers = DEPTH
    torch.manual_seed(7)
    mtp = MtpModel(main, DEPTH).float().eval()
    with torch.no_grad():
        for tensor in (*mtp.layers.parameters(), *mtp.layers.buffers()):
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.3)
    return main, mtp


def released(kind, directory):
    """A directory as DeepSeek-V3 is released: the modules are further layers, with copies of
    embedding and head."""
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    main, mtp = oracles(kind)
    file = saved(main, directory) / "model.safetensors"
    stored = load(file)
    for name, tensor in mtp.layers.state_dict().items():
        number, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        stored[f"model.layers.{LAYERS + int(number)}.{rest}"] = tensor.clone()
    for d in range(DEPTH):
        stored[f"model.layers.{LAYERS + d}.embed_tokens.weight"] = stored[
            "model.embed_tokens.weight"
        ].clone()
        stored[f"model.layers.{LAYERS + d}.shared_head.head.weight"] = stored[
            "lm_head.weight"
        ].clone()
    save_file(stored, file, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {
        kind: policy.load(released(kind, tmp_path_factory.mktemp(kind)), sections=SECTION)
        for kind in KINDS_HERE
    }


@functools.cache
def program(graph, **runtime):
    import jax

    graph = graph.with_runtime(**{"mtp": "joint"} | runtime)
    return jax.jit(
        lambda params, rows, step: graph.logprobs(params, rows, step, 0.7)[2].predictions
    )


def ours(model, rows, segments=None, **runtime):
    """(logp [D, B, T], agreement [D, B, T]) of the modules, at temperature 0.7; always computed in
    one shape."""
    segments = np.ones_like(rows) if segments is None else segments
    pad = ((0, ROWS - rows.shape[0]), (0, WIDTH - rows.shape[1]))
    rows_BT, segments_BT = np.pad(rows, pad).astype(np.int32), np.pad(segments, pad)
    result = program(model.graph, **runtime)(
        model.params, rows_BT, make_step(rows_BT, None, segments_BT)
    )
    assert not np.asarray(result.logp)[:, segments_BT == 0].any()
    return tuple(
        np.asarray(a)[:, : rows.shape[0], : rows.shape[1]] for a in (result.logp, result.agrees)
    )


def theirs(kind, row):
    """float32[D, T, V]: logits of each module; entry i of module d predicts token i + d + 1."""
    main, mtp = oracles(kind)
    ids, logits = torch.tensor(row[None]), []
    with torch.no_grad():
        hidden = main.model(ids, use_cache=False).last_hidden_state
        for d in range(DEPTH):
            hidden, ids = hidden[:, :-1], ids[:, 1:]
            positions = torch.arange(d + 1, d + 1 + ids.shape[1])[None]
            hidden = mtp.forward_layer(d, hidden, positions, None, input_ids=ids)
            logits.append(mtp._project_to_logits(hidden)[0].numpy())
        return main(torch.tensor(row[None]), use_cache=False).logits[0].numpy(), logits


@pytest.mark.parametrize("kind", BY_COST)
def test_log_probabilities_and_agreement_are_those_of_transformers(kind, models):
    model = models[kind]
    rows = tokens(2, 11, seed=4)
    logp, agrees = ours(model, rows)
    assert logp.shape == (DEPTH, 2, 11)
    for b, row in enumerate(rows):
        main, logits = theirs(kind, row)
        for d, z in enumerate(logits, 1):
            log_p = torch.log_softmax(torch.tensor(z[:-1]) / 0.7, -1).numpy()
            expected = np.take_along_axis(log_p, row[d + 1 :, None], -1)[:, 0]
            np.testing.assert_allclose(logp[d - 1, b, d + 1 :], expected, atol=2e-5, rtol=0)
            np.testing.assert_array_equal(
                agrees[d - 1, b, d + 1 :], z[:-1].argmax(-1) == main[d:-1].argmax(-1)
            )
            assert not logp[d - 1, b, : d + 1].any() and not agrees[d - 1, b, : d + 1].any()


def test_released_names_are_read_only_where_the_section_asks_for_them(tmp_path):
    directory = released("DeepseekV3", tmp_path)
    plain, one = (
        policy.load(directory),
        policy.load(directory, sections={"multi_token_prediction": {"depth": 1}}),
    )
    assert plain.config.multi_token_prediction is None and not [
        p for p in plain.params if p.startswith("mtp")
    ]
    assert one.params["mtp.eh_proj"].shape == (1, 64, 32)
    with pytest.raises(model_directory.ModelFileError, match=r"model\.layers\.4\.\S+"):
        policy.load(directory, sections={"multi_token_prediction": {"depth": 3}})


@pytest.mark.parametrize("kind", KINDS_HERE)
def test_what_is_saved_is_read_again_and_transformers_finds_nothing_odd(kind, models, tmp_path):
    model = models[kind]
    policy.save(model, tmp_path)
    back = policy.load(tmp_path)
    assert back.config == model.config and back.params.keys() == model.params.keys()
    for path, array in model.params.items():
        np.testing.assert_array_equal(
            np.asarray(back.params[path]), np.asarray(array), err_msg=path
        )
    reload(kind, tmp_path)


@pytest.mark.slow
def test_released_size_keeps_the_released_names(tmp_path):
    """With DeepSeek-V3's 61 layers the module stands in the files that transformers reads, which
    passes it over."""
    sizes = {
        "num_hidden_layers": 61,
        "hidden_size": 8,
        "intermediate_size": 8,
        "moe_intermediate_size": 4,
        "vocab_size": 16,
    }
    section = {"multi_token_prediction": {"depth": 1}}
    model = random_model(
        families.read(configuration("DeepseekV3", **sizes, first_k_dense_replace=60, duet=section))
    )
    policy.save(model, tmp_path)
    stored = {
        name.removeprefix("model.layers.61.")
        for name in load_file(tmp_path / "model.safetensors")
        if ".61." in name
    }
    assert stored > {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "mlp.experts.7.down_proj.weight",
    }
    assert not (tmp_path / model_directory.MTP_FILE).exists()
    reload("DeepseekV3", tmp_path)
    assert policy.load(tmp_path).params.keys() == model.params.keys()


def test_packed_documents_equal_the_documents_alone(models):
    lengths = (6, 2, 1, 7)
    packed, segments, alone = (
        np.zeros((1, WIDTH), int),
        np.zeros((1, WIDTH), int),
        np.zeros((ROWS, WIDTH), int),
    )
    for number, n in enumerate(lengths):
        at = sum(lengths[:number])
        alone[number, :n] = packed[0, at : at + n] = tokens(1, n, seed=n)[0]
        segments[0, at : at + n] = number + 1
    result = ours(models["DeepseekV3"], packed, segments)
    expected = ours(
        models["DeepseekV3"], alone, (np.arange(WIDTH) < np.array(lengths)[:, None]).astype(int)
    )
    for number, n in enumerate(lengths):
        at = sum(lengths[:number])
        np.testing.assert_allclose(
            result[0][:, 0, at : at + n], expected[0][:, number, :n], atol=1e-5, rtol=0
        )
        np.testing.assert_array_equal(result[1][:, 0, at : at + n], expected[1][:, number, :n])


@pytest.mark.slow
def test_unrolled_layers_give_the_same(models):
    rows = tokens(2, 9)
    result = ours(models["Llama"], rows, scan=False, remat="none")[0]
    np.testing.assert_allclose(result, ours(models["Llama"], rows)[0], atol=1e-6, rtol=0)
