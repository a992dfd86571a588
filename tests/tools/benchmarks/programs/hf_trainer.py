"""A rank of a Hugging Face user's script: a Trainer on a tiny BERT made from a configuration, two steps on CPUs."""

import tempfile

import marks
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"input_ids": torch.arange(index, index + 8) % 40, "labels": torch.tensor(index % 2)}


class Marks(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            marks.mark("step")


def main() -> None:
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = BertForSequenceClassification(config)
        Trainer(model=model, args=arguments, train_dataset=Sentences(), callbacks=[Marks()]).train()
    marks.hold()


if __name__ == "__main__":
    main()
