"""`foveated` from clips to pictures, as a person runs it, on a set so small that it takes seconds."""

from __future__ import annotations

import copy
import json
import re
import shutil
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import frostline as fl
from frostline import stages
from frostline.errors import UsageError
from frostline.fingerprint.values import value_of
from frostline.parameters import parameters_of
from frostline.supply import supply
from frostline_recipes.foveated import glyphs, look, metrics, networks, training
from frostline_recipes.foveated.training import captions_begin_near_uniform
from frostline_recipes.foveated.workload import features, workload

pytest.importorskip("av")
pytest.importorskip("transformers")
EVERY_STEP = ("--log-every", "1", "--save-every", "2")
Shell = Answer = Any  # of conftest.py


def built(of: fl.Workload, seed: int = 0) -> Any:
    """As the trainer makes it."""
    torch.manual_seed(seed)
    return of.model.loader(*of.model.args, **of.model.kwargs)


def batches(
    of: fl.Workload,
    store: fl.Store | None,
    *,
    split: str = "train",
    train: bool = True,
    device: str = "cpu",
) -> Any:
    stores = None if store is None else {"data": store}
    return supply(of, stores, split=split, batch_size=of.batch_size, device=device, train=train)


@pytest.fixture(scope="module")
def frozen(shell: Shell) -> Answer:
    return shell.foveated("freeze")


@pytest.fixture(scope="module")
def trained(shell: Shell, frozen: Answer) -> Answer:
    """Four steps from stored features, that most tests look at."""
    return shell.foveated("train", "--steps", "4", "--out", "whole", *EVERY_STEP)


# what a person sees


def test_show_says_what_is_computed_once(shell: Shell) -> None:
    told = shell.foveated("show")
    assert told.code == 0
    assert "❄ stored times, features, tokens" in told.told
    assert "↻ pick 8 entries of features, times, drawn each epoch (eval: spread)" in told.told
    assert "test 3, train 10, val 3 keys" in told.told


def test_every_parameter_has_help() -> None:
    assert [p.name for p in parameters_of(workload) if not p.help] == []


def test_freeze_stores_every_clip_once(shell: Shell, frozen: Answer) -> None:
    assert frozen.code == 0, frozen.err
    assert "stores/foveated has 16 rows" in frozen.out
    again = shell.foveated("freeze")
    assert again.code == 0
    assert "16 rows" in again.told
    assert "freezing times" not in again.told, "nothing is computed twice"


def test_training_tells_its_figures_and_the_verdict(shell: Shell, trained: Answer) -> None:
    assert trained.code == 0, trained.err
    assert trained.out.startswith("ok: 4 steps, ")
    for figure in ("loss_fine", "loss_coarse", "ratio", "improvement_pct", "entropy", "correlation",
                   "loss_text", "ratio_random"):  # fmt: skip
        assert f"{figure} " in trained.out
    found = shell.losses("whole")
    assert len(found) == 4
    assert found[-1] < found[0]


