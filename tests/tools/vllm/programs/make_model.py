"""Makes a tiny random Llama, with a tokenizer trained on a few words: FOLDER. It runs in vLLM's environment."""

import sys

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder = sys.argv[1]
tokenizer = Tokenizer(BPE(unk_token="<unk>"))
tokenizer.pre_tokenizer = ByteLevel()
special = ["<unk>", "<s>", "</s>"]
trainer = BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=ByteLevel.alphabet())
tokenizer.train_from_iterator(["a trainer asks its server for the next words"] * 10, trainer)
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
).save_pretrained(folder)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)
LlamaForCausalLM(config).save_pretrained(folder)
