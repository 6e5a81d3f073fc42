"""Serving adapters: one base, a small adapter for every user, learned to adapt from little text.

    python examples/serving.py [PICTURE]             # needs transformers and peft

A tiny Llama, users who write by Markov chains; the start of their LoRA adapters is meta-learned."""

import sys

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import metanudge as mn

META_STEPS = 120
WORDS = 12
torch.manual_seed(0)
common, habits = torch.randn(WORDS, WORDS), 2.5 * torch.randn(2, WORDS, WORDS)


def user() -> mn.Task:
    chain = (common + torch.einsum("h,hij->ij", torch.randn(2), habits)).softmax(1)
    text = torch.randint(WORDS, (24, 1))
    for _ in range(7):
        text = torch.cat([text, torch.multinomial(chain[text[:, -1]], 1)], 1)
    return mn.Task(*({"input_ids": part, "labels": part} for part in text.split([8, 16])))


sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
base = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=1, **sizes))
adam = torch.optim.Adam(base.parameters(), lr=3e-3)
for _ in range(200):
    adam.zero_grad()
    base(**user().query).loss.backward()
    adam.step()
model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
usual = [mn.MetaLearner(model, lam=1.0, solver=mn.GradientDescent(lr, 8)) for lr in (0.1, 0.3, 1)]
learner, test = usual[1], [user() for _ in range(20)]
before = min((other.evaluate(test) for other in usual), key=lambda result: result.mean_loss)
adam = torch.optim.Adam(learner.parameters(), lr=2e-3)
for _ in range(META_STEPS):
    adam.zero_grad()
    learner.backward([user() for _ in range(4)], metrics=False)
    adam.step()
states = [learner.adapted_state(task.support) for task in test]  # all that is kept of a user
served = torch.zeros(20)
for number, (task, state) in enumerate(zip(test, states, strict=True)):  # a request
    model.load_state_dict(state, strict=False)
    served[number] = model(**task.query).loss.detach()
kept, whole = model.get_nb_trainable_parameters()
kinds = {"base": before.loss_before, "LoRA as usual": before.loss, "LoRA, start learned": served}
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for (name, loss), mark in zip(kinds.items(), "x.o", strict=True):
    print(f"{name:20} loss {float(loss.mean()):.2f}")
    axes.plot(loss, mark, label=name)
axes.legend(fontsize=7)
print(f"kept of a user: {kept} numbers, of the whole model {whole}")
axes.set(xlabel="user", ylabel="loss on new sentences")
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "serving.png")
