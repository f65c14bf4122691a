"""What cannot work, as a person meets it: one message that says what was given and what to do."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest

import frostline as fl
from frostline.errors import UsageError
from frostline_recipes.foveated import glyphs, networks
from frostline_recipes.foveated.workload import load

pytest.importorskip("av")
pytest.importorskip("transformers")
Shell = Any  # of conftest.py
ONE_STEP = ("--steps", "1", "--live", "--out", "wrong")


def refused(shell: Shell, *parts: str, **parameters: Any) -> str:
    """What `frostline train` says to it, before anything is made."""
    told = shell.foveated("train", *ONE_STEP, **parameters)
    assert (told.code, told.out) == (1, ""), told.told
    assert told.err.startswith("error: ")
    assert "Traceback" not in told.err
    assert not (shell.folder / "wrong").exists()
    for part in parts:
        assert part in told.told
    return str(told.err)


# clips


def test_no_videos(shell: Shell, tmp_path: Path) -> None:
    refused(shell, "No videos in", "there is no such file or folder", "Give videos=", videos="nowhere")
    (tmp_path / "notes.txt").write_text("no clip")
    refused(shell, "none of the 1 files in it is called .mp4", videos=tmp_path)


def test_clips_that_last_too_short_or_too_long(shell: Shell) -> None:
    refused(shell, "lasts 20 to 60 s", "they last 6.0 to 6.0 s", "Change min_s and max_s", min_s=20, max_s=60)


def test_missing_captions(shell: Shell, little: Path, tmp_path: Path) -> None:
    shutil.copytree(little / "clips", tmp_path / "clips")
    told = refused(
        shell, "16 of 16 clips in", "have no caption", "captions.csv", "objective=reconstruct needs none",
        videos=tmp_path / "clips",
    )  # fmt: skip
    assert "000009.mp4" in told
    assert "… and 6 more" in told
    rows = list(csv.DictReader((little / "captions.csv").read_text().splitlines()))
    with (tmp_path / "half.csv").open("w", newline="") as text:
        table = csv.DictWriter(text, ["path", "caption"], extrasaction="ignore")
        table.writeheader()
        table.writerows(rows[:15])
    told = refused(
        shell, "1 of 16 clips", "half.csv has no line with their path", videos=tmp_path / "clips",
        captions=tmp_path / "half.csv",
    )  # fmt: skip
    assert "000015.mp4" in told


@pytest.fixture(scope="module")
def shorter(tmp_path_factory: pytest.TempPathFactory, little: Path) -> Path:
    """Four clips, one of 2 s that has 8 frames, and a file that is no video."""
    folder = tmp_path_factory.mktemp("shorter")
    for i in range(4):
        shutil.copy(little / "clips" / f"{i:06d}.mp4", folder / f"{i}.mp4")
    glyphs.film(glyphs.script(1, size=64, seconds=2.0), folder / "short.mp4", fps=4)
    (folder / "torn.mp4").write_bytes((folder / "0.mp4").read_bytes()[:900])
    lines = "".join(f"{path.name},a caption\n" for path in sorted(folder.iterdir()))
    (folder / "captions.csv").write_text("path,caption\n" + lines)
    return folder


def test_a_clip_shorter_than_the_frames_asked_for_is_quarantined_with_the_reason(
    shell: Shell, shorter: Path
) -> None:
    told = shell.foveated("freeze", "--out", "shorter", "--max-bad", "2", videos=shorter)
    assert told.code == 0, told.err
    store = fl.Store.open(shell.folder / "shorter")
    assert sorted(store.keys) == ["0.mp4", "1.mp4", "2.mp4", "3.mp4"]
    why = {entry["key"]: entry["reason"] for entry in store.quarantine}
    assert "it has 8 frames" in why["short.mp4"]
    assert "frames=12" in why["short.mp4"]
    assert "damaged, cut off or no video" in why["torn.mp4"]


# parameters


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_frames": 16}, "num_frames is 16 and stored_frames 12; 1 ≤ num_frames ≤ stored_frames"),
        ({"num_frames": 1, "objective": "joint"}, "2 ≤ num_frames"),
        ({"fine_iterations": -1}, "fine_iterations is -1; at least 0"),
        ({"grad_accum": 0}, "grad_accum is 0; at least 1"),
        ({"learning_rate": 0}, "learning_rate is 0; above 0, or none for the default"),
        ({"learning_rate": "nan"}, "learning_rate is nan; above 0"),
        ({"lambda_coarse": -1}, "lambda_coarse is -1; a number, at least 0"),
        ({"lambda_coarse": "inf"}, "lambda_coarse is inf; a number, at least 0"),
        ({"warmup_steps": -1}, "warmup_steps is -1; at least 0"),
        ({"max_tokens": 0}, "max_tokens is 0; at least 1"),
        ({"frames_a_call": 0}, "frames_a_call is 0; at least 1"),
        ({"encoder_learning_rate": 0.1}, "of an encoder that learns: train_encoder=true"),
        ({"train_encoder": "true", "encoder_learning_rate": -1}, "encoder_learning_rate is -1; above 0"),
        ({"attention": "deep", "encoder_precision": "bf16"}, "with attention=deep none are"),
        ({"train_encoder": "true", "compile_encoder": "true"}, "with train_encoder=true none are"),
        ({"videos": "glyphs", "n_clips": 2}, "n_clips is 2; at least one clip for each split"),
        ({"videos": "glyphs", "glyph_scale": 9}, "glyph_scale is 9; 0.5 to 2"),
        ({"videos": "glyphs", "clip_size": 33}, "clip_size is 33; an even number of pixels"),
        ({"videos": "glyphs", "clip_fps": 0}, "24 s at clip_fps=0; at least 12 frames"),
        ({"frame_size": 8}, "frame_size is 8; at least 16, one patch of encoder='small'"),
        ({"frame_size": 60, "objective": "joint"}, "frame_size is 60, which 8 does not divide: a latent of"),
        ({"frame_size": 60, "objective": "reconstruct"}, "Take 56 or 64; objective=caption needs no latents"),
        ({"attention": "both"}, "attention"),
        ({"objective": "captions"}, "objective"),
    ],
)
def test_parameters_that_cannot_work(shell: Shell, given: dict[str, Any], told: str) -> None:
    refused(shell, told, **given)


# networks


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"encoder": "smal"}, "encoder='smal' is no folder here, and names on the hub are owner/name"),
        ({"encoder": "smal"}, "did you mean 'small'?"),
        ({"llm": "smollm2-135"}, "did you mean 'smollm2-135m'?"),
        ({"vae": "sdvae"}, "did you mean 'sd-vae'?"),
        ({"encoder": "./encoder"}, "encoder='./encoder': there is no such folder"),
        ({"encoder": ""}, "encoder=''"),
        ({"encoder": "nobody/nothing"}, "Cannot load encoder='nobody/nothing': "),
        ({"encoder": "dinov2-s14"}, "encoder='dinov2-s14' (facebook/dinov2-small on the hub): "),
        ({"encoder": "dinov2-s14"}, "or take encoder=small, which comes with frostline"),
        ({"llm": "nobody/nothing", "objective": "reconstruct"}, "Cannot load llm='nobody/nothing': "),
        ({"vae": "nobody/nothing", "objective": "joint"}, "Cannot load vae='nobody/nothing': "),
        ({"vae": "sd-vae", "objective": "joint"}, "vae='sd-vae' (stabilityai/sd-vae-ft-mse on the hub): "),
        (
            {"llm": "smollm2-135m"},
            "Where there is no network, download it elsewhere and give llm=",
        ),
    ],
)
def test_networks_that_cannot_be_found_show_before_anything_is_made(
    shell: Shell, given: dict[str, Any], told: str
) -> None:
    refused(shell, told, **given)


def test_all_wrong_names_are_told_at_once(shell: Shell) -> None:
    refused(shell, "encoder='x1'", "llm='x2'", "vae='x3'", encoder="x1", llm="x2", vae="x3")


def test_a_folder_that_holds_another_network(shell: Shell, tmp_path: Path) -> None:
    refused(shell, f"Cannot load encoder='{tmp_path}' from its folder", encoder=tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit", "patch_size": 16, "hidden_size": 8}')
    refused(shell, "is a 'vit'; foveated takes DINOv2 and DINOv3", encoder=tmp_path)


def test_an_autoencoder_is_looked_at_where_it_will_be_used(shell: Shell, tmp_path: Path) -> None:
    given = {"vae": tmp_path, "objective": "joint"}
    refused(shell, f"Cannot load vae='{tmp_path}' from its folder", **given)
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL", "latent_channels": 16}')
    refused(shell, "is a 'AutoencoderKL' with 16 latent channels; foveated takes", **given)
    (tmp_path / "config.json").write_text('{"_class_name": "VQModel"}')
    refused(shell, "is a 'VQModel'", **given)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    refused(shell, "Networks without weights", f"vae='{tmp_path}': no *.safetensors", **given)
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").touch()
    shell.work(**given)
    shell.work(vae="nobody/nothing")


def test_a_language_model_that_is_built_otherwise(shell: Shell, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(small).save_pretrained(tmp_path)
    refused(shell, "is a GPT2LMHeadModel; foveated takes", "SmolLM2, Llama, Qwen", llm=tmp_path)
    with pytest.raises(UsageError, match=r"is a GPT2LMHeadModel; foveated takes .*: SmolLM2, Llama, Qwen"):
        networks.language_model(str(tmp_path))
    refused(shell, f"Cannot load llm='{networks.SMALL / 'encoder'}'", llm=networks.SMALL / "encoder")


@pytest.mark.parametrize(
    ("kind", "more", "told"),
    [
        ("granite", {"logits_scaling": 8.0}, "logits_scaling is 8.0: its words come from scaled or capped"),
        ("cohere", {}, "logit_scale is 0.0625"),
        ("gemma2", {}, "final_logit_softcapping is 30.0"),
        ("qwen3_next", {}, "some of its layers are no attention (linear_attention)"),
        ("falcon_h1", {}, "some of its layers are no attention (mamba)"),
    ],
)
def test_a_language_model_whose_words_or_layers_are_made_otherwise_is_refused_before_anything_is_made(
    shell: Shell, tmp_path: Path, kind: str, more: dict[str, Any], told: str
) -> None:
    """Its loss would be wrong, or the first step would fail when everything is frozen."""
    from transformers import AutoConfig

    small = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    AutoConfig.for_model(kind, **small, **heads, **more).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    refused(shell, f"llm='{tmp_path}' cannot be used by foveated", told, llm=tmp_path)


def test_folders_without_weights_show_before_anything_is_made(shell: Shell, tmp_path: Path) -> None:
    for name, of in (("sees", networks.SMALL / "encoder"), ("tells", tmp_path / "whole")):
        if name == "tells":
            networks.language_model("tiny").save_pretrained(of)
            shutil.copytree(networks.SMALL / "tokenizer", of, dirs_exist_ok=True)
        shutil.copytree(of, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
    sees, tells = tmp_path / "sees", tmp_path / "tells"
    told = refused(shell, f"encoder='{sees}': no *.safetensors", f"llm='{tells}'", encoder=sees, llm=tells)
    assert "only config.json" in told


def test_an_encoder_of_another_architecture_is_taken_from_a_folder(tmp_path: Path) -> None:
    networks.encoder("seeded-dinov3").network.save_pretrained(tmp_path)
    found = networks.vision(str(tmp_path), 64)
    assert (found.width, found.patch, found.prefix, found.grid) == (96, 16, 5, (4, 4))


@pytest.fixture(scope="module")
def few(shell: Shell) -> Path:
    """Four clips, stored as the encoder that comes along sees them."""
    assert shell.foveated("freeze", "--out", "few-clips", limit=4).code == 0
    return Path(shell.folder / "few-clips")


def test_features_of_another_encoder_are_computed_again_aloud_and_never_used(shell: Shell, few: Path) -> None:
    shutil.copytree(few, shell.folder / "swapped")
    key = fl.Store.open(shell.folder / "swapped").keys[0]
    before = fl.Store.open(shell.folder / "swapped")[key]["features"]
    told = shell.foveated("freeze", "--out", "swapped", encoder="seeded-dinov2", limit=4)
    assert told.code == 0, told.err
    assert "features: to be computed again" in told.told
    assert "name_or_folder" in told.told  # what differs: a folder before, a configuration now
    after = fl.Store.open(shell.folder / "swapped")[key]["features"]
    assert before.shape == after.shape
    assert abs(before - after).max() > 0.1


def test_training_on_features_of_another_encoder_is_refused_and_names_their_stage(
    shell: Shell, few: Path
) -> None:
    before = fl.Store.open(few)
    told = shell.foveated(
        "train", "--steps", "1", "--store", str(few), "--out", "other", encoder="tiny", limit=4
    )
    assert told.code == 1, told.told
    assert f"The store at {few} was made from other samples, or otherwise, and is left as it is" in told.told
    assert "features: to be computed again" in told.told
    assert "stage features: " in told.told
    assert "--store DIR" in told.told
    assert fl.Store.open(few).commit == before.commit


def test_a_batch_of_features_of_another_shape_is_refused(shell: Shell, few: Path) -> None:
    of = shell.work(encoder="seeded-dinov3")
    model = of.model.loader(*of.model.args, **of.model.kwargs)
    batch = next(iter(fl.Feed(fl.Store.open(few), 2, device="cpu")))
    with pytest.raises(UsageError, match="They come from another encoder, or from frames of another size"):
        model(batch)


# checkpoints


def test_a_checkpoint_without_its_run_and_clips_that_are_not_there(shell: Shell, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no run\.json in it.*Give a run's folder"):
        load(str(tmp_path))
    told = shell("run", "foveated-look", f"checkpoint={tmp_path / 'nowhere'}", "--device", "cpu")
    assert told.code == 1
    assert "there is no run.json in it" in told.told
    told = shell("run", "foveated-look", "--device", "cpu")
    assert (told.code, "checkpoint: missing; it is required" in told.told) == (1, True)


def test_looking_at_an_unknown_clip_or_split_names_those_there_are(shell: Shell) -> None:
    done = shell.foveated("train", "--steps", "1", "--live", "--out", "looked-at", limit=8, num_frames=4)
    assert done.code == 0, done.err
    look = ("run", "foveated-look", "checkpoint=looked-at", "--device", "cpu")
    told = shell(*look, "clip=nothing.mp4")
    assert told.code == 1
    assert "clip='nothing.mp4' is neither a file nor (a part of) the key of one of the 8 clips" in told.told
    assert "clips/000000.mp4" in told.told
    told = shell(*look, "split=tets")
    assert told.code == 1
    assert "no clip is of split='tets'; there are train, val, test" in told.told


def test_a_split_of_one_clip_is_evaluated_and_shows_nothing(
    shell: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    told = shell.foveated("train", "--steps", "1", "--live", "--out", "few", limit=5, num_frames=4)
    assert told.code == 0, told.err
    assert "clips 1," in told.out
    assert "not shown: ratio" in caplog.text
    assert "of one clip; a verdict needs 20" in caplog.text
