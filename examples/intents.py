"""Texts, an encoder and LoRA: new intents from one sentence each, beside frozen features.

    python examples/intents.py [PICTURE]             # needs transformers and peft

The table is made up: a sentence has two of the six words of its intent, and three that say nothing.
The encoder, a tiny BERT, first learns to guess hidden words; only its adapters are meta-learned.
"""

import sys
import tempfile

import matplotlib.pyplot as plt
import tokenizers
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

import metanudge as mn

META_STEPS = 60
torch.manual_seed(0)
words = ["[PAD]", "[MASK]"] + [f"w{i}" for i in range(250)]  # six for each of 40 intents, ten more
picks = torch.rand(40, 12, 6).argsort(2)[..., :2] + 6 * torch.arange(40)[:, None, None]
ids = 2 + torch.cat([picks, torch.randint(240, 250, (40, 12, 3))], 2)
rows = [
    {"text": " ".join(words[i] for i in text), "intent": f"intent {intent}"}
    for intent, texts in enumerate(ids)
    for text in texts
]
folder = tempfile.mkdtemp()
known = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[MASK]")
(tokenizer := tokenizers.Tokenizer(known)).pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
tokenizer.save_pretrained(folder)

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
bert = hf.BertForMaskedLM(hf.BertConfig(vocab_size=len(words), num_hidden_layers=1, **sizes))
adam = torch.optim.Adam(bert.parameters(), lr=3e-3)
for _ in range(1500):
    batch = ids.flatten(0, 1)[torch.randint(480, (64,))]
    hidden = torch.rand(batch.shape) < 0.3
    adam.zero_grad()
    bert(batch.masked_fill(hidden, 1), labels=batch.masked_fill(~hidden, -100)).loss.backward()
    adam.step()
bert.save_pretrained(folder)
