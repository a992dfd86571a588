"""Tests of docs/examples/bert_mlm.py: four ranks learn to fill in words, stop, resume, and load weights."""

import re

import pytest

from tests.conftest import write_program
from tests.examples.plain import EXAMPLES, ONE_THREAD, run_by_python, run_by_torchrun

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(400)]

BERT = EXAMPLES / "bert_mlm.py"

PRELOAD = ("--preload", "torch,torch._dynamo,transformers.models.bert.modeling_bert")

EPOCH = re.compile(r"epoch (\d+): held-out loss ([\d.]+), hidden words found ([\d.]+)")
GUESS = re.compile(r"always guessing 'the' finds ([\d.]+)")

PARTS = f"""
    import sys

    sys.path.insert(0, {str(EXAMPLES)!r})
    import bert_mlm
    import torch
    from tokenizers.implementations import BertWordPieceTokenizer
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast


    def make_tokenizer(text, words):
        maker = BertWordPieceTokenizer()
        maker.train_from_iterator(text, vocab_size=words, show_progress=False)
        return BertTokenizerFast(tokenizer_object=Tokenizer.from_str(maker.to_str()))


    prose = "A *first* sentence.  And another,\\nof two lines. A first sentence."
    print(bert_mlm.clean_sentences("\\n\\n".join([prose, "Heading\\n===", "   x = 1", "  Last."])))

    tokenizer = make_tokenizer(["the cat sat on the mat"] * 5, 60)
    ids, words = bert_mlm.encode(["the cat sat on the mat"] * 4000, tokenizer)
    ids, words = ids.repeat(5, 1), words.repeat(5, 1)
    masked, labels = bert_mlm.hide(ids, words, tokenizer)
    chosen = labels != bert_mlm.NO_LABEL
    assert (labels[chosen] == ids[chosen]).all()
    assert not (chosen & ~words).any() and (masked[~chosen] == ids[~chosen]).all()
    hidden = (masked == tokenizer.mask_token_id)[chosen].double().mean().item()
    other = ((masked != ids) & (masked != tokenizer.mask_token_id))[chosen].double().mean().item()
    print(chosen.sum().item() / words.sum().item(), hidden, other, len(tokenizer))

    tokenizer = make_tokenizer(open("mine.txt"), 120)
    tokenizer.save_pretrained("weights")
    sizes = {{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("weights")
"""
"""Tries parts of the example, and makes a folder in the form of the model hub, for a text of one's own."""


def test_parts_and_pretrained_weights_under_torchrun(tmp_path):
    """Sentences are cleaned and words are hidden; a folder in the hub's form stands for the hub."""
    (tmp_path / "mine.txt").write_text("".join(f"Number {i} is the one after {i - 1}. " for i in range(200)))
    sentences, shares = run_by_python(tmp_path, write_program(tmp_path, "parts.py", PARTS)).splitlines()
    assert sentences == "['A first sentence.', 'And another, of two lines.', 'Last.']"
    chosen, hidden, other, size = map(float, shares.split())
    assert chosen == pytest.approx(0.15, abs=0.01)
    assert hidden == pytest.approx(0.8 + 0.1 / size, abs=0.02)
    assert other == pytest.approx(0.1 * (1 - 2 / size), abs=0.02)

    output = run_by_torchrun(tmp_path, BERT, "--pretrained", "weights", "--text", "mine.txt", "--epochs", "2")
    assert re.search(r"world of 2: 180 sentences, \d+ word pieces, (\d\d),\d{3} parameters", output)
    assert len(EPOCH.findall(output)) == 2


def test_four_ranks_learn_and_go_on_after_a_stop(run_ddplaunch, tmp_path):
    words = ("run", "--nproc", 4, *PRELOAD, BERT, "--", "--checkpoint", tmp_path / "bert.pt")
    first = run_ddplaunch(*words, "--epochs", 3, env=ONE_THREAD, timeout=200)
    assert first.returncode == 0, first.stderr
    assert "world of 4:" in first.stdout
    assert [path.name for path in tmp_path.glob("bert.pt*")] == ["bert.pt"]
    rest = run_ddplaunch(*words, "--epochs", 6, env=ONE_THREAD, timeout=200)
    assert rest.returncode == 0, rest.stderr
    shown = [tuple(map(float, each)) for each in EPOCH.findall(first.stdout + rest.stdout)]
    assert [epoch for epoch, _, _ in shown] == [1, 2, 3, 4, 5, 6]
    assert shown[5][1] < shown[2][1] < shown[0][1]
    guess = GUESS.search(rest.stdout)
    assert guess is not None
    # Before it learns from context it guesses the commonest word: 1.0 to 1.1 times as many. Then 1.5 to 2 times, which
    # varies, as no two runs have the same word pieces.
    assert shown[5][2] > 1.2 * float(guess[1]) > 0
