"""docs/examples/bert_mlm.py: four ranks learn to fill in words, stop, go on, and start from weights in a folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Launch, clean_environment, torchrun, write

BERT = Path(__file__).parents[2] / "docs" / "examples" / "bert_mlm.py"

CALM = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Threads that spin while they wait for each other slow each other down tenfold where tests run side by side."""

PRELOAD = ("--preload", "torch,transformers.models.bert.modeling_bert")

EPOCH = re.compile(r"epoch (\d+): held-out loss ([\d.]+), hidden words found ([\d.]+)")
GUESS = re.compile(r"always guessing 'the' finds ([\d.]+)")

PARTS = f"""
    import sys

    sys.path.insert(0, {str(BERT.parent)!r})
    import bert_mlm
    import torch
    from tokenizers.implementations import BertWordPieceTokenizer
    from tokenizers import Tokenizer
    from transformers import BertTokenizerFast

    prose = "A *first* sentence.  And another,\\nof two lines. A first sentence."
    print(bert_mlm.clean_sentences("\\n\\n".join([prose, "Heading\\n===", "   x = 1", "  Last."])))

    maker = BertWordPieceTokenizer()
    maker.train_from_iterator(["the cat sat on the mat"] * 5, vocab_size=60, show_progress=False)
    tokenizer = BertTokenizerFast(tokenizer_object=Tokenizer.from_str(maker.to_str()))
    ids, words = bert_mlm.encode(["the cat sat on the mat"] * 4000, tokenizer)
    ids, words = ids.repeat(5, 1), words.repeat(5, 1)
    masked, labels = bert_mlm.hide(ids, words, tokenizer)
    chosen = labels != bert_mlm.NO_LABEL
    assert (labels[chosen] == ids[chosen]).all()
    assert not (chosen & ~words).any() and (masked[~chosen] == ids[~chosen]).all()
    hidden = (masked == tokenizer.mask_token_id)[chosen].double().mean().item()
    other = ((masked != ids) & (masked != tokenizer.mask_token_id))[chosen].double().mean().item()
    print(chosen.sum().item() / words.sum().item(), hidden, other, len(tokenizer))
"""


@pytest.mark.slow
def test_sentences_are_cleaned_and_words_are_hidden(tmp_path: Path) -> None:
    program = write(tmp_path, "parts.py", PARTS)
    done = subprocess.run([sys.executable, program], env=clean_environment(CALM), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sentences, shares = done.stdout.splitlines()
    assert sentences == "['A first sentence.', 'And another, of two lines.', 'Last.']"
    chosen, hidden, other, size = map(float, shares.split())
    assert chosen == pytest.approx(0.15, abs=0.01)
    assert hidden == pytest.approx(0.8 + 0.1 / size, abs=0.02)
    assert other == pytest.approx(0.1 * (1 - 2 / size), abs=0.02)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_four_ranks_learn_and_go_on_after_a_stop(launch: Launch, tmp_path: Path) -> None:
    words = ("run", "--nproc", 4, *PRELOAD, BERT, "--", "--checkpoint", tmp_path / "bert.pt")
    first = launch(*words, "--epochs", 3, env=CALM, timeout=200)
    assert first.returncode == 0, first.stderr
    assert "world of 4:" in first.stdout
    assert [path.name for path in tmp_path.glob("bert.pt*")] == ["bert.pt"]
    rest = launch(*words, "--epochs", 6, env=CALM, timeout=200)
    assert rest.returncode == 0, rest.stderr
    shown = [tuple(map(float, each)) for each in EPOCH.findall(first.stdout + rest.stdout)]
    assert [epoch for epoch, _, _ in shown] == [1, 2, 3, 4, 5, 6]
    assert shown[5][1] < shown[2][1] < shown[0][1]
    guess = GUESS.search(rest.stdout)
    assert guess is not None
    assert shown[5][2] > 1.5 * float(guess[1]) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pretrained_weights_and_a_text_of_ones_own_under_torchrun(tmp_path: Path) -> None:
    """A folder in the hub's form stands for the hub."""
    make = write(
        tmp_path,
        "make.py",
        """
        from tokenizers.implementations import BertWordPieceTokenizer
        from tokenizers import Tokenizer
        from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

        maker = BertWordPieceTokenizer()
        maker.train_from_iterator(open("mine.txt"), vocab_size=120, show_progress=False)
        tokenizer = BertTokenizerFast(tokenizer_object=Tokenizer.from_str(maker.to_str()))
        tokenizer.save_pretrained("weights")
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("weights")
        """,
    )
    (tmp_path / "mine.txt").write_text("".join(f"Number {i} is the one after {i - 1}. " for i in range(200)))
    environment = clean_environment(CALM)
    subprocess.run([sys.executable, make], cwd=tmp_path, env=environment, check=True, timeout=100)
    words = torchrun(tmp_path, BERT, "--pretrained", "weights", "--text", "mine.txt", "--epochs", "2")
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert re.search(r"world of 2: 180 sentences, \d+ word pieces, (\d\d),\d{3} parameters", done.stdout)
    assert len(EPOCH.findall(done.stdout)) == 2
