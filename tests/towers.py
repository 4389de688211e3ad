"""Tiny towers of transformers, as oracles of ours: their modules with every number perturbed, and
ours with the same numbers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from policy.fields import tower_files as files

VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
GRID = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
}
WINDOWS = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "window_size": 24,
    "fullatt_block_indexes": [1],
}
E = 32  # hidden size of the decoder


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """A tower: how it is read, its name table, how transformers makes it, calls it (items -> rows
    of each, deepstack features of each or None), and which items it is tried on: their shapes."""

    config: dict
    read: Callable
    table: dict
    build: Callable
    call: Callable
    shapes: tuple[tuple[int, int], ...]
    padded: int  # inputs of an item, padding included


def perturb(module, seed: int = 0):
    """Moves every parameter and buffer of a module: norms, position tables and bounds start
    constant, zero or infinite."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def noise(tensor, scale):
        return torch.randn(tensor.shape, generator=generator) * scale

    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name.endswith(("_min", "_max")):  # some values are clipped, most are not
                tensor.copy_(
                    (-1 if name.endswith("_min") else 1) * (1.0 + noise(tensor, 0.2).abs())
                )
            elif "std_" in name:  # created empty
                tensor.copy_(1.0 + noise(tensor, 0.3))
            elif tensor.is_floating_point() and not any(
                part in name for part in ("inv_", "freqs", "softcap", "positional_embedding.")
            ):
                tensor.add_(noise(tensor, 0.3 if tensor.dim() < 2 else 0.15))
    return module.float().eval()


def _eager(config):
    config._attn_implementation = "eager"
    return config


# Grid vision.


def build_grid(config):
    from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen

    return qwen.Qwen3VLVisionModel(_eager(qwen.Qwen3VLVisionConfig(**config)))


def build_grid_of_omni(config):
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni

    return omni.Qwen3OmniMoeVisionEncoder(_eager(omni.Qwen3OmniMoeVisionEncoderConfig(**config)))


def build_grid_of_qwen3_5(config):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    return qwen.Qwen3_5VisionModel(_eager(qwen.Qwen3_5VisionConfig(**config)))


def build_windows(config):
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

    config = _eager(qwen.Qwen2_5_VLVisionConfig(**config))
    return qwen.Qwen2_5_VisionTransformerPretrainedModel._from_config(config)


