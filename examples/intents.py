"""Texts, an encoder and LoRA: new intents from one sentence each, beside frozen features.

python examples/intents.py [PICTURE]             # needs transformers and peft"""

import sys
import tempfile

import matplotlib.pyplot as plt
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

import metanudge as mn

META_STEPS = 120
torch.manual_seed(0)
wanted = torch.rand(40, 12, 6).argsort(2)[..., :2] + 6 * torch.arange(40)[:, None, None]
about = torch.rand(40, 12, 8).argsort(2)[..., :3] + 8 * torch.randint(30, 38, (40, 12, 1))
texts = [" ".join(f"w{i}" for i in row) for row in torch.cat([wanted, about], 2).flatten(0, 1)]
table = [{"text": text, "intent": row // 12} for row, text in enumerate(texts)]
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(304))]
tokenizer, folder = hf.BertTokenizer({w: i for i, w in enumerate(words)}), tempfile.mkdtemp()
tokenizer.save_pretrained(folder)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 309}
bert = hf.BertForMaskedLM(hf.BertConfig(num_hidden_layers=1, **sizes))
ids, adam = torch.tensor(tokenizer(texts)["input_ids"]), torch.optim.Adam(bert.parameters(), 3e-3)
for _ in range(8 * META_STEPS):
    x, hidden = ids[torch.randint(480, (64,))], torch.rand(64, 7) < 0.3
    adam.zero_grad()
    bert(x.masked_fill(hidden, 4), labels=x.masked_fill(~hidden, -100)).loss.backward()
    adam.step()
bert.save_pretrained(folder)


class Encoder(hf.BertModel):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(input_ids, attention_mask).last_hidden_state
        return (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


draws = {"label": "intent", "ways": 5, "queries": 5, "seed": 0}
frozen = mn.tasks.EncodedText.from_table(table, encoder=folder, **draws)
found = {name: float(of.mean()) for name, of in mn.baselines.measure(frozen, 60).items()}
source = mn.tasks.Text.from_table(table, tokenizer=folder, **draws).with_support()
lora, solver = LoraConfig(target_modules="all-linear"), mn.GradientDescent(lr=0.03, steps=2)
model = get_peft_model(Encoder.from_pretrained(folder, add_pooling_layer=False), lora)
head = mn.models.Prototypes(model, 32)
learner = mn.MetaLearner(head, torch.nn.functional.cross_entropy, lam=0.3, solver=solver)
test = source.batch(range(60), "test")
found["LoRA as usual"] = learner.evaluate(test).mean_accuracy
adam = torch.optim.Adam(learner.parameters(), lr=2e-3)
for tasks in source.batches(size=4, count=META_STEPS):
    adam.zero_grad()
    learner.backward(tasks, metrics=False)
    adam.step()
found["LoRA, start learned"] = learner.evaluate(test).mean_accuracy
print("\n".join(f"{name:20} {accuracy:.0%}" for name, accuracy in found.items()))
plt.figure(figsize=(6, 2.4), layout="constrained").supxlabel("accuracy on new intents")
plt.barh(list(found), list(found.values()))
plt.savefig(sys.argv[1] if len(sys.argv) > 1 else "intents.png")
