"""`autoencoder`: the scaled mean, from configurations, folders and pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from frostline.errors import MissingExtra, UsageError
from frostline.stages import autoencoder

pytest.importorskip("diffusers")

KL = {
    "block_out_channels": [4, 8],
    "norm_num_groups": 2,
    "latent_channels": 3,
    "layers_per_block": 1,
    "scaling_factor": 0.5,
}
TINY = {
    "_class_name": "AutoencoderTiny",
    "encoder_block_out_channels": [4, 4],
    "decoder_block_out_channels": [4, 4],
    "num_encoder_blocks": [1, 1],
    "num_decoder_blocks": [1, 1],
    "latent_channels": 3,
}


def pictures(*shape: int) -> torch.Tensor:
    return torch.rand(*(shape or (2, 3, 16, 16)), generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_latents_are_the_scaled_mean_and_the_same_every_time() -> None:
    encoder = autoencoder(config=KL, seed=1)
    mean = encoder.network.encode(pictures()).latent_dist.mean
    assert torch.equal(encoder(pictures()), mean * 0.5)
    assert torch.equal(encoder(pictures()), encoder(pictures()))
    assert encoder(pictures()).shape == (2, 3, 8, 8)
    sampled = encoder.network.encode(pictures()).latent_dist.sample()
    assert not torch.equal(sampled, mean), "or a sample would have passed as well"


def test_the_shift_of_newer_models() -> None:
    encoder = autoencoder(config={**KL, "shift_factor": 0.25}, seed=1)
    mean = encoder.network.encode(pictures()).latent_dist.mean
    assert torch.allclose(encoder(pictures()), (mean - 0.25) * 0.5)


def test_clips_bytes_and_the_way_back() -> None:
    encoder = autoencoder(config=KL, seed=1)
    clips = encoder(pictures(2, 4, 3, 16, 16))
    assert clips.shape == (2, 4, 3, 8, 8)
    assert encoder.decode(clips).shape == (2, 4, 3, 16, 16)
    eight = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(encoder(eight), encoder(eight.float() / 127.5 - 1))


def test_tiny() -> None:
    encoder = autoencoder(config=TINY, seed=1)
    assert torch.equal(encoder(pictures()), encoder.network.encode(pictures()).latents)
    assert encoder.decode(encoder(pictures())).shape == (2, 3, 16, 16)


def test_frozen_seeded_and_of_the_dtype() -> None:
    encoder = autoencoder(config=KL, seed=1).train()
    assert not any(module.training for module in encoder.modules())
    assert not any(p.requires_grad for p in encoder.parameters())
    assert torch.equal(autoencoder(config=KL, seed=1)(pictures()), encoder(pictures()))
    assert not torch.equal(autoencoder(config=KL, seed=2)(pictures()), encoder(pictures()))
    assert autoencoder(config=KL, dtype="bfloat16")(pictures()).dtype == torch.bfloat16


@pytest.mark.parametrize("config", [KL, TINY])
def test_folders_and_pipelines(tmp_path: Path, config: dict[str, object]) -> None:
    encoder = autoencoder(config=config, seed=3)
    encoder.network.save_pretrained(tmp_path / "alone")
    encoder.network.save_pretrained(tmp_path / "pipeline" / "vae")
    encoder.network.save_pretrained(tmp_path / "pipeline" / "other")
    for loaded in (
        autoencoder(tmp_path / "alone"),
        autoencoder(str(tmp_path / "pipeline")),
        autoencoder(tmp_path / "pipeline", subfolder="other"),
    ):
        assert torch.equal(loaded(pictures()), encoder(pictures()))


def test_weights_that_are_missing_are_never_made_up(tmp_path: Path) -> None:
    autoencoder(config=KL).network.save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    save_file({k: v for k, v in weights.items() if k != "quant_conv.weight"}, file, {"format": "pt"})
    with pytest.raises(UsageError, match=r"(?s)not all there.*quant_conv\.weight"):
        autoencoder(tmp_path)


# diffusers asks the hub with an argument that huggingface_hub has given up.
@pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks`:UserWarning")
def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    autoencoder(config=KL).network.save_pretrained(tmp_path / "vae")
    config = json.loads((tmp_path / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps({**config, "_class_name": "VQModel"}))
    with pytest.raises(UsageError, match="is a 'VQModel'; known are AutoencoderKL and AutoencoderTiny"):
        autoencoder(tmp_path / "vae")
    with pytest.raises(UsageError, match=r"Did you mean 'stabilityai/sd-vae-ft-mse'"):
        autoencoder("stabilityai/sd-vae-ft-msee")
    with pytest.raises(UsageError, match=r"(?s)does not know:.*latent_chanels"):
        autoencoder(config={"latent_chanels": 3})
    with pytest.raises(UsageError, match="seed goes with config"):
        autoencoder("a", seed=1)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    (tmp_path / "old" / "diffusion_pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match="a pickled file"):
        autoencoder(tmp_path / "old")
    encoder = autoencoder(config=KL)
    with pytest.raises(UsageError, match="multiples of 2"):
        encoder(pictures(1, 3, 15, 16))
    with pytest.raises(UsageError) as error:
        encoder(torch.zeros(3, 16, 16, dtype=torch.int32))
    assert len(error.value.problems) == 2


def test_without_diffusers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingExtra, match=r"diffusers: pip install 'frostline\[hf\]'"):
        autoencoder(config=KL)
