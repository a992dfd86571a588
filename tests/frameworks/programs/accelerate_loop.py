"""A rank of an accelerate script, written like its examples: a tiny BERT from a configuration, three steps.

What it prints of its losses has every digit, so that two launchers' runs can be compared.
"""

import argparse
import json
import logging

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed
from transformers.utils import check_min_version

check_min_version("4.46.0")

logger = get_logger(__name__)

STEPS = 3


def training_function(args):
    accelerator = Accelerator(cpu=True)
    logger.info(accelerator.state)
    set_seed(args.seed)
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    tokens = torch.randint(0, 40, (8 * STEPS, 8))
    loader = DataLoader(TensorDataset(tokens, tokens.sum(1) % 2), shuffle=True, batch_size=4)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 2 * STEPS)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for tokens, labels in loader:
        loss = model(input_ids=tokens, labels=labels).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(json.dumps({"rank": accelerator.process_index, "losses": losses}), flush=True)
    # No DDP object may outlive the group: dropped after it, it can hang (gloo, torch 2.13).
    model, optimizer, loader, schedule = accelerator.free_memory(model, optimizer, loader, schedule)
    accelerator.end_training()


def main():
    logging.basicConfig(level=logging.WARNING)
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--lr", type=float, default=1e-3)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
