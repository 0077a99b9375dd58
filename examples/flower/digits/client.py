"""A client: an ordinary Flower app. Its update is clipped before it leaves; the server clips again and adds noise."""

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from digits.task import model, records
from sordino.federated.flower import clipping_mod

app = ClientApp(mods=[clipping_mod(max_update_norm=1.0)])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Five epochs of SGD on the client's own records."""
    own = model()
    own.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = records(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(own(x), y).backward()
        optimizer.step()
    return Message(RecordDict({"arrays": ArrayRecord(torch_state_dict=own.state_dict())}), reply_to=message)