def test_evaluation_is_of_the_test_clips_and_ends_with_a_verdict(
    shell: Shell, trained: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    told = shell.foveated("evaluate", "--checkpoint", "whole")
    assert told.code == 0, told.err
    said = [record.getMessage() for record in caplog.records if record.name == "frostline"]
    assert re.match(r"foveated: not shown: ratio \d.\d+ of 3 clips; .* Controls: ", said[0])
    assert any("the fine pass tells nothing that the coarse one did not" in line for line in said)
    figures = dict(line.split(": ") for line in told.out.splitlines() if ": " in line)
    assert float(figures["clips"]) == 3
    assert float(figures["ratio"]) == pytest.approx(
        float(figures["loss_coarse"]) / float(figures["loss_fine"]), rel=1e-4
    )


def test_a_checkpoint_becomes_pictures_and_a_page(shell: Shell, trained: Answer) -> None:
    told = shell("run", "foveated-look", "checkpoint=whole", "n=1", "--out", "look", "--device", "cpu")
    assert told.code == 0, told.err
    [folder] = [path for path in (shell.folder / "look").iterdir() if (path / "grid.png").is_file()]
    assert folder.name == "00-clips-000013.mp4", "the first clip of the test split"
    assert (folder / "grid.png").read_bytes().startswith(b"\x89PNG")
    assert {"grid.png", "heads.png", "gaze.mp4"} <= {path.name for path in folder.iterdir()}
    page = (shell.folder / "look" / "index.html").read_text()
    assert glyphs.caption(glyphs.script(13, seconds=6.0, objects=3)) in page
    assert "loss_coarse" in page, "the curves of the training"


# one training, whatever it is fed from


def steps(
    of: fl.Workload, supplied: Any, n: int, device: str = "cpu"
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A few steps by hand: losses and parameters."""
    torch.manual_seed(0)
    model = built(of).to(device).train()
    optimizer = of.optimizer(model)
    losses = []
    for batch in islice((b for _ in range(n) for b in supplied), n):
        with torch.autocast(device, torch.bfloat16, enabled=of.training["precision"] == "bf16"):
            loss = of.loss(model, batch)["loss"]
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_live_stored_frames_and_stored_features_train_to_the_same_bits(
    shell: Shell, frozen: Answer, tmp_path: Path
) -> None:
    of = shell.work()
    frames = fl.freeze(of, tmp_path / "frames", cut=["frames", "times", "tokens"], device="cpu", quiet=True)
    stored = fl.Store.open(shell.folder / "stores/foveated")
    assert "features" not in frames.fields
    assert "frames" not in stored.fields
    expected, parameters = steps(of, batches(of, None), 4)
    for store in (frames, stored):
        losses, others = steps(of, batches(of, store), 4)
        assert losses == expected
        assert all(torch.equal(others[name], p) for name, p in parameters.items())


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "floor"), [("fp32", 1e-4), ("bf16", 2e-3)])
def test_on_a_gpu_they_train_to_the_same_losses_but_for_its_noise(
    shell: Shell, tmp_path: Path, precision: str, floor: float
) -> None:
    """Sums there come in any order: two trainings from one store tell by how much that moves a loss.

    floor: of a loss; what a chunk of another size may round apart in an encoder's features, where two
    trainings happen to be nearer.
    """
    assert not torch.are_deterministic_algorithms_enabled()
    of = shell.work(precision=precision, encoder_precision=precision)
    how = {"device": "cuda", "quiet": True}
    frames = fl.freeze(of, tmp_path / "frames", cut=["frames", "times", "tokens"], **how)
    features = fl.freeze(of, tmp_path / "features", **how)
    assert "features" not in frames.fields
    assert "frames" not in features.fields
    first, again, live, from_frames = (
        np.array(steps(of, batches(of, store, device="cuda"), 4, "cuda")[0])
        for store in (features, features, None, frames)
    )
    allowed = 4 * np.abs(first - again).max() + floor * first
    assert (np.abs(live - first) <= allowed).all(), (live, first, again)
    assert (np.abs(from_frames - first) <= allowed).all(), (from_frames, first, again)
    assert first[-1] < first[0] - allowed[0], "it learns more than that"


def test_frostline_train_live_equals_training_from_the_store(shell: Shell, trained: Answer) -> None:
    live = shell.foveated("train", "--steps", "4", "--out", "live", "--live", *EVERY_STEP)
    assert live.code == 0, live.err
    assert shell.losses("live") == shell.losses("whole")
    whole = shell.weights("whole")
    assert all(torch.equal(value, whole[name]) for name, value in shell.weights("live").items())


def test_a_training_that_was_stopped_goes_on_to_the_same_bits(shell: Shell, trained: Answer) -> None:
    words = ("--steps", "4", "--out", "broken", *EVERY_STEP)
    stopped = shell.foveated("train", *words, "--max-hours", "1e-9")
    assert "at step 1:" in stopped.out, stopped.told
    assert shell.foveated("train", *words).code == 0
    assert shell.losses("broken") == shell.losses("whole")
    whole = shell.weights("whole")
    assert all(torch.equal(value, whole[name]) for name, value in shell.weights("broken").items())


def test_two_batches_of_four_make_the_update_of_one_of_eight(shell: Shell, trained: Answer) -> None:
    for out, given in (("eight", {"batch_size": 8}), ("twice", {"batch_size": 4, "grad_accum": 2})):
        told = shell.foveated("train", "--steps", "2", "--out", out, *EVERY_STEP, **given)
        assert told.code == 0, told.err
    # Sums in another order: fp32 rounds them apart by some 1e-7 of their size.
    assert shell.losses("twice") == pytest.approx(shell.losses("eight"), rel=1e-5)
    eight = shell.weights("eight")
    apart = {
        name: float((value - eight[name]).abs().mean()) for name, value in shell.weights("twice").items()
    }
    assert max(apart.values()) < 1e-5, max(apart, key=apart.__getitem__)
    assert shell.losses("eight") != shell.losses("whole")[:2]


@pytest.mark.parametrize("n", [8, 16])
def test_a_small_folder_of_own_clips_is_trained_and_tested(
    shell: Shell, little: Path, tmp_path: Path, n: int
) -> None:
    for i in range(n):
        shutil.copy(little / "clips" / f"{i:06d}.mp4", tmp_path / f"tape-{i}.mp4")
    (tmp_path / "captions.json").write_text(json.dumps({f"tape-{i}.mp4": "a red star" for i in range(n)}))
    given = {"videos": tmp_path, "num_frames": 3, "stored_frames": 4}
    out = f"own-{n}"
    told = shell.foveated("train", "--steps", "1", "--live", "--out", out, **given)
    assert told.code == 0, told.err
    told = shell.foveated("evaluate", "--checkpoint", out, "--live", **given)
    assert told.code == 0, told.err


# what is stored, and from where in a clip


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({}, {"features", "times", "tokens"}),
        ({"attention": "deep"}, {"frames", "times", "tokens"}),
        ({"train_encoder": True}, {"frames", "times", "tokens"}),
        ({"attention": "deep", "train_encoder": True}, {"frames", "times", "tokens"}),
        ({"objective": "joint"}, {"features", "latents", "times", "tokens"}),
        ({"objective": "reconstruct"}, {"features", "latents", "times"}),
        ({"objective": "joint", "attention": "deep"}, {"frames", "latents", "times", "tokens"}),
    ],
)
def test_frames_are_stored_where_the_encoder_is_part_of_the_model_and_features_otherwise(
    shell: Shell, given: dict[str, Any], stored: set[str]
) -> None:
    of = shell.work(**given)
    assert set(of.data.cut) == stored
    assert set(of.data.outputs) == stored


@pytest.mark.parametrize("given", [{"attention": "deep"}, {"train_encoder": True}])
def test_the_encoder_runs_once_over_all_frames_of_a_batch(shell: Shell, given: dict[str, Any]) -> None:
    of = shell.work(**given, encoder="seeded-dinov2")
    model = built(of)
    seen = []
    network = next(m for m in model.gaze.encoder.modules() if type(m).__name__ == "Dinov2Embeddings")
    network.register_forward_hook(lambda module, args, out: seen.append(out.shape[0]))
    batch = next(iter(batches(of, None)))
    figures = of.loss(model, batch)
    figures["loss"].backward()
    assert seen == [4 * 8], "B·T frames, once for all three passes"
    learns = [p.grad is not None for p in model.gaze.encoder.parameters()]
    assert any(learns) == given.get("train_encoder", False)


def test_times_in_the_store_span_the_whole_clip(shell: Shell, frozen: Answer) -> None:
    store = fl.Store.open(shell.folder / "stores/foveated")
    for key in store.keys:
        times = np.asarray(store[key]["times"])
        assert times.shape == (12,)
        assert (np.diff(times) > 0).all()
        # 24 frames at 4 a second: the first is at 0 s, the last at 5.75 s.
        assert times[0] == pytest.approx(0, abs=0.26)
        assert times[-1] == pytest.approx(5.75, abs=0.26)
        assert np.diff(times).max() <= 0.76


def test_training_draws_frames_and_evaluation_spreads_them(shell: Shell, frozen: Answer) -> None:
    of, store = shell.work(), fl.Store.open(shell.folder / "stores/foveated")
    drawn = [next(iter(batches(of, store)))["times"] for _ in range(2)]
    assert torch.equal(*drawn), "the same call draws the same"
    assert len({tuple(row.tolist()) for row in drawn[0]}) > 1, "each clip its own"
    assert (drawn[0].diff(dim=1) > 0).all()
    held_out = next(iter(batches(of, store, split="val", train=False)))["times"]
    assert len({tuple(row.tolist()) for row in held_out}) == 1
    assert float(held_out[0, 0]) < 0.3
    assert float(held_out[0, -1]) > 5.4


def test_no_clip_is_in_two_splits(shell: Shell, frozen: Answer) -> None:
    of, store = shell.work(), fl.Store.open(shell.folder / "stores/foveated")
    keys = {
        split: [key for batch in batches(of, store, split=split, train=False) for key in batch.keys_of_rows]
        for split in ("train", "val", "test")
    }
    assert {split: len(found) for split, found in keys.items()} == {"train": 10, "val": 3, "test": 3}
    assert sorted(key for found in keys.values() for key in found) == sorted(store.keys)


# captions end


def byte_level(folder: Path) -> Path:
    """A tokenizer as GPT-2's and SmolLM2's: it knows a token for the end, and does not add it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.decoder = decoders.ByteLevel()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<|endoftext|>"], show_progress=False)
    raw.train_from_iterator(["a red star turns blue", "a cat"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>")
    fast.save_pretrained(folder)
    return folder


def test_tokens_of_a_caption_end_where_the_tokenizer_adds_no_end(tmp_path: Path) -> None:
    plain = stages.Tokenizer(byte_level(tmp_path))  # type: ignore[arg-type]
    whole = plain("a red star").tolist()
    assert 0 not in whole
    stage = networks.tokens(str(tmp_path), 64)
    assert stage.fn("a red star").tolist() == [*whole, 0]
    assert stage.fn("").tolist() == [0]
    assert networks.tokens(str(tmp_path), 3).fn("a red star").tolist() == [*whole[:2], 0]
    assert stage.fn("a cat<|endoftext|>").tolist().count(0) == 1
    assert copy.deepcopy(stage.fn) == stage.fn, "made of plain fields"
    assert value_of(stage.fn) == value_of(networks.tokens(str(tmp_path), 64).fn)
    assert value_of(stage.fn) != value_of(networks.tokens(str(tmp_path), 32).fn)


def test_pictures_tell_captions_as_they_were_read(tmp_path: Path) -> None:
    stage = networks.tokens(str(byte_level(tmp_path)), 40)
    data = SimpleNamespace(stages=[stage])
    words = look._words(SimpleNamespace(pipelines={"data": data}))  # type: ignore[arg-type]
    assert words.text(stage.fn("a red star").tolist()) == "a red star"
    assert (words.most, words.end) == (40, 0)
    assert look._words(SimpleNamespace(pipelines={})).text([3, 4]) == "3 4"  # type: ignore[arg-type]


def test_captions_that_the_language_model_has_no_tokens_for_are_refused(tmp_path: Path) -> None:
    """Tokens beyond its embeddings, wherever they come; such as no caption has do no harm."""
    from transformers import AutoTokenizer, LlamaConfig

    folder = str(byte_level(tmp_path))
    ids = AutoTokenizer.from_pretrained(folder)("a red star")["input_ids"]
    few = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    stage = networks.tokens(folder, 16)
    captions = ["a"] * 600 + ["a red star"]
    for known, refused in ((max(ids) + 1, False), (max(ids), True)):
        assert known < 60, "the tokenizer has more words in either case"
        LlamaConfig(**few, vocab_size=known).save_pretrained(folder)
        told = f"has embeddings of {known} tokens, and its tokenizer reads captions with token {max(ids)}"
        with pytest.raises(UsageError, match=told) if refused else nullcontext():
            networks.look_at_captions(stage, captions, folder, 16)


def test_captions_that_are_cut_off_are_said_aloud(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    shell.work()
    assert "captions fill" not in caplog.text
    shell.work(max_tokens=4)
    told = "16 of the first 16 captions fill max_tokens=4 tokens of llm=small (it knows the words of the"
    assert told in caplog.text


def test_a_gaze_knows_how_much_of_a_frame_its_patches_cover(shell: Shell) -> None:
    for given in ({}, {"attention": "deep"}):
        whole, part = (built(shell.work(frame_size=size, **given)).gaze for size in (64, 72))
        assert (whole.covers, part.covers) == (1.0, 64 / 72)


def test_tokens_of_the_own_language_models_are_its_tokenizers_own() -> None:
    stage = networks.tokens("small", 64)
    assert stage.fn == stages.Tokenizer(networks.tokenizer_of("small"), max_length=64)
    assert stage.fn("a red star turns blue").tolist() == [1, 259, 292, 284, 275, 324, 2]


# objectives and controls


@pytest.mark.parametrize(
    ("width", "heads"), [(16, 1), (64, 1), (96, 3), (100, 2), (192, 3), (384, 6), (1009, 1)]
)
def test_heads_divide_the_width(width: int, heads: int) -> None:
    assert training.heads(width) == heads
    assert width % heads == 0


def test_a_rate_is_the_one_given_and_evaluation_is_every_300_steps(shell: Shell) -> None:
    for given, rate in ((None, 1e-3), (0.5, 0.5)):
        assert shell.work(learning_rate=given).optimizer.keywords["rate"] == rate
    assert shell.work().training["eval_every"] == 300
    assert shell.work().training["eval_rows"] == 1024
    assert shell.work(eval_every=None).training["eval_every"] is None


def test_networks_in_the_home_folder_are_found(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    networks.encoder("seeded-dinov3").network.save_pretrained(tmp_path / "encoder")
    networks.language_model("tiny").save_pretrained(tmp_path / "llm")
    byte_level(tmp_path / "llm")
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").touch()
    of = shell.work(encoder="~/encoder", llm="~/llm", vae="~/vae", objective="joint")
    assert built(of).gaze.prefix == 5


@pytest.mark.parametrize("attention", ["shallow", "deep"])
def test_pictures_are_normalised_as_the_encoders_own_preprocessor_says(
    shell: Shell, tmp_path: Path, attention: str
) -> None:
    networks.encoder("seeded-dinov3").network.save_pretrained(tmp_path)
    mean, std = (0.43, 0.411, 0.296), (0.213, 0.156, 0.143)
    file = tmp_path / "preprocessor_config.json"
    for told, expected in (
        (None, (networks.MEAN, networks.STD)),
        ({"image_mean": mean, "image_std": std}, (mean, std)),
        ({"crop_size": 224}, (networks.MEAN, networks.STD)),
    ):
        if told is not None:
            file.write_text(json.dumps(told))
        work = shell.work(encoder=str(tmp_path), attention=attention)
        if attention == "deep":
            pixels = built(work).gaze.encoder.preprocess
        else:
            pixels = next(s.fn for s in work.data.stages if s.name == "features").get()[0]
        assert torch.allclose(pixels.mean.flatten(), torch.tensor(expected[0]))
        assert torch.allclose(pixels.std.flatten(), torch.tensor(expected[1]))


@pytest.mark.parametrize("told", ["{", "[1]", '{"image_mean": 0.5, "image_std": 0.5}', '{"image_mean": [1]}'])
def test_a_preprocessor_that_cannot_be_read_is_refused(tmp_path: Path, told: str) -> None:
    networks.encoder("seeded-dinov3").network.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(told)
    with pytest.raises(UsageError, match=r"preprocessor_config\.json cannot be read"):
        networks.vision(str(tmp_path), 64)


@pytest.mark.parametrize(
    ("objective", "figure"), [("reconstruct", "loss_fine"), ("joint", "loss_text")]
)  # captions: all the tests above
def test_every_objective_trains(shell: Shell, objective: str, figure: str) -> None:
    pytest.importorskip("diffusers")
    told = shell.foveated(
        "train", "--steps", "2", "--out", objective, "--live", *EVERY_STEP, objective=objective,
        num_frames=3, stored_frames=4, limit=8,
    )  # fmt: skip
    assert told.code == 0, told.err
    first, second = shell.losses(objective)
    assert np.isfinite([first, second]).all()
    assert f"{figure} " in told.out
    assert any(name.startswith("head.") for name in shell.weights(objective))


@pytest.mark.parametrize(
    ("encoder", "attention", "objective"),
    [
        ("tiny", "shallow", "caption"),
        ("tiny", "deep", "reconstruct"),
        ("small", "deep", "caption"),
        ("seeded-dinov3", "shallow", "reconstruct"),
        ("seeded-dinov3", "deep", "joint"),
    ],
)
def test_an_encoder_trains_with_the_rest_and_goes_on(
    shell: Shell, tmp_path: Path, encoder: str, attention: str, objective: str
) -> None:
    """Past the gradient audit, which looks at three steps."""
    pytest.importorskip("diffusers")
    given = {
        "encoder": encoder, "attention": attention, "objective": objective, "train_encoder": True,
        "llm": "tiny", "num_frames": 3, "stored_frames": 4, "limit": 8,
    }  # fmt: skip
    begun = {name: p.detach().clone() for name, p in built(shell.work(**given)).named_parameters()}
    how = {"live": True, "device": "cpu", "quiet": True, "parameters": given, "training": {"save_every": 2}}
    for steps_, out in ((2, "parts"), (4, "parts"), (4, "whole")):
        fl.train(shell.work(**given), steps=steps_, out=tmp_path / out, **how)
    ended = shell.weights(str(tmp_path / "whole"))
    inside = [name for name in begun if name.startswith("gaze.encoder.")]
    still = [name for name in inside if torch.equal(ended[name], begun[name])]
    learns = {name for name, p in built(shell.work(**given)).named_parameters() if p.requires_grad}
    assert not {*still} & learns
    assert "gaze.encoder.network.embeddings.mask_token" in still
    assert len(still) == 1 or attention == "deep"
    assert len(still) < len(inside) / 2
    parts = shell.weights(str(tmp_path / "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in ended.items())


def test_without_fine_passes_the_coarse_one_is_trained_alone(shell: Shell, trained: Answer) -> None:
    told = shell.foveated("train", "--steps", "2", "--out", "coarse", *EVERY_STEP, fine_iterations=0)
    assert told.code == 0, told.err
    assert "loss_coarse " in told.out
    assert "ratio" not in told.told
    begun = dict(built(shell.work(fine_iterations=0)).named_parameters())
    ended = shell.weights("coarse")
    assert torch.equal(ended["ask.weight"], begun["ask.weight"]), "no query was asked"
    assert not torch.equal(ended["static"], begun["static"])


def test_a_first_loss_far_from_knowing_nothing_is_told(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    of = shell.work()
    model = built(of)
    batch = next(iter(batches(of, None)))
    with torch.no_grad():
        figures = of.loss(model, batch)
    assert captions_begin_near_uniform(model, batch, figures) is None
    told = captions_begin_near_uniform(model, batch, {"loss_coarse": torch.tensor(0.5)})
    assert told is not None
    assert "the first caption loss is 0.50" in told
    trained = {"loss_coarse": torch.tensor(0.5)}
    assert captions_begin_near_uniform(model, batch, trained, fresh=False) is None

    def wrong(*args: Any, **options: Any) -> Any:
        found = metrics_loss(*args, **options)
        return found | {"loss_coarse": found["loss_coarse"] / 10}

    metrics_loss = metrics.loss
    monkeypatch.setattr(metrics, "loss", wrong)
    answer = shell.foveated("train", "--steps", "2", "--out", "wrong-labels", "--live")
    assert "the first caption loss is 0.5" in answer.told


def test_a_trained_model_is_gone_on_with_in_another_run(shell: Shell, trained: Answer) -> None:
    """Its first loss is far from knowing nothing, and should be."""
    begun = shell.weights("whole")
    with torch.no_grad():
        begun["llm.model.norm.weight"].mul_(20)  # as sure of itself as after a long training
    save_file(begun, shell.folder / "sure.safetensors")
    told = shell.foveated("train", "--steps", "1", "--out", "on", "--init-from", "sure.safetensors")
    assert told.code == 0, told.told


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({}, [1e-3]),
        ({"attention": "deep"}, [1e-3]),
        ({"train_encoder": True}, [1e-3, 5e-5]),
        ({"train_encoder": True, "attention": "deep", "learning_rate": 0.01}, [0.01, 5e-4]),
        ({"train_encoder": True, "encoder_learning_rate": 0.002}, [1e-3, 0.002]),
    ],
)
def test_an_encoder_that_learns_has_a_rate_of_its_own(
    shell: Shell, given: dict[str, Any], rates: list[float]
) -> None:
    """At the rate of new weights it would lose what it was trained to see."""
    work = shell.work(**given)
    model = built(work)
    optimizer = work.optimizer(model)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates)
    learned = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {*map(id, learned)}


def test_a_seed_is_that_of_the_weights_by_option_and_by_parameter(shell: Shell) -> None:
    ways = {"0": {}, "1": {"seed": 1}, "by option": {}}
    for out, given in ways.items():
        option = ["--seed", "1"] if out == "by option" else []
        told = shell.foveated("train", "--steps", "1", "--out", f"seed {out}", *option, **given)
        assert told.code == 0, told.told
    # a first step is too short to make the rate anything but small: these are first weights
    found = {out: shell.weights(f"seed {out}") for out in ways}
    assert torch.equal(found["by option"]["static"], found["1"]["static"])
    name = "llm.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found["by option"][name], found["1"][name])
    assert not torch.allclose(found["0"]["static"], found["1"]["static"], atol=0.1)
    assert not torch.allclose(found["0"][name], found["1"][name], atol=0.01)


# weights that were trained


def named(encoder: str, worlds: list[glyphs.Script]) -> dict[str, float]:
    """The share of glyphs whose colour and kind the nearest mean of patch features names rightly."""
    times = np.linspace(0.5, 23, len(worlds))
    frames = np.stack([glyphs.frame(world, t) for world, t in zip(worlds, times, strict=True)])
    with torch.no_grad():
        found = features(256, networks.MEAN, networks.STD, **networks.place(encoder))(
            torch.from_numpy(frames)[None]
        )[0].numpy()
    x, looks = [], []
    for tokens, world, t in zip(found, worlds, times, strict=True):
        for glyph, (column, row) in zip(world.glyphs, glyphs.places(world, t), strict=True):
            x.append(tokens[1 + int(row * 16) * 16 + int(column * 16)])
            looks.append(glyph.look(t))
    half, patches, right = len(x) // 2, np.stack(x), {}
    patches = (patches - patches[:half].mean(0)) / patches[:half].std(0)
    for part in ("colour", "kind"):
        truth = np.array([getattr(look, part) for look in looks])
        classes = np.unique(truth)
        means = np.stack([patches[:half][truth[:half] == name].mean(0) for name in classes])
        nearest = np.linalg.norm(patches[half:, None] - means, axis=2).argmin(1)
        right[part] = classes[nearest] == truth[half:]
    right["both"] = right["colour"] & right["kind"]
    return {part: float(found.mean()) for part, found in right.items()}


def test_the_encoder_that_comes_along_tells_kinds_and_a_seeded_one_does_not() -> None:
    """Colours are in the pixels, and any network passes them on; what a shape is has to be learnt."""
    worlds = [glyphs.script(i, seed=77) for i in range(30)]  # neither the embedded set's nor pretrain's seed
    shipped, seeded = named("small", worlds), named("seeded-dinov2", worlds)
    assert shipped["colour"] > 0.95
    assert shipped["kind"] > 0.8
    assert seeded["kind"] < 0.4, "one in six by chance"
    assert shipped["both"] > seeded["both"] + 0.4
