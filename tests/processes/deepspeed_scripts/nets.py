"""Models and data of these scripts; nothing here knows DeepSpeed."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH = 31, 16


class Pictures(torch.utils.data.Dataset):
    """Small random pictures of ten kinds, in place of CIFAR-10."""

    def __init__(self, count, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 3, 12, 12, generator=generator)
        self.labels = torch.randint(10, (count,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])


class Features(nn.Module):
    """What precedes the last layers of a classifier of pictures."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 8, 2)
        self.fc1 = nn.Linear(8 * 2 * 2, WIDTH)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return F.relu(self.fc1(torch.flatten(x, 1)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = Features()
        self.fc2 = nn.Linear(WIDTH, 10)

    def forward(self, x):
        return self.fc2(self.features(x))


class LanguageModel(nn.Module):
    """An embedding, some layers, and a head."""

    def __init__(self, num_layers=3):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, labels):
        hidden = self.tokens(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), labels.flatten())


class Sentences(torch.utils.data.Dataset):
    """Random tokens, and the ones that follow them."""

    def __init__(self, count, length=6):
        self.ids = torch.randint(VOCAB, (count, length + 1), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index, :-1], self.ids[index, 1:]


class Tokens(nn.Module):
    """The first layer of a pipeline."""

    def __init__(self, vocab, width):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, width)

    @property
    def weight(self):
        return self.word_embeddings.weight

    def forward(self, ids):
        return self.word_embeddings(ids)


class Layer(nn.Module):
    """A layer of a pipeline."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


def logits_of(layer, hidden):
    return F.linear(hidden, layer.weight)


def next_token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
