"""Sources of user model factories: one that works, and one whose model fails while it trains."""

WORKING_FACTORY = """
from torch import nn

class Theirs(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.table = nn.Embedding(shape.vocab_size, shape.width)
        self.hidden = nn.ModuleList(nn.Linear(shape.width, shape.width) for _ in range(shape.num_layers))
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for hidden in self.hidden:
            x = x + hidden(x).tanh()
        return self.head(x)

def build(shape):
    return Theirs(shape)
"""  # noqa: E501


FAILING_FACTORY = WORKING_FACTORY.replace(
    "return self.head(x)", "return self.head(self.broken(x))"
).replace(
    "def build",
    """    calls = 0

    def broken(self, x):
        self.calls += 1
        if self.calls > 8: raise KeyError('rope')
        return x

def build""",
)
