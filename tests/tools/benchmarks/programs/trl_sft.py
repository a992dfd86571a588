"""A rank of a trl user's script: SFTTrainer with LoRA on a tiny Llama and a tokenizer made here, three steps on CPUs.

Each rank prepares rows of its own, with a function that datasets cannot hash; what it prints of its rows and losses
has every digit, so that two launchers' runs can be compared.
"""

import json
import os
import tempfile
from itertools import count

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WORDS = [f"w{number}" for number in range(40)]


def rows():
    for number in range(48):
        yield {"text": " ".join(WORDS[(number + step) % 40] for step in range(8))}


def tokenizer():
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def prepared():
    seen = (number for number in count())  # no generator can be hashed: the cached file's name is drawn at random

    def reverse(row):
        next(seen)
        return {"text": " ".join(reversed(row["text"].split()))}

    return Dataset.from_generator(rows).shard(WORLD_SIZE, RANK).map(reverse)


def main():
    set_seed(42)
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            max_steps=3,
            max_length=16,
            per_device_train_batch_size=2,
            learning_rate=0.01,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        with arguments.main_process_first():
            dataset = prepared()
        trainer = SFTTrainer(
            model=LlamaForCausalLM(config),
            args=arguments,
            train_dataset=dataset,
            processing_class=words,
            peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    first = dataset[0]["text"].split()[-1]
    print(json.dumps({"rank": RANK, "first": first, "losses": losses}), flush=True)


if __name__ == "__main__":
    main()
