"""`Tokenizer`, with a small byte-pair tokenizer that is trained on the spot."""

from __future__ import annotations

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from frostline.errors import UsageError
from frostline.stages import Tokenizer, tokens

transformers = pytest.importorskip("transformers")

TEXTS = ["a cat sat on the mat", "the dog and the cat", "a mat, a dog; and so on"]


def save(folder: Path, *, vocabulary: int = 120) -> Path:
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    raw = Raw(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS * 5, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "bpe")


def test_the_ids_are_the_tokenizers_own(folder: Path) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for text in (*TEXTS, "", "dog" * 50):
        out = Tokenizer(str(folder))(text)
        assert out.dtype == torch.int64
        assert out.tolist() == reference(text)["input_ids"]
        assert Tokenizer(str(folder), special_tokens=False)(text).tolist() == out[1:-1].tolist()


def test_long_texts_are_cut_and_short_ones_never_padded(folder: Path) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    cut = Tokenizer(str(folder), max_length=6)
    long = " ".join(TEXTS)
    assert cut(long).tolist() == reference(long, truncation=True, max_length=6)["input_ids"]
    assert (len(cut(long)), len(cut("a")), len(Tokenizer(str(folder))(long)) > 6) == (6, 3, True)


def test_threads_with_different_cuts(folder: Path) -> None:
    stages = [Tokenizer(str(folder), max_length=n) for n in (3, 5, None)]
    jobs = [(stage, text) for text in TEXTS * 20 for stage in stages]
    want = [stage(text).tolist() for stage, text in jobs]
    with ThreadPoolExecutor(8) as pool:
        assert [out.tolist() for out in pool.map(lambda job: job[0](job[1]), jobs)] == want


def test_it_is_made_of_plain_fields_only(folder: Path) -> None:
    stage = Tokenizer(str(folder), max_length=4)
    assert stage == copy.deepcopy(stage)
    values = dataclasses.asdict(stage)
    assert values.keys() == {"name", "max_length", "special_tokens", "digest"}
    assert all(isinstance(v, str | int | bool) for v in values.values())
    assert Tokenizer(folder).name == str(folder)  # type: ignore[arg-type]


def test_other_content_under_the_same_name_is_noticed(folder: Path) -> None:
    old = Tokenizer(str(folder))
    save(folder, vocabulary=25)
    new = Tokenizer(str(folder))
    assert new.digest != old.digest
    assert len(new(TEXTS[0])) > 2
    tokens._kept.cache_clear()  # as in a worker process that starts later
    with pytest.raises(UsageError, match="its files changed in between"):
        old(TEXTS[0])


def test_what_is_wrong_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_length is 0"):
        Tokenizer(str(folder), max_length=0)
    with pytest.raises(UsageError, match="takes a string, and got int: 3"):
        Tokenizer(str(folder))(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Did you mean 'bpe'"):
        Tokenizer(str(tmp_path / "bpee"))
    with pytest.raises(UsageError, match="Cannot load the tokenizer 'nobody/nothing'"):
        Tokenizer("nobody/nothing")
