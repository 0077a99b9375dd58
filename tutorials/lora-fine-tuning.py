# %% [markdown]
# # Private fine-tuning with LoRA
#
# A language model that was trained on public text is adapted to private text: only low-rank adapters are trained, with
# clipped gradients and noise. You see what the adapters learn, what they may not learn, and what the guarantee covers.

# %% [markdown]
# ## Public text and private text
# The public text is the language reference that every Python carries (`pydoc_data.topics`). The private records stand
# in for notes of your users: the docstrings of NumPy's functions, cut to 64 bytes each. A byte is a token, so that
# nothing must be downloaded; with pretrained weights of your own only the next two cells change.

# %%
import inspect
import re
from pydoc_data.topics import topics

import numpy as np
import torch

LENGTH, PAD = 64, 0


def encode(text: str) -> list[int]:
    """Bytes, padded and cut to a public length: no record shows how long others are."""
    ids = [byte for byte in text.encode("ascii", "ignore")[:LENGTH] if byte]
    return ids + [PAD] * (LENGTH - len(ids))


public_text = " ".join(re.sub(r"\s+", " ", text) for text in topics.values())
public = torch.tensor([encode(public_text[i : i + LENGTH]) for i in range(0, len(public_text) - LENGTH, LENGTH)])

docs = {
    inspect.getdoc(value) for module in (np, np.linalg, np.fft, np.ma, np.random) for value in vars(module).values()
}
notes = sorted({re.sub(r"\s+", " ", paragraph) for doc in docs if doc for paragraph in doc.split("\n\n")})
notes = [note for note in notes if len(note) > 40]
ids = torch.tensor([encode(note) for note in notes])
order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
test, private = ids[order[:200]], ids[order[200:1700]]
print(f"{len(public)} public pieces; {len(private)} private records, {len(test)} public test records of their kind")

# %% [markdown]
# ## A model that read the public text
# A small GPT-2, trained for some seconds without privacy: its text is public.

# %%
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=128, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
model = GPT2LMHeadModel(config)


def losses(model, ids):
    """One loss per record: the sum over its bytes, divided by the public length."""
    logits = model(input_ids=ids).logits[:, :-1]
    each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none", ignore_index=PAD)
    return each.sum(1) / LENGTH


def bits_per_byte(model) -> float:
    model.eval()
    with torch.no_grad():
        total = losses(model, test).sum() * LENGTH
    model.train()
    return float(total / (test[:, 1:] != PAD).sum() / np.log(2))


optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(150):
    rows = torch.randint(len(public), (32,))
    optimizer.zero_grad()
    losses(model, public[rows]).mean().backward()
    optimizer.step()
before = bits_per_byte(model)
print(f"before: {before:.3f} bits per byte on the test records")

# %% [markdown]
# ## Adapters, made private
# PEFT adds the adapters and freezes the rest. `make_private_with_epsilon` finds the smallest noise for ε = 3; from then
# on every step clips each record's gradient of the adapters and adds noise. Frozen weights get no gradient and no noise.
# The loss goes to `engine.backward` as one value per record.

# %%
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset

from sordino import PrivacyEngine

EPOCHS, DELTA = 4, 1e-4
adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
print(f"{sum(p.numel() for p in trained):,} of {sum(p.numel() for p in adapted.parameters()):,} parameters are trained")

engine = PrivacyEngine()
adapted, optimizer, loader = engine.make_private_with_epsilon(
    module=adapted.train(),
    optimizer=torch.optim.AdamW(trained, lr=3e-3),
    data_loader=DataLoader(TensorDataset(private), batch_size=256),
    target_epsilon=3.0,
    target_delta=DELTA,
    epochs=EPOCHS,
    max_grad_norm=0.5,
)
for _ in range(EPOCHS):
    for (batch,) in loader:
        optimizer.zero_grad()
        engine.backward(losses(adapted, batch))
        optimizer.step()
print(engine.guarantee(delta=DELTA).describe())
print(f"before: {before:.3f}, after: {bits_per_byte(adapted):.3f} bits per byte")

# %% [markdown]
# The guarantee covers the private records only. Whether the *public* text held somebody's secrets is outside of it, and
# so is a pretrained model that you take from elsewhere.
#
# ## What the adapters may be used for
# The adapted model is one release: generating any amount of text from it costs nothing more (post-processing).

# %%
training = engine.event()  # what was done: the input of every accountant
engine.detach()
prompt = torch.tensor([list(b"Return the ")])
written = adapted.eval().generate(
    input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False, pad_token_id=PAD
)
print(bytes(written[0].tolist()).decode("ascii", "replace"))

# %% [markdown]
# ## What a secret would need
# A secret that stands in one record is hardly learned: the guarantee bounds it, whatever the secret is. A likelihood
# ratio of e^3 for one record is the limit at ε = 3, and an attacker who guesses members is right at most so often:

# %%
from sordino.accounting import membership_advantage

advantage = membership_advantage(training).upper
print(f"right guesses about one record: at most {(1 + advantage) / 2:.0%}")

# %% [markdown]
# ## Exercises
# 1. Train all parameters instead of adapters (`model.requires_grad_(True)`, no PEFT). More parameters get noise of the
#    same size in each; which is better at ε = 3?
# 2. Divide by each record's own number of bytes instead of `LENGTH`. Why is that still one loss per record?
#
# **Next:** [Hugging Face models](../huggingface.md), with the stock Trainer · [auditing a model](auditing.md)
