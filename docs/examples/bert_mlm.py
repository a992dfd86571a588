"""Train BERT to fill in words that are hidden from it: masked language modelling, on any number of processes.

The text is what Python itself brings: the half megabyte of English behind `help("for")`. The tokeniser is trained on
it, and so is a small BERT, from nothing; nothing is downloaded.

    ddplaunch run --nproc 4 --preload torch,transformers.models.bert.modeling_bert docs/examples/bert_mlm.py
    ddplaunch run docs/examples/bert_mlm.py -- --pretrained bert-base-uncased --text mine.txt --lr 5e-5

--preload, which may be left out, imports transformers once for all ranks. The second command starts from weights of the
model hub, or of a folder in its form. It also runs under torchrun.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, as DDP does, it keeps the group from being freed
from tokenizers import Tokenizer
from tokenizers.implementations import BertWordPieceTokenizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertTokenizerFast

LENGTH = 48  # of a sentence, in tokens; what is longer is cut
NO_LABEL = -100  # cross_entropy leaves these out


def join_group() -> torch.device:
    """Join the process group that the launcher's variables describe; return the device of this rank."""
    # A group has one backend, so either every rank of this machine has a GPU or none uses one.
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    return device


def clean_sentences(text: str) -> list[str]:
    """The sentences of a text, each once, so that none is both trained on and held out; no code, headings or marks."""
    paragraphs = [each for each in re.split(r"\n\s*\n", text) if re.fullmatch(r"\s*[A-Z].*\.\s*", each, re.DOTALL)]
    prose = [re.sub(r'[*"“”]', "", " ".join(each.split())) for each in paragraphs]
    return list(dict.fromkeys(each for part in prose for each in re.split(r"(?<=[.?!]) (?=[A-Z])", part)))


def train_tokenizer(sentences: list[str], words: int = 1000) -> str:
    """A vocabulary of word pieces, as JSON. Rank 0 makes it: made on each, pieces might have other numbers on each."""
    made: list[str | None] = [None]
    if dist.get_rank() == 0:
        tokenizer = BertWordPieceTokenizer()
        tokenizer.train_from_iterator(sentences, vocab_size=words, show_progress=False)
        made[0] = tokenizer.to_str()
    dist.broadcast_object_list(made)
    assert made[0] is not None
    return made[0]


def encode(sentences: list[str], tokenizer: BertTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """The sentences as token numbers, and which of them are words: not padding, nor the marks of start and end."""
    coded = tokenizer(
        sentences,
        truncation=True,
        max_length=LENGTH,
        padding="max_length",
        return_special_tokens_mask=True,
        return_tensors="pt",
    )
    return coded["input_ids"], coded["special_tokens_mask"] == 0


def hide(ids: torch.Tensor, words: torch.Tensor, tokenizer: BertTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose 15% of the words; 80% of them become [MASK], 10% any word, 10% stay: the input, and what was there."""
    chosen = (torch.rand(ids.shape) < 0.15) & words
    fate = torch.rand(ids.shape)
    masked = torch.where(chosen & (fate < 0.8), tokenizer.mask_token_id, ids)
    masked = torch.where(chosen & (fate >= 0.9), torch.randint(len(tokenizer), ids.shape), masked)
    return masked, torch.where(chosen, ids, NO_LABEL)


def save(path: Path, state: dict[str, object]) -> None:
    """Write a checkpoint that is there as a whole or not at all, whenever we may be killed."""
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    os.replace(partial, path)


@torch.no_grad()
def test(model: BertForMaskedLM, held_out: TensorDataset, guess: int, device: torch.device) -> list[float]:
    """Over the hidden words of all ranks: the loss, the share found, and that found by always saying ``guess``."""
    model.eval()
    total = torch.zeros(4, device=device)
    # Not a DistributedSampler, which would show some sentences twice to give every rank as many.
    share = torch.utils.data.Subset(held_out, range(dist.get_rank(), len(held_out), dist.get_world_size()))
    for batch in DataLoader(share, batch_size=64):
        masked, attention, labels = (each.to(device) for each in batch)
        logits, labels = model(masked, attention).logits[labels != NO_LABEL], labels[labels != NO_LABEL]
        loss = cross_entropy(logits, labels, reduction="sum")
        found, common = (logits.argmax(1) == labels).sum(), (labels == guess).sum()
        total += torch.stack([loss, found, common, torch.tensor(len(labels), device=device)])
    dist.all_reduce(total)
    model.train()
    return (total[:3] / total[3]).tolist()


def main(
    epochs: int = 6,
    lr: float = 0.003,
    batch_size: int = 8,
    text: Path | None = None,
    pretrained: str | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Train up to epoch ``epochs``, from ``checkpoint`` where that file exists; ``batch_size`` is that of one rank."""
    device = join_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state = None
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)

    torch.manual_seed(0)  # the same order of sentences and the same words hidden in the held-out ones on all ranks
    sentences = clean_sentences(text.read_text() if text else "\n\n".join(topics.values()))
    sentences = [sentences[i] for i in torch.randperm(len(sentences))]
    split = len(sentences) // 10
    if pretrained:
        tokenizer = AutoTokenizer.from_pretrained(pretrained)
        model = BertForMaskedLM.from_pretrained(pretrained)
    else:
        coded = state["tokenizer"] if state else train_tokenizer(sentences[split:])
        tokenizer = BertTokenizerFast(tokenizer_object=Tokenizer.from_str(coded))
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
        model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes, max_position_embeddings=LENGTH))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    done = 0
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epoch"]

    ids, words = encode(sentences, tokenizer)
    attention = (ids != tokenizer.pad_token_id).long()
    masked, labels = hide(ids[:split], words[:split], tokenizer)
    held_out = TensorDataset(masked, attention[:split], labels)
    guess = ids[split:][words[split:]].bincount().argmax().item()  # the commonest word
    data = TensorDataset(ids[split:], words[split:], attention[split:])
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size, sampler=sampler)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    if rank == 0:
        size = sum(each.numel() for each in model.parameters())
        print(f"world of {world_size}: {len(data)} sentences, {len(tokenizer)} word pieces, {size:,} parameters")

    for epoch in range(done + 1, epochs + 1):
        sampler.set_epoch(epoch)
        torch.manual_seed(epoch * world_size + rank)  # other words hidden in every epoch, and dropped on every rank
        for ids, words, attention in loader:
            masked, labels = hide(ids, words, tokenizer)
            logits = ddp(masked.to(device), attention.to(device)).logits
            # Ranks hide more words or fewer, and DDP averages over ranks: this makes it the mean over all hidden words.
            hidden = (labels != NO_LABEL).sum().to(device)
            dist.all_reduce(hidden)
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten().to(device), reduction="sum")
            optimizer.zero_grad()
            (loss * world_size / hidden).backward()
            optimizer.step()
        loss, found, common = test(model, held_out, guess, device)
        if rank == 0:
            print(f"epoch {epoch}: held-out loss {loss:.3f}, hidden words found {found:.3f}")
            if checkpoint is not None:
                coded = tokenizer.backend_tokenizer.to_str()
                parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(checkpoint, {"epoch": epoch, "tokenizer": coded, **parts})
    if rank == 0 and epochs > done:
        print(f"always guessing {tokenizer.convert_ids_to_tokens(guess)!r} finds {common:.3f}")
    dist.barrier()  # no rank leaves while another one still communicates
    del ddp  # none may outlive the group: dropped after it, it can hang (gloo, torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)  # the defaults are main's
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--pretrained")
    parser.add_argument("--checkpoint", type=Path)
    main(**vars(parser.parse_args()))
