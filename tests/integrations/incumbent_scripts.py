"""Shapes of real trainings that were written for Opacus, small: each as its author would have written it.

A script takes the engine's class, which is all that its import line brings in, and returns the engine at its end. Where
the script needs more than another import line, `changed` says whether the change is made that the message names.
"""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

__all__ = ["SCRIPTS", "Script", "table"]


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training.

    Args:
        run: takes the engine's class, and where something is to change whether it is changed; returns the engine.
        about: what it trains.
        words: a part of the message that the unchanged script gets; None when it runs.
        advice: what the page tells to write; "" when nothing else is to change.
        unsound: why the ε that is printed elsewhere does not hold; "" where it holds.
    """

    run: Callable[..., object]
    about: str
    words: str | None = None
    advice: str = ""
    unsound: str = ""


SCRIPTS: list[Script] = []


def table():
    """The scripts as a table of the page on migrating."""
    lines = ["| training | as it is | what to write |", "|---|---|---|"]
    for script in SCRIPTS:
        ends = (
            "runs" if script.words is None else f"refused: {script.unsound}" if script.unsound else "says what to write"
        )
        lines.append(f"| {script.about} | {ends} | {script.advice or 'the import line'} |")
    return "\n".join(lines)


def runs(about):
    def add(run):
        SCRIPTS.append(Script(run=run, about=about))
        return run

    return add


def changes(about, words, advice):
    def add(run):
        SCRIPTS.append(Script(run=run, about=about, words=words, advice=advice))
        return run

    return add


def refused(about, words, advice, why):
    def add(run):
        SCRIPTS.append(Script(run=run, about=about, words=words, advice=advice, unsound=why))
        return run

    return add


# --- data --------------------------------------------------------------------------------------------------------


def images(channels=1, size=8, classes=3):
    return TensorDataset(torch.randn(32, channels, size, size), torch.randint(0, classes, (32,)))


def rows(width=6, classes=3):
    return TensorDataset(torch.randn(32, width), torch.randint(0, classes, (32,)))


def tokens(length=8, classes=2):
    return TensorDataset(torch.randint(1, 30, (32, length)), torch.randint(0, classes, (32,)))


class Texts(Dataset):
    """Tokens of different lengths."""

    def __init__(self):
        self.items = [(torch.randint(1, 30, (int(n),)), int(n) % 2) for n in torch.randint(3, 9, (32,))]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def private(engine, model, optimizer, data, **options):
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    loader = DataLoader(data, batch_size=8, shuffle=True) if isinstance(data, Dataset) else data
    return engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **given)


def mlp(width=6, classes=3):
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, classes))


class Cnn(nn.Module):
    def __init__(self, channels=1, classes=3):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, 4, 3, padding=1), nn.Conv2d(4, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.norm(self.conv2(x))), 2)
        x = x.view(-1, 8)
        return self.fc2(F.relu(self.fc1(x)))


def fit(engine, model, optimizer, loader, criterion, epochs=1):
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
    return engine


class Paths(nn.Module):
    """The next place of a path and the time until then, for every position, flattened over positions."""

    def __init__(self):
        super().__init__()
        self.places, self.cell = nn.Embedding(30, 8), nn.LSTM(9, 12, batch_first=True)
        self.next, self.times = nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, places, times):
        hidden, _ = self.cell(torch.cat([self.places(places), times[..., None]], -1))
        return torch.log_softmax(self.next(hidden), -1).view(-1, 5), self.times(hidden).view(-1, 5)


def paths():
    size = 32, 6
    return TensorDataset(
        torch.randint(1, 30, size),
        torch.rand(size),
        torch.rand(size),
        torch.randint(0, 5, size),
        torch.rand(size) < 0.7,
    )


# --- by the import line alone ------------------------------------------------------------------------------------


@runs("MNIST: a convolutional network, epochs of training and evaluation, losses collected for display")
def mnist(PrivacyEngine):
    device = torch.device("cpu")
    test_loader = DataLoader(images(), batch_size=16)
    model = Cnn().to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0)
    privacy_engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = private(privacy_engine, model, optimizer, images(), noise_multiplier=1.1)
    for epoch in range(1, 3):
        model.train()
        criterion = nn.CrossEntropyLoss()
        losses = []
        for _batch_idx, (data, target) in enumerate(train_loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            output = model(data)
            loss = criterion(output, target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epsilon = privacy_engine.get_epsilon(delta=1e-5)
        print(f"epoch {epoch} loss {np.mean(losses):.3f} ({epsilon:.2f}, 1e-5)")
        model.eval()
        correct = 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data.to(device))
                correct += output.argmax(dim=1, keepdim=True).eq(target.view_as(output[:, :1])).sum().item()
    return privacy_engine


@runs("CIFAR-10: learning rate set by hand each epoch, accuracy by numpy in the loop, the best state saved")
def cifar10(PrivacyEngine):
    model = Cnn(3)
    optimizer = optim.RMSprop(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    data = DataLoader(images(3), batch_size=8, num_workers=0, pin_memory=False, generator=None)
    model, optimizer, loader = private(engine, model, optimizer, data)
    criterion, best = nn.CrossEntropyLoss(), 0.0
    for epoch in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1.0 + np.cos(np.pi * epoch / 3))
        model.train()
        top1 = []
        for i, (x, y) in enumerate(loader):
            output = model(x)
            loss = criterion(output, y)
            preds = np.argmax(output.detach().cpu().numpy(), axis=1)
            labels = y.detach().cpu().numpy()
            top1.append((preds == labels).mean())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if i % 2 == 0:
                engine.get_epsilon(delta=1e-5)
        if np.mean(top1) >= best:
            best = np.mean(top1)
            torch.save(
                {"epoch": epoch, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO()
            )
    return engine


@runs('CIFAR-10 with one clipping norm for every parameter (`clipping="per_layer"`)')
def cifar10_per_layer(PrivacyEngine):
    model = Cnn(3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    n_layers = len([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    norms = [1.0 / np.sqrt(n_layers)] * n_layers
    engine = PrivacyEngine()
    made = private(engine, model, optimizer, images(3), max_grad_norm=norms, clipping="per_layer")
    return fit(engine, *made, nn.CrossEntropyLoss())


@runs("Residual network, a target ε (`make_private_with_epsilon`), σ read from the optimizer")
def resnet_with_epsilon(PrivacyEngine):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(inplace=True))

        def forward(self, x):
            return F.relu(x + self.body(x))

    model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    optimizer = optim.RMSprop(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(images(3), batch_size=8),
        epochs=2,
        target_epsilon=8.0,
        target_delta=1e-5,
        max_grad_norm=1.2,
    )
    print(f"Using sigma={optimizer.noise_multiplier} and C={optimizer.max_grad_norm}")
    return fit(engine, model, optimizer, loader, nn.CrossEntropyLoss(), epochs=2)


@runs("IMDb with an LSTM over texts cut to one length; accuracy in the loop")
def imdb_lstm(PrivacyEngine):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(30, 8)
            self.lstm = nn.LSTM(8, 8, num_layers=1, bidirectional=True, batch_first=True)
            self.out = nn.Linear(16, 2)

        def forward(self, x, hidden=None):
            x, _ = self.lstm(self.embedding(x), hidden)
            return self.out(x[:, -1, :])

    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, tokens())
    for data, label in loader:
        optimizer.zero_grad()
        predictions = model(data).squeeze(1)
        loss = F.cross_entropy(predictions, label)
        accuracy = (predictions.argmax(1) == label).sum().item() / len(label)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.3f} {accuracy:.2f}")
    return engine


@runs("Text classification with a transformer encoder and padding masks, texts padded to one length")
def transformer_encoder(PrivacyEngine):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.place = nn.Embedding(30, 8, padding_idx=0), nn.Parameter(torch.randn(1, 8, 8))
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.encoder, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2)

        def forward(self, ids):
            mask = ids == 0
            x = self.encoder(self.embedding(ids) + self.place, src_key_padding_mask=mask)
            x = x.masked_fill(mask.unsqueeze(-1), 0.0)
            return self.out(x.sum(1) / (~mask).sum(1, keepdim=True).clamp(min=1))

    data = tokens()
    for row, length in zip(data.tensors[0], torch.randint(3, 9, (32,)), strict=True):
        row[length:] = 0
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    return fit(engine, *private(engine, model, optimizer, data), nn.CrossEntropyLoss())


@runs("BERT, last layer only, on sentence pairs (SNLI): `model(**inputs)`, `loss = outputs[0]`")
def bert_last_layer(PrivacyEngine):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    model = BertForSequenceClassification(config)
    trainable = [model.bert.encoder.layer[-1], model.bert.pooler, model.classifier]
    for p in model.parameters():
        p.requires_grad = False
    for layer in trainable:
        for p in layer.parameters():
            p.requires_grad = True
    ids, labels = tokens(classes=3).tensors
    data = TensorDataset(ids, torch.ones_like(ids), torch.zeros_like(ids), labels)
    model = model.train()
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4, eps=1e-8)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, data, max_grad_norm=0.1)
    losses = []
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        batch = tuple(t.to("cpu") for t in batch)
        inputs = {"input_ids": batch[0], "attention_mask": batch[1], "token_type_ids": batch[2], "labels": batch[3]}
        outputs = model(**inputs)
        loss = outputs[0]
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        if step > 0 and step % 2 == 0:
            print(np.mean(losses), engine.get_epsilon(1e-5))
    return engine


@runs("GPT-2 on blocks of text, `labels=ids`")
def gpt2_blocks(PrivacyEngine):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=30, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config)
    model.train()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, TensorDataset(tokens().tensors[0]))
    for (ids,) in loader:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return engine


@runs("LoRA: adapters of peft on a frozen language model")
def lora(PrivacyEngine):
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    lora = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = get_peft_model(BertForSequenceClassification(config), lora)
    model.train()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, tokens())
    for ids, labels in loader:
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return engine


@runs("Named entities: `CrossEntropyLoss(ignore_index=-100)` over flattened tokens")
def ner(PrivacyEngine):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm = nn.Embedding(30, 8), nn.LSTM(8, 8, bidirectional=True, batch_first=True)
            self.drop, self.out = nn.Dropout(0.2), nn.Linear(16, 4)

        def forward(self, ids):
            return self.out(self.drop(self.lstm(self.embedding(ids))[0]))

    labels = torch.randint(0, 4, (32, 8))
    labels[torch.rand(32, 8) < 0.3] = -100
    model = Tagger()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, TensorDataset(tokens().tensors[0], labels))
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    for ids, tags in loader:
        optimizer.zero_grad()
        logits = model(ids)
        loss = criterion(logits.view(-1, logits.shape[-1]), tags.view(-1))
        loss.backward()
        optimizer.step()
    return engine


@runs("Variational autoencoder: reconstruction and KL summed, then divided by the batch's size")
def vae(PrivacyEngine):
    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.mu, self.logvar = nn.Linear(64, 16), nn.Linear(16, 4), nn.Linear(16, 4)
            self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 64)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std

        def forward(self, x):
            h = F.relu(self.fc1(x.view(-1, 64)))
            mu, logvar = self.mu(h), self.logvar(h)
            z = self.reparameterize(mu, logvar)
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

    def loss_function(recon, x, mu, logvar):
        bce = F.binary_cross_entropy(recon, x.view(-1, 64), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

    model = Vae()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    data = TensorDataset(torch.rand(32, 1, 8, 8), torch.zeros(32).long())
    model, optimizer, loader = private(engine, model, optimizer, data)
    for x, _ in loader:
        optimizer.zero_grad()
        recon, mu, logvar = model(x)
        loss = loss_function(recon, x, mu, logvar) / x.size(0)
        loss.backward()
        optimizer.step()
    return engine


@runs('VAE with a summed loss and `loss_reduction="sum"`')
def sum_loss(PrivacyEngine):
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6))
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, rows(), loss_reduction="sum")
    for x, _ in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), x, reduction="sum").backward()
        optimizer.step()
    return engine


@runs("Convolutional autoencoder, denoising, mean squared error")
def autoencoder(PrivacyEngine):
    encoder = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU())
    decoder = nn.Sequential(nn.ConvTranspose2d(4, 1, 3, stride=2, padding=1, output_padding=1), nn.Sigmoid())
    model = nn.Sequential(encoder, decoder)
    optimizer = optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, images())
    for data in loader:
        x, _ = data
        noisy = x + 0.1 * torch.randn_like(x)
        loss = nn.MSELoss()(model(noisy), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return engine


@runs("Recommender: embeddings of users and items, a network on top, `BCELoss` on squeezed outputs")
def neural_recommender(PrivacyEngine):
    class Ncf(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(20, 4), nn.Embedding(30, 4)
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])
            self.output = nn.Linear(4, 1)

        def forward(self, user, item):
            x = torch.cat([self.users(user), self.items(item)], dim=-1)
            for layer in self.layers:
                x = F.dropout(F.relu(layer(x)), 0.1, training=self.training)
            return torch.sigmoid(self.output(x)).squeeze(-1)

    data = TensorDataset(torch.randint(0, 20, (32,)), torch.randint(0, 30, (32,)), torch.randint(0, 2, (32,)).float())
    model = Ncf()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, data)
    for user, item, rating in loader:
        optimizer.zero_grad()
        loss = nn.BCELoss()(model(user, item), rating)
        loss.backward()
        optimizer.step()
    return engine


@runs("Matrix factorization with biases and a global mean")
def matrix_factorization(PrivacyEngine):
    class Mf(nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.q = nn.Embedding(20, 4), nn.Embedding(30, 4)
            self.b, self.c = nn.Embedding(20, 1), nn.Embedding(30, 1)
            self.mean = nn.Parameter(torch.tensor(3.0))

        def forward(self, pairs):
            user, item = pairs[:, 0], pairs[:, 1]
            return (self.p(user) * self.q(item)).sum(1) + self.b(user).squeeze(1) + self.c(item).squeeze(1) + self.mean

    pairs = torch.stack([torch.randint(0, 20, (32,)), torch.randint(0, 30, (32,))], 1)
    model = Mf()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    engine = PrivacyEngine()
    made = private(engine, model, optimizer, TensorDataset(pairs, torch.rand(32) * 5))
    return fit(engine, *made, nn.MSELoss())


@runs("Flower client that keeps the loader `make_private` returned and makes it private again every round")
def flower_keeps_the_loader(PrivacyEngine):
    class Client:
        def __init__(self):
            self.model = mlp()
            self.loader = DataLoader(rows(), batch_size=8)
            self.privacy_engine = PrivacyEngine()

        def get_parameters(self):
            return [val.cpu().numpy() for _, val in self.model.state_dict().items()]

        def set_parameters(self, parameters):
            names = self.model.state_dict().keys()
            state = {k: torch.tensor(v) for k, v in zip(names, parameters, strict=True)}
            self.model.load_state_dict(state, strict=True)

        def fit(self, parameters):
            self.set_parameters(parameters)
            optimizer = optim.SGD(self.model.parameters(), lr=0.1)
            self.model, self.optimizer, self.loader = private(self.privacy_engine, self.model, optimizer, self.loader)
            fit(self.privacy_engine, self.model, self.optimizer, self.loader, nn.CrossEntropyLoss())
            return self.get_parameters(), len(self.loader.dataset), {"epsilon": self.privacy_engine.get_epsilon(1e-5)}

    client = Client()
    parameters = client.get_parameters()
    for _ in range(2):
        parameters, _, _ = client.fit(parameters)
    return client.privacy_engine


@runs("Federated averaging simulated: copies of a global model, one engine per client")
def federated_averaging(PrivacyEngine):
    world = mlp()
    for _ in range(2):
        states = []
        for _ in range(2):
            local = copy.deepcopy(world)
            optimizer = optim.SGD(local.parameters(), lr=0.1)
            engine = PrivacyEngine()
            local, optimizer, loader = private(engine, local, optimizer, rows())
            fit(engine, local, optimizer, loader, nn.CrossEntropyLoss())
            states.append(local.state_dict())
        world.load_state_dict({k: sum(state[k] for state in states) / len(states) for k in states[0]})
    return engine


@runs("Medical segmentation: a small U-Net, cross entropy at every pixel")
def unet(PrivacyEngine):
    def double(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.ReLU(inplace=True))

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1, self.down2, self.pool = double(1, 4), double(4, 8), nn.MaxPool2d(2)
            self.up, self.conv, self.last = nn.ConvTranspose2d(8, 4, 2, stride=2), double(8, 4), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            one = self.down1(x)
            two = self.down2(self.pool(one))
            return self.last(self.conv(torch.cat([self.up(two), one], dim=1)))

    model = UNet()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    made = private(engine, model, optimizer, TensorDataset(torch.rand(32, 1, 8, 8), torch.randint(0, 2, (32, 8, 8))))
    return fit(engine, *made, nn.CrossEntropyLoss())


@runs("Segmentation with binary cross entropy and a soft Dice loss of each image")
def dice_of_each(PrivacyEngine):
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    data = TensorDataset(torch.rand(32, 1, 8, 8), torch.randint(0, 2, (32, 1, 8, 8)).float())
    model, optimizer, loader = private(engine, model, optimizer, data)
    for x, mask in loader:
        optimizer.zero_grad()
        logits = model(x)
        p = torch.sigmoid(logits).flatten(1)
        m = mask.flatten(1)
        dice = 1 - (2 * (p * m).sum(1) + 1) / (p.sum(1) + m.sum(1) + 1)
        loss = F.binary_cross_entropy_with_logits(logits, mask) + dice.mean()
        loss.backward()
        optimizer.step()
    return engine


@runs("Chest X-rays: several labels, `BCEWithLogitsLoss(pos_weight=…)`, two parameter groups, a frozen backbone")
def multi_label(PrivacyEngine):
    backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for p in backbone.parameters():
        p.requires_grad = False
    backbone.eval()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 5)

        def forward(self, x):
            with torch.no_grad():
                x = backbone(x)
            return self.head(F.relu(self.hidden(x)))

    model = Net()
    groups = [{"params": model.hidden.parameters(), "lr": 1e-3}, {"params": model.head.parameters()}]
    optimizer = optim.AdamW(groups, lr=1e-2)
    engine = PrivacyEngine()
    data = TensorDataset(torch.rand(32, 1, 8, 8), torch.randint(0, 2, (32, 5)).float())
    made = private(engine, model, optimizer, data)
    return fit(engine, *made, nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0])))


@runs("Tables: embeddings of categories beside numbers, batches that are dictionaries, a focal loss")
def tabular(PrivacyEngine):
    class Table(Dataset):
        def __init__(self):
            self.x, self.c = torch.randn(32, 4), torch.randint(0, 5, (32, 2))
            self.y = torch.randint(0, 2, (32,))

        def __len__(self):
            return 32

        def __getitem__(self, i):
            return {"numbers": self.x[i], "categories": self.c[i], "label": self.y[i]}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(5, 3) for _ in range(2))
            self.body = nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

        def forward(self, numbers, categories):
            parts = [table(categories[:, i]) for i, table in enumerate(self.tables)]
            return self.body(torch.cat([numbers, *parts], 1))

    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, Table())
    for batch in loader:
        optimizer.zero_grad()
        ce = F.cross_entropy(model(batch["numbers"], batch["categories"]), batch["label"], reduction="none")
        loss = ((1 - torch.exp(-ce)) ** 2 * ce).mean()
        loss.backward()
        optimizer.step()
    return engine


@runs("Triplets: anchor, positive and negative are one record; three forwards, `TripletMarginLoss`")
def triplets(PrivacyEngine):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 6), torch.randn(32, 6))
    model, optimizer, loader = private(engine, model, optimizer, data)
    criterion = nn.TripletMarginLoss(margin=1.0)
    for anchor, positive, negative in loader:
        optimizer.zero_grad()
        loss = criterion(model(anchor), model(positive), model(negative))
        loss.backward()
        optimizer.step()
    return engine


@runs("Siamese network on pairs, contrastive loss of each pair")
def siamese(PrivacyEngine):
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))

        def forward(self, a, b):
            return self.body(a), self.body(b)

    model = Siamese()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    data = TensorDataset(torch.randn(32, 1, 8, 8), torch.randn(32, 1, 8, 8), torch.randint(0, 2, (32,)).float())
    model, optimizer, loader = private(engine, model, optimizer, data)
    for a, b, label in loader:
        one, two = model(a, b)
        distance = F.pairwise_distance(one, two)
        loss = torch.mean((1 - label) * distance.pow(2) + label * torch.clamp(2.0 - distance, min=0.0).pow(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return engine


@runs("Time series: a GRU, scheduled once an epoch (`StepLR`), `clip_grad_norm_` left in")
def gru_forecast(PrivacyEngine):
    class Forecast(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.fc = nn.GRU(3, 8, num_layers=2, batch_first=True), nn.Linear(8, 1)

        def forward(self, x):
            h0 = torch.zeros(2, x.size(0), 8)
            out, _ = self.gru(x, h0)
            return self.fc(out[:, -1])

    model = Forecast()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    engine = PrivacyEngine()
    model, optimizer, loader = private(
        engine, model, optimizer, TensorDataset(torch.randn(32, 5, 3), torch.randn(32, 1))
    )
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        print(scheduler.get_last_lr())
    return engine


@runs("Schedules once a batch (`OneCycleLR`), bfloat16 autocast, `drop_last`, two workers")
def one_cycle_in_bf16(PrivacyEngine):
    model = Cnn()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(images(), batch_size=8, shuffle=True, drop_last=True, num_workers=2)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, loader)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, steps_per_epoch=len(loader), epochs=1)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
    return engine


@runs("Checkpoints of the engine: `save_checkpoint`, then `load_checkpoint` into a new engine")
def engine_checkpoints(PrivacyEngine):
    def made():
        model = mlp()
        optimizer = optim.Adam(model.parameters(), lr=1e-3)
        engine = PrivacyEngine()
        return engine, *private(engine, model, optimizer, rows())

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint.pt"
        engine, model, optimizer, loader = made()
        fit(engine, model, optimizer, loader, nn.CrossEntropyLoss())
        engine.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1})
        spent = engine.get_epsilon(1e-5)
        engine, model, optimizer, loader = made()
        found = engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
        assert found["epoch"] == 1
        fit(engine, model, optimizer, loader, nn.CrossEntropyLoss())
        assert engine.get_epsilon(1e-5) > spent
    return engine


@runs("States saved through `model._module`, loaded into a plain model for prediction")
def states_of_the_wrapped_module(PrivacyEngine):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, rows())
    fit(engine, model, optimizer, loader, nn.CrossEntropyLoss())
    file = io.BytesIO()
    torch.save({"model_state_dict": model._module.state_dict(), "opt": optimizer.state_dict()}, file)
    file.seek(0)
    plain = mlp()
    plain.load_state_dict(torch.load(file, weights_only=True)["model_state_dict"])
    plain.eval()
    plain(torch.randn(5, 6)).argmax(1)
    return engine


@runs("Secure mode and the PRV accountant")
def secure_mode(PrivacyEngine):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(accountant="prv", secure_mode=True)
    made = private(engine, model, optimizer, rows())
    return fit(engine, *made, nn.CrossEntropyLoss())


@runs("Averaged weights: a copy of the model follows it after every step and is evaluated")
def averaged_weights(PrivacyEngine):
    model = Cnn()
    ema = copy.deepcopy(model).eval()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, images())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(ema.parameters(), model.parameters(), strict=True):
                kept.mul_(0.9).add_(new, alpha=0.1)
    with torch.no_grad():
        ema(torch.randn(4, 1, 8, 8))
    return engine


@runs("Distillation from a frozen public teacher, label smoothing, two heads and two losses")
def distillation(PrivacyEngine):
    teacher = mlp().eval()

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.classes, self.size = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, x):
            h = torch.relu(self.body(x))
            return self.classes(h), self.size(h)

    model = Student()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    data = TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)), torch.rand(32))
    model, optimizer, loader = private(engine, model, optimizer, data)
    for x, y, size in loader:
        with torch.no_grad():
            wanted = teacher(x)
        optimizer.zero_grad()
        logits, found = model(x)
        soft = F.kl_div(F.log_softmax(logits / 2, 1), F.softmax(wanted / 2, 1), reduction="batchmean") * 4
        hard = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, y)
        loss = 0.5 * soft + 0.5 * hard + 0.1 * F.smooth_l1_loss(found.squeeze(1), size)
        loss.backward()
        optimizer.step()
    return engine


@runs("Logistic regression in float64, runs over several noise multipliers with one engine each")
def several_runs(PrivacyEngine):
    for noise in (0.8, 1.5):
        model = nn.Linear(6, 1).double()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        engine = PrivacyEngine()
        data = TensorDataset(torch.randn(32, 6).double(), torch.randint(0, 2, (32, 1)).double())
        model, optimizer, loader = private(engine, model, optimizer, data, noise_multiplier=noise)
        fit(engine, model, optimizer, loader, nn.BCEWithLogitsLoss())
    return engine


@runs("Texts padded to the longest of a batch, with an attention mask from the ids")
def masked_texts(PrivacyEngine):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 2)

        def forward(self, ids):
            mask = (ids != 0).unsqueeze(-1)
            return self.head((self.table(ids) * mask).sum(1) / mask.sum(1).clamp(min=1))

    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    loader = DataLoader(Texts(), batch_size=8, shuffle=True, collate_fn=pad_to_longest)
    return fit(engine, *private(engine, model, optimizer, loader), nn.CrossEntropyLoss())


def pad_to_longest(batch):
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in batch], batch_first=True, padding_value=0)
    return ids, torch.tensor([label for _, label in batch])


# --- by the change that the message names ------------------------------------------------------------------------


@runs("Paths: the score of each position's next place is picked by `scores[range(n), places]`, counted by `len`")
def picked_by_range(PrivacyEngine):
    model = Paths()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    engine = PrivacyEngine(accountant="prv")
    model, optimizer, loader = private(engine, model, optimizer, paths())
    shown = []
    for places, times, waits, following, _ in loader:
        waits, following = waits.view(-1), following.view(-1)
        optimizer.zero_grad()
        scores, delays = model(places, times)
        loss = -scores[range(scores.size(0)), following].mean()
        late = delays[np.arange(len(delays)), following] - waits
        late[following == 0] = 0
        loss = loss + 0.1 * late.abs().mean()
        shown.append(loss.item())
        loss.backward()
        optimizer.step()
    return engine


def memory_manager(loader, optimizer, max_physical_batch_size):
    """What `BatchMemoryManager(data_loader=…, …)` of Opacus does to a loader when it is entered."""
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)


@changes(
    "Large batches with `BatchMemoryManager` around the loader",
    "microbatch_size",
    "`make_private(…, microbatch_size=4)`, and `for x, y in loader:` without the manager",
)
def batch_memory_manager(PrivacyEngine, changed=False):
    model = Cnn()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    options = {"microbatch_size": 4} if changed else {}
    model, optimizer, loader = private(engine, model, optimizer, images(), **options)
    batches = loader if changed else memory_manager(loader, optimizer, 4)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return engine


@changes(
    "DCGAN: the private critic also sees invented images; the generator learns through it",
    "engine.mark_public",
    "`critic(engine.mark_public(fake.detach()))`; around the generator's step `critic.eval().requires_grad_(False)` "
    "and `critic.train().requires_grad_(True)`",
)
def dcgan(PrivacyEngine, changed=False):
    critic = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 4), nn.Flatten())
    generator = nn.Sequential(nn.ConvTranspose2d(4, 4, 4), nn.ReLU(), nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Tanh())
    optimizer_d = optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_g = optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    engine = PrivacyEngine()
    critic, optimizer_d, loader = private(engine, critic, optimizer_d, images())
    for real, _ in loader:
        n = real.size(0)
        optimizer_d.zero_grad(set_to_none=True)
        output = critic(real).squeeze(1)
        loss_real = criterion(output, torch.full((n,), 1.0))
        d_x = output.mean().item()
        fake = generator(torch.randn(n, 4, 1, 1))
        given = engine.mark_public(fake.detach()) if changed else fake.detach()
        output = critic(given).squeeze(1)
        loss_d = loss_real + criterion(output, torch.full((n,), 0.0))
        loss_d.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        if changed:
            critic.eval().requires_grad_(False)
        loss_g = criterion(critic(fake).squeeze(1), torch.full((n,), 1.0))
        loss_g.backward()
        optimizer_g.step()
        if changed:
            critic.train().requires_grad_(True)
        print(f"{d_x:.2f} {loss_g.item():.2f}")
    return engine


@changes(
    "Paths with losses that are summed, under the default `loss_reduction`",
    "Set loss_reduction",
    '`make_private(…, loss_reduction="sum")`',
)
def summed_losses(PrivacyEngine, changed=False):
    model = Paths()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    engine = PrivacyEngine()
    options = {"loss_reduction": "sum"} if changed else {}
    model, optimizer, loader = private(engine, model, optimizer, paths(), **options)
    shown = []
    for places, times, waits, following, _ in loader:
        waits, following = waits.view(-1), following.view(-1)
        optimizer.zero_grad()
        scores, delays = model(places, times)
        loss = -scores[range(scores.size(0)), following].sum()
        late = delays[range(delays.size(0)), following] - waits
        late[following == 0] = 0
        loss = loss + 0.1 * late.abs().sum()
        valid = (following != 0).sum().data.item()
        shown.append(loss.data.item() / valid)
        loss.backward()
        optimizer.step()
    return engine


@changes(
    "Batches of one size in a shuffled order, `poisson_sampling=False`",
    "neighboring_relation='replace_one'",
    '`make_private(…)` without `poisson_sampling=False`, or with `neighboring_relation="replace_one"` beside it',
)
def batches_of_one_size(PrivacyEngine, changed=False):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    options = {"neighboring_relation": "replace_one"} if changed else {}
    model, optimizer, loader = private(engine, model, optimizer, rows(), poisson_sampling=False, **options)
    return fit(engine, model, optimizer, loader, nn.CrossEntropyLoss())


@changes(
    "Conditional GAN for tables: conditions by NumPy, the critic's loss leads into the generator",
    "engine.mark_public(x.detach())",
    "`critic(engine.mark_public(fake.detach()))`; around the generator's step `critic.eval().requires_grad_(False)` "
    "and `critic.train().requires_grad_(True)`",
)
def conditional_gan(PrivacyEngine, changed=False):
    critic = nn.Sequential(nn.Linear(9, 16), nn.LeakyReLU(0.2), nn.Dropout(0.5), nn.Linear(16, 1))
    generator = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 6))
    optimizer_d = optim.Adam(critic.parameters(), lr=2e-4, weight_decay=1e-6)
    optimizer_g = optim.Adam(generator.parameters(), lr=2e-4)
    criterion = F.binary_cross_entropy_with_logits
    engine = PrivacyEngine()
    critic, optimizer_d, loader = private(engine, critic, optimizer_d, rows())

    def conditions(count):
        chosen = np.zeros((count, 3), dtype="float32")
        chosen[np.arange(count), np.random.default_rng().integers(0, 3, count)] = 1
        return chosen

    def invented(count):
        condition = torch.from_numpy(conditions(count))
        return torch.cat([torch.tanh(generator(torch.cat([torch.randn(count, 4), condition], 1))), condition], 1)

    for real, _ in loader:
        optimizer_d.zero_grad()
        fake = invented(len(real))
        shuffled = torch.from_numpy(conditions(len(real)))[np.random.default_rng().permutation(len(real))]
        output_fake = critic(engine.mark_public(fake.detach()) if changed else fake)
        output_real = critic(torch.cat([real, shuffled], 1))
        loss_d = criterion(output_real, torch.ones_like(output_real))
        loss_d = (loss_d + criterion(output_fake, torch.zeros_like(output_fake))) / 2
        loss_d.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        if changed:
            critic.eval().requires_grad_(False)
        output = critic(invented(len(real)))
        criterion(output, torch.ones_like(output)).backward()
        optimizer_g.step()
        if changed:
            critic.train().requires_grad_(True)
    return engine


@changes(
    "Tables with batch normalization",
    "GroupNorm",
    "`nn.GroupNorm(1, 16)` or `nn.LayerNorm(16)` in place of `nn.BatchNorm1d(16)`",
)
def batch_norm(PrivacyEngine, changed=False):
    norm = nn.LayerNorm(16) if changed else nn.BatchNorm1d(16)
    model = nn.Sequential(nn.Linear(6, 16), norm, nn.ReLU(), nn.Linear(16, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    return fit(engine, *private(engine, model, optimizer, rows()), nn.CrossEntropyLoss())


@changes(
    "Signatures of Opacus before 1.0: the engine takes the model, `alphas=`, `attach`",
    "make_private",
    "`engine = PrivacyEngine()`, then `engine.make_private(module=model, optimizer=optimizer, data_loader=loader, "
    "noise_multiplier=…, max_grad_norm=…)`",
)
def before_one(PrivacyEngine, changed=False):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows(), batch_size=8)
    if changed:
        engine = PrivacyEngine()
        return fit(engine, *private(engine, model, optimizer, loader), nn.CrossEntropyLoss())
    engine = PrivacyEngine(
        model,
        sample_rate=0.25,
        alphas=[1 + x / 10.0 for x in range(1, 100)],
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    engine.attach(optimizer)
    return fit(engine, model, optimizer, loader, nn.CrossEntropyLoss())


@changes(
    "`virtual_step` for large batches",
    "microbatch_size",
    "`make_private(…, microbatch_size=…)`, and `optimizer.step()` for every batch of the loader",
)
def virtual_step(PrivacyEngine, changed=False):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    options = {"microbatch_size": 4} if changed else {}
    model, optimizer, loader = private(engine, model, optimizer, rows(), **options)
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        if changed or i % 2:
            optimizer.step()
            optimizer.zero_grad()
        else:
            optimizer.virtual_step()
    return engine


@changes(
    "Gradients accumulated by hand: a step every second batch",
    "microbatch_size",
    "a `DataLoader` with the larger `batch_size`, `make_private(…, microbatch_size=…)`, a step for every batch",
)
def accumulation(PrivacyEngine, changed=False):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    data = DataLoader(rows(), batch_size=16 if changed else 8)
    options = {"microbatch_size": 8} if changed else {}
    model, optimizer, loader = private(engine, model, optimizer, data, **options)
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        (loss if changed else loss / 2).backward()
        if changed or i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return engine


@changes("ε by `get_privacy_spent`", "get_epsilon", "`engine.get_epsilon(delta)`")
def privacy_spent(PrivacyEngine, changed=False):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(accountant="rdp")
    made = private(engine, model, optimizer, rows())
    fit(engine, *made, nn.CrossEntropyLoss())
    if changed:
        print(engine.get_epsilon(1e-5))
    else:
        epsilon, alpha = engine.accountant.get_privacy_spent(delta=1e-5)
        print(epsilon, alpha)
    return engine


@changes(
    "Ghost clipping: four objects come back, the criterion among them",
    "criterion=",
    "`model, optimizer, loader = engine.make_private(…)` without `grad_sample_mode=` and `criterion=`; the loop's own "
    "loss is called",
)
def ghost_clipping(PrivacyEngine, changed=False):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    if changed:
        model, optimizer, loader = private(engine, model, optimizer, rows())
    else:
        model, optimizer, criterion, loader = private(
            engine, model, optimizer, rows(), criterion=criterion, grad_sample_mode="ghost"
        )
    return fit(engine, model, optimizer, loader, criterion)


def of_opacus(kind, name):
    """A class as Opacus makes it, without the package."""
    return type(name, (kind,), {"__module__": "opacus.stand_in"})


@changes("`GradSampleModule` around the model", "module._module", "`make_private(module=model, …)` with your own model")
def wrapped_module(PrivacyEngine, changed=False):
    class Around(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._module = module

        def forward(self, x):
            return self._module(x)

    model = mlp()
    if not changed:
        model = of_opacus(Around, "GradSampleModule")(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    return fit(engine, *private(engine, model, optimizer, rows()), nn.CrossEntropyLoss())


@changes(
    "`DPDataLoader.from_data_loader` before `make_private`",
    "Pass the DataLoader you would train with",
    "`make_private(data_loader=loader, …)` with your own `DataLoader`",
)
def poisson_loader(PrivacyEngine, changed=False):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    kind = DataLoader if changed else of_opacus(DataLoader, "DPDataLoader")
    engine = PrivacyEngine()
    made = private(engine, model, optimizer, kind(rows(), batch_size=8))
    return fit(engine, *made, nn.CrossEntropyLoss())


@changes(
    "Noise that a scheduler changes (`ExponentialNoise(optimizer, gamma=0.9)`)",
    "noise_multiplier=Exponential",
    "`make_private(noise_multiplier=ExponentialSchedule(start=1.0, end=0.5, over=40), …)`, without the scheduler",
)
def noise_scheduler(PrivacyEngine, changed=False):
    from sordino.schedules import ExponentialSchedule

    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    options = {"noise_multiplier": ExponentialSchedule(start=1.0, end=0.5, over=4)} if changed else {}
    model, optimizer, loader = private(engine, model, optimizer, rows(), **options)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if not changed:
            optimizer.noise_multiplier *= 0.9
    return engine


@changes(
    "A penalty on weights in the loss",
    "weight_decay",
    "`weight_decay=` of the optimizer in place of the term in the loss",
)
def weight_penalty(PrivacyEngine, changed=False):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1, weight_decay=2e-3 if changed else 0.0)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, rows())
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if not changed:
            loss = loss + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
    return engine


@changes(
    "Training accuracy over the private loader after each epoch",
    "DataLoader of your own",
    "a `DataLoader` of your own over the dataset for evaluation",
)
def accuracy_on_the_private_loader(PrivacyEngine, changed=False):
    model, data = mlp(), rows()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, data)
    fit(engine, model, optimizer, loader, nn.CrossEntropyLoss())
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=8) if changed else loader:
            (model(x).argmax(1) == y).sum()
    return engine


@changes(
    "Flower client with a new engine every round over one model",
    "that engine's make_private again",
    "one `engine = PrivacyEngine()` for all rounds: its ε adds up",
)
def flower_new_engine(PrivacyEngine, changed=False):
    model, loader, engine = mlp(), DataLoader(rows(), batch_size=8), PrivacyEngine()
    for _ in range(2):
        engine = engine if changed else PrivacyEngine()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        net, optimizer, private_loader = private(engine, model, optimizer, loader)
        fit(engine, net, optimizer, private_loader, nn.CrossEntropyLoss())
        state = {name.replace("_module.", ""): value for name, value in net.state_dict().items()}
        model.load_state_dict(state)
    return engine


@changes(
    "Wasserstein GAN with a gradient penalty on the private critic",
    "torch.autograd.grad through the module",
    "weights of the critic limited after its step (`p.data.clamp_(-0.01, 0.01)`) in place of the penalty",
)
def wgan_gp(PrivacyEngine, changed=False):
    critic, generator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)), nn.Linear(2, 6)
    optimizer = optim.Adam(critic.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    critic, optimizer, loader = private(engine, critic, optimizer, rows())
    for real, _ in loader:
        optimizer.zero_grad()
        fake = generator(torch.randn(real.size(0), 2)).detach()
        fake = engine.mark_public(fake)
        loss = critic(fake).mean() - critic(real).mean()
        if not changed:
            alpha = torch.rand(real.size(0), 1)
            mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
            output = critic(mixed)
            gradient = torch.autograd.grad(output, mixed, torch.ones_like(output), create_graph=True)[0]
            loss = loss + 10 * ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        if changed:
            for p in critic.parameters():
                p.data.clamp_(-0.01, 0.01)
    return engine


# --- refused: the ε that is printed elsewhere does not hold -------------------------------------------------------


@refused(
    "IMDb, texts padded to the longest of a batch, a mean over all positions",
    "pad",
    "pad and cut every text to one public length in `collate_fn`",
    "one long text changes the padding, and with it the gradient, of every other text in its batch",
)
def imdb_longest(PrivacyEngine, changed=False):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.pool = nn.Embedding(30, 8), nn.AdaptiveAvgPool1d(1)
            self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            x = self.pool(self.emb(x).transpose(1, 2)).squeeze(2)
            return self.fc2(F.relu(self.fc1(x)))

    def public_length(batch):
        ids = [F.pad(ids[:8], (0, 8 - len(ids[:8]))) for ids, _ in batch]
        return torch.stack(ids), torch.tensor([label for _, label in batch])

    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    loader = DataLoader(Texts(), batch_size=8, collate_fn=public_length if changed else pad_to_longest)
    return fit(engine, *private(engine, model, optimizer, loader), nn.CrossEntropyLoss())


@refused(
    "Names by a character LSTM, padded to the longest of a batch, the last state read",
    "pad",
    "pad in front to a public length (`F.pad(ids, (16 - len(ids), 0))`)",
    "zeros behind a name change its last state; how many there are depends on the longest name of the batch",
)
def char_lstm(PrivacyEngine, changed=False):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm, self.out = nn.Embedding(30, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

        def init_hidden(self, batch_size):
            return torch.zeros(1, batch_size, 8), torch.zeros(1, batch_size, 8)

        def forward(self, x, hidden):
            x, hidden = self.lstm(self.embedding(x), hidden)
            return self.out(x[:, -1, :]), hidden

    def in_front(batch):
        ids = [F.pad(ids[:8], (8 - len(ids[:8]), 0)) for ids, _ in batch]
        return torch.stack(ids), torch.tensor([label for _, label in batch])

    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=2.0)
    engine = PrivacyEngine()
    loader = DataLoader(Texts(), batch_size=8, collate_fn=in_front if changed else pad_to_longest)
    model, optimizer, loader = private(engine, model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        output, _ = model(x, model.init_hidden(x.size(0)))
        F.cross_entropy(output, y).backward()
        optimizer.step()
    return engine


@refused(
    "Dice loss over all pixels of a batch",
    "independent of each other",
    "the Dice loss of each image (`.sum((1, 2, 3))`), then the mean",
    "the denominator sums over all images: one image scales every other gradient",
)
def dice_of_the_batch(PrivacyEngine, changed=False):
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    data = TensorDataset(torch.rand(32, 1, 8, 8), torch.randint(0, 2, (32, 1, 8, 8)).float())
    model, optimizer, loader = private(engine, model, optimizer, data)
    for x, mask in loader:
        optimizer.zero_grad()
        p, over = torch.sigmoid(model(x)), (1, 2, 3) if changed else (0, 1, 2, 3)
        loss = (1 - (2 * (p * mask).sum(over) + 1) / (p.sum(over) + mask.sum(over) + 1)).mean()
        loss.backward()
        optimizer.step()
    return engine


@refused(
    "SimCLR: every record is compared with all others of its batch",
    "independent of each other",
    "a loss of each record alone (triplets or pairs as records)",
    "a record is a negative in every other record's loss, so it reaches all gradients of the batch",
)
def simclr(PrivacyEngine, changed=False):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, rows())
    for x, _ in loader:
        optimizer.zero_grad()
        one = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        two = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        if changed:
            loss = (2 - 2 * (one * two).sum(1)).mean()
        else:
            loss = F.cross_entropy(one @ two.T / 0.5, torch.arange(x.size(0)))
        loss.backward()
        optimizer.step()
    return engine


@refused(
    "Mixed precision in float16 with `GradScaler`",
    "bfloat16",
    "`torch.autocast(…, dtype=torch.bfloat16)` without a scaler",
    "the scaler skips a step when some record overflows: the number of steps tells about it",
)
def grad_scaler(PrivacyEngine, changed=False):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, rows())
    scaler = torch.amp.GradScaler("cpu")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        if changed:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return engine


@refused(
    "Class weights, `CrossEntropyLoss(weight=…)`",
    "loss must not divide by the class weights",
    '`losses = F.cross_entropy(…, weight=weight, reduction="none")`, then `losses.mean()`',
    "the mean divides by the weights of the batch's labels: one label scales every other gradient",
)
def class_weights(PrivacyEngine, changed=False):
    model, weight = mlp(), torch.tensor([1.0, 5.0, 2.0])
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    made = private(engine, model, optimizer, rows())

    def criterion(output, y):
        if changed:
            return F.cross_entropy(output, y, weight=weight, reduction="none").mean()
        return nn.CrossEntropyLoss(weight=weight)(output, y)

    return fit(engine, *made, criterion)


@refused(
    "Classes balanced by `WeightedRandomSampler`",
    "sampler",
    "`DataLoader(data, shuffle=True)`; weigh the loss of each record instead",
    "a record of a rare class joins batches far more often than the stated sample rate",
)
def weighted_sampler(PrivacyEngine, changed=False):
    model, data = mlp(), rows()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    weights = 1.0 / (1 + data.tensors[1].float())
    sampler = WeightedRandomSampler(weights, num_samples=len(data))
    loader = (
        DataLoader(data, batch_size=8, shuffle=True) if changed else DataLoader(data, batch_size=8, sampler=sampler)
    )
    engine = PrivacyEngine()
    return fit(engine, *private(engine, model, optimizer, loader), nn.CrossEntropyLoss())


@refused(
    "Mixup in the loop",
    "independent of each other",
    "leave it out, or mix with public records",
    "every mixed row is made of two records: each is clipped once and counts twice",
)
def mixup(PrivacyEngine, changed=False):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, rows())
    for x, y in loader:
        lam = np.random.beta(0.4, 0.4)
        index = torch.randperm(x.size(0))
        optimizer.zero_grad()
        if changed:
            loss = F.cross_entropy(model(x), y)
        else:
            output = model(lam * x + (1 - lam) * x[index])
            loss = lam * F.cross_entropy(output, y) + (1 - lam) * F.cross_entropy(output, y[index])
        loss.backward()
        optimizer.step()
    return engine


@refused(
    'The GDP accountant, `PrivacyEngine(accountant="gdp")`',
    "central limit",
    '`PrivacyEngine()`, or `accountant="prv"`',
    "the central limit approximation can understate ε",
)
def gdp(PrivacyEngine, changed=False):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine() if changed else PrivacyEngine(accountant="gdp")
    return fit(engine, *private(engine, model, optimizer, rows()), nn.CrossEntropyLoss())


class Answers(nn.Module):
    """Whether an answer is right, from the answers around it."""

    def __init__(self):
        super().__init__()
        self.tasks, self.answers = nn.Embedding(30, 8), nn.Embedding(4, 8)
        self.mixer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, tasks, answers, valid):
        mixed = self.mixer(self.tasks(tasks) + self.answers(answers), src_key_padding_mask=~valid)
        return torch.sigmoid(self.out(mixed)).squeeze(-1)


def hidden_answers(answers, valid):
    """Answers of which some are replaced by a mark, 3 where there is none; and which are replaced."""
    given, chosen = [], []
    for row, known in zip(answers, valid, strict=True):
        real = torch.masked_select(row, known)
        picked = np.random.default_rng().choice(len(real), max(1, len(real) // 4), replace=False)
        real[picked] = 2
        given.append(torch.cat([real, torch.full((len(row) - len(real),), 3)]))
        which = np.zeros(len(row), dtype=bool)
        which[picked] = True
        chosen.append(torch.from_numpy(which))
    return torch.stack(given), torch.stack(chosen)


class Hidden(Dataset):
    """Each record with answers that are hidden again whenever it is read."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        tasks, _, _, answers, _ = self.data[index]
        valid = torch.arange(len(tasks)) < int(tasks[0]) % 4 + 3
        given, chosen = hidden_answers((answers > 2).long()[None], valid[None])
        return tasks, (answers > 2).long(), valid, given[0], chosen[0]


@refused(
    "Knowledge tracing: answers to hide are chosen in the loop, a mean over the hidden ones of the batch",
    "make targets and weights in the dataset",
    "the choice in the dataset's `__getitem__`; `F.binary_cross_entropy(out, answers, weight=hidden, "
    'reduction="none").mean()`',
    "the mean divides by how many positions the batch hides: one long record scales down every other gradient",
)
def hidden_in_the_loop(PrivacyEngine, changed=False):
    model = Answers()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model, optimizer, Hidden(paths()))
    for tasks, answers, valid, given, hidden in loader:
        optimizer.zero_grad()
        if changed:
            out = model(tasks, given, valid)
            loss = F.binary_cross_entropy(out, answers.float(), weight=hidden.float(), reduction="none").mean()
        else:
            given, hidden = hidden_answers(answers, valid)
            out = model(tasks, given, valid)
            loss = nn.BCELoss()(torch.masked_select(out, hidden), torch.masked_select(answers.float(), hidden))
        loss.backward()
        optimizer.step()
    return engine