def call_grid(module, items, shapes):
    import torch

    grid = torch.tensor([(1, *shape) for shape in shapes])
    out = module(torch.cat([torch.tensor(item) for item in items]), grid_thw=grid)
    sizes = [h * w // 4 for h, w in shapes]
    deep = getattr(out, "deepstack_features", None)
    deep = torch.stack(deep).split(sizes, dim=1) if deep else [None] * len(items)
    return list(zip(out.pooler_output.split(sizes), deep, strict=True))


# SigLIP with the projector of Gemma 3.


def build_siglip(config):
    import torch
    from transformers.models.gemma3 import modeling_gemma3 as gemma
    from transformers.models.siglip import modeling_siglip as siglip

    vision = _eager(siglip.SiglipVisionConfig(**config, vision_use_head=False))
    text = gemma.Gemma3TextConfig(
        hidden_size=E, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    wrapper = gemma.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=9)
    return torch.nn.ModuleDict(
        {
            "vision_tower": siglip.SiglipVisionModel(vision),
            "multi_modal_projector": gemma.Gemma3MultiModalProjector(wrapper),
        }
    )


def _squares(items, side, patch):
    """Patches (channel, y, x), row by row, as pictures [R, 3, H, W]."""
    import torch

    grid = np.stack(items).reshape(len(items), side, side, 3, patch, patch)
    return torch.tensor(
        grid.transpose(0, 3, 1, 4, 2, 5).reshape(len(items), 3, side * patch, side * patch)
    )


def call_siglip(module, items, shapes):
    out = module["vision_tower"](_squares(items, 6, 4)).last_hidden_state
    return [(rows, None) for rows in module["multi_modal_projector"](out)]


# Tiles of Llama 4.


def build_tiles(config):
    import torch
    from transformers.models.llama4 import modeling_llama4 as llama

    vision = _eager(llama.Llama4VisionConfig(**config))
    wrapper = llama.Llama4Config(text_config={"hidden_size": E}, vision_config=config)
    return torch.nn.ModuleDict(
        {
            "vision_model": llama.Llama4VisionModel(vision),
            "multi_modal_projector": llama.Llama4MultiModalProjector(wrapper),
        }
    )


def call_tiles(module, items, shapes):
    out = module["vision_model"](_squares(items, 6, 4)).last_hidden_state
    return [(rows, None) for rows in module["multi_modal_projector"](out)]


# Vision of Gemma 4.


def build_pooled(config):
    import torch
    from transformers.models.gemma4 import modeling_gemma4 as gemma

    vision = _eager(gemma.Gemma4VisionConfig(**config))
    text = gemma.Gemma4TextConfig(hidden_size=E)
    return torch.nn.ModuleDict(
        {
            "vision_tower": gemma.Gemma4VisionModel(vision),
            "embed_vision": gemma.Gemma4MultimodalEmbedder(vision, text),
        }
    )


def call_pooled(module, items, shapes):
    import torch

    rows = []
    for item, (h, w) in zip(items, shapes, strict=True):
        at = torch.tensor([[(x, y) for y in range(h) for x in range(w)]])
        out = module["vision_tower"](
            torch.tensor(item[None]), pixel_position_ids=at
        ).last_hidden_state
        rows.append((module["embed_vision"](inputs_embeds=out), None))
    return rows


# Sounds of Omni and of Gemma 4.


def build_chunked(config):
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni

    return omni.Qwen3OmniMoeAudioEncoder(_eager(omni.Qwen3OmniMoeAudioEncoderConfig(**config)))


def call_chunked(module, items, shapes):
    """All clips in one call, since the class pads chunks to the longest of a call; every clip has a
    full one."""
    import torch

    lengths = torch.tensor([frames for frames, _ in shapes])
    out = module(
        torch.tensor(np.concatenate(items).T.copy()), feature_lens=lengths
    ).last_hidden_state
    sizes = [int(n) for n in _omni_rows(lengths)]
    return [(rows, None) for rows in out.split(sizes)]


def _omni_rows(lengths):
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni

    return omni._get_feat_extract_output_lengths(lengths)


def build_conformer(config):
    import torch
    from transformers.models.gemma4 import modeling_gemma4 as gemma

    audio = _eager(gemma.Gemma4AudioConfig(**config))
    text = gemma.Gemma4TextConfig(hidden_size=E)
    return torch.nn.ModuleDict(
        {
            "audio_tower": gemma.Gemma4AudioModel(audio),
            "embed_audio": gemma.Gemma4MultimodalEmbedder(audio, text),
        }
    )


def call_conformer(module, items, shapes):
    import torch

    rows = []
    for item in items:
        full = torch.ones((1, len(item)), dtype=torch.bool)
        out = module["audio_tower"](torch.tensor(item[None]), full).last_hidden_state
        rows.append((module["embed_audio"](inputs_embeds=out)[0], None))
    return rows


CHUNKED = {
    "d_model": 24,
    "encoder_ffn_dim": 40,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "num_mel_bins": 16,
    "downsample_hidden_size": 6,
    "n_window": 50,
    "n_window_infer": 200,
    "output_dim": 32,
}
CONFORMER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "subsampling_conv_channels": [16, 4],
    "conv_kernel_size": 3,
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "output_proj_dims": 20,
}
TILES = VISION | {
    "intermediate_size": 96,
    "num_attention_heads": 3,
    "image_size": 24,
    "vision_output_dim": 20,
    "projector_input_dim": 20,
    "projector_output_dim": 20,
}
POOLED = VISION | {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
    "standardize": True,
}
_SHAPES = ((4, 6), (2, 2), (6, 4), (2, 10))
KINDS = {
    "grid": Kind(GRID, files.grid_vision, files.GRID_VISION, build_grid, call_grid, _SHAPES, 32),
    "grid_of_omni": Kind(
        GRID,
        files.grid_vision,
        files.GRID_VISION_OF_OMNI,
        build_grid_of_omni,
        call_grid,
        _SHAPES,
        32,
    ),
    "grid_of_qwen3_5": Kind(
        {key: value for key, value in GRID.items() if key != "deepstack_visual_indexes"}
        | {"depth": 2},
        files.grid_vision,
        files.GRID_VISION,
        build_grid_of_qwen3_5,
        call_grid,
        _SHAPES,
        32,
    ),
    # Pictures of one window, and of several that its sides cut.
    "windows": Kind(
        WINDOWS,
        files.window_vision,
        files.WINDOW_VISION,
        build_windows,
        call_grid,
        ((10, 14), (2, 2), (6, 6), (2, 26), (18, 4)),
        160,
    ),
    "windows_of_a_row": Kind(
        WINDOWS | {"depth": 1, "num_heads": 3, "window_size": 8, "fullatt_block_indexes": [1]},
        files.window_vision,
        files.WINDOW_VISION,
        build_windows,
        call_grid,
        _SHAPES,
        32,
    ),
    "siglip": Kind(
        VISION | {"image_size": 24},
        functools.partial(files.siglip, rows=9),
        files.SIGLIP,
        build_siglip,
        call_siglip,
        ((6, 6),) * 3,
        40,
    ),
    "tiles": Kind(
        TILES, files.tile_vision, files.TILE_VISION, build_tiles, call_tiles, ((6, 6),) * 3, 40
    ),
    "pooled": Kind(
        POOLED, files.pooled_vision, files.POOLED_VISION, build_pooled, call_pooled, _SHAPES, 32
    ),
    "pooled_clipped": Kind(
        POOLED | {"standardize": False, "use_clipped_linears": True},
        files.pooled_vision,
        files.POOLED_VISION,
        build_pooled,
        call_pooled,
        _SHAPES,
        32,
    ),
    "chunked": Kind(
        CHUNKED,
        files.chunked_audio,
        files.CHUNKED_AUDIO,
        build_chunked,
        call_chunked,
        ((150, 1), (100, 1), (333, 1)),
        400,
    ),
    "conformer": Kind(
        CONFORMER,
        files.conformer,
        files.CONFORMER,
        build_conformer,
        call_conformer,
        ((37, 1), (64, 1), (9, 1)),
        64,
    ),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A tower of transformers, ours with its weights, the items float32[N, K], and what theirs
    returns for each."""

    kind: Kind
    theirs: object
    module: object
    weights: dict
    items: list
    expected: list

    @property
    def spec(self):
        return self.kind.read(self.kind.config)

    def call(self, weights, values, shapes, runtime):
        """(rows, features) of our tower with these weights."""
        import jax
        from flax import nnx

        graph, state = nnx.split(self.module)
        arrays = [weights[path] for path in paths(state)]
        with jax.default_matmul_precision("highest"):
            return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), arrays))(
                values, shapes, runtime
            )

    def gradients(self, factors, deep_factors, **options):
        """Of sum(rows * factors) + sum(features * deep_factors) over all items, by path of our
        weights."""
        import jax

        from policy.runtime import Runtime

        values, shapes = self.inputs()

        def loss(weights):
            rows, features = self.call(weights, values, shapes, Runtime(**options))
            total = 0.0
            for at in range(len(self.items)):
                count = self.spec.rows_of(self.kind.shapes[at])
                total += (rows[at, :count] * factors[at]).sum()
                total += (
                    0.0 if features is None else (features[:, at, :count] * deep_factors[at]).sum()
                )
            return total

        return jax.jit(jax.grad(loss))(self.weights)

    def their_gradients(self, factors, deep_factors):
        """The same by torch, by path of our weights; of None where torch has none."""
        import torch

        self.theirs.zero_grad()
        total = 0.0
        for (rows, deep), factor, deep_factor in zip(
            self.kind.call(self.theirs, self.items, self.kind.shapes),
            factors,
            deep_factors,
            strict=True,
        ):
            total = total + (rows * torch.tensor(factor)).sum()
            total = total if deep is None else total + (deep * torch.tensor(deep_factor)).sum()
        total.backward()
        buffers = {
            name: np.zeros(tuple(t.shape), np.float32) for name, t in self.theirs.named_buffers()
        }
        grads = {name: p.grad.numpy() for name, p in self.theirs.named_parameters()}
        return read_weights(
            self.kind, self.module, {n: (buffers | grads)[n] for n in self.theirs.state_dict()}
        )

    def inputs(self, chosen=None, length=None, seed=9):
        """(values [R, N, K], shapes [R, 2]) of the items with these numbers, padded with noise."""
        chosen = range(len(self.items)) if chosen is None else chosen
        length = length or self.kind.padded
        rng, first = np.random.default_rng(seed), self.items[0]
        values = rng.normal(size=(len(chosen), length, first.shape[1])).astype(np.float32)
        for at, number in enumerate(chosen):
            values[at, : len(self.items[number])] = self.items[number]
        return values, np.asarray([self.kind.shapes[number] for number in chosen], np.int32)

    def own(self, rows, features, at, number):
        """The rows and features of item `number`, which is at place `at` of a batch."""
        count = self.spec.rows_of(self.kind.shapes[number])
        assert len(self.expected[number][0]) == count
        return np.asarray(rows[at, :count]), None if features is None else np.asarray(
            features[:, at, :count]
        )


def paths(state) -> list[str]:
    from flax import nnx

    return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]


def stacked(path: str) -> bool:
    return path.startswith(("blocks.", "deepstack."))


def read_weights(kind: Kind, module, tensors: dict) -> dict:
    """Our weights by path, from tensors by stored name; every tensor must be read."""
    from flax import nnx

    flat = {".".join(map(str, path)): v.shape for path, v in nnx.to_flat_state(nnx.state(module))}
    weights, unread = {}, set(tensors)
    for path, shape in flat.items():
        place, skip = kind.table[path], int(stacked(path))
        root = path.rpartition(".")[0]
        parts = [f"{root}.{part}" if root else part for part in place.parts] or [path]
        shapes = [flat[part][skip:] for part in parts]
        everything = tuple(slice(0, n) for n in shape[skip:])
        block, pieces = place.block(shapes, parts.index(path), everything), []
        for n in range(shape[0] if skip else 1):
            name = place.name.format(n=n)
            pieces.append(block.finish(tensors[name].reshape(block.shape)[block.index]))
            assert tensors[name].shape == block.shape, name
            unread.discard(name)
        weights[path] = np.stack(pieces) if skip else pieces[0]
    assert not unread, sorted(unread)
    return weights


@functools.cache
def pair(name: str) -> Pair:
    """The models of a kind; made once in a process."""
    import torch
    from flax import nnx

    from policy import towers as modules

    kind = KINDS[name]
    torch.manual_seed(0)
    theirs = perturb(kind.build(kind.config))
    spec = kind.read(kind.config)
    with nnx.use_eager_sharding(False):
        module = nnx.eval_shape(lambda: modules.create(spec, E, nnx.Rngs(0)))
    tensors = {key: value.detach().numpy() for key, value in theirs.state_dict().items()}
    rng, lengths = np.random.default_rng(1), [h * w for h, w in kind.shapes]
    items = [rng.normal(size=(n, spec.input_width)).astype(np.float32) for n in lengths]
    with torch.no_grad():
        expected = [
            tuple(None if each is None else each.numpy() for each in rows)
            for rows in kind.call(theirs, items, kind.shapes)
        ]
    return Pair(kind, theirs, module, read_weights(kind, module, tensors), items, expected)


@functools.cache
def program(name: str, **options):
    """The compiled call of our tower, (values, shapes) -> (rows, features)."""
    import jax

    from policy.runtime import Runtime

    forward = jax.jit(lambda *args: pair(name).call(*args, Runtime(**options)))
    return lambda values, shapes: forward(pair(name).weights, values, shapes)
