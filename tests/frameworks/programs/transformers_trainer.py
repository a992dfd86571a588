"""transformers' Trainer on a tiny model made from a configuration: `transformers_trainer.py FOLDER [STEP]`.

It saves at every second step and goes on from what is saved; at STEP, in the first attempt, rank 1 fails.
"""

import gc
import json
import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 8) % 40
        return {"input_ids": tokens, "labels": tokens}


class Fault(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and state.global_step == self.step and args.process_index == 1:
            raise RuntimeError(f"step {self.step} failed")


def main(folder, fails_at):
    set_seed(7)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Numbers(), callbacks=[Fault(fails_at)])
    begun = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    trainer.train(resume_from_checkpoint=begun)
    report = {
        "rank": arguments.process_index,
        "world_size": arguments.world_size,
        "mode": arguments.parallel_mode.value,
        "resumed": begun and os.path.basename(begun),
        "steps": trainer.state.global_step,
        "losses": {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry},
        "weights": round(sum(weight.abs().sum().item() for weight in model.parameters()), 3),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else None)
    gc.collect()  # no DDP object may outlive the group: dropped after it, it can hang or abort (gloo, torch 2.13)
    torch.distributed.destroy_process_group()
