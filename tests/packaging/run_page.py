"""Run the blocks of a page of the installed package from top to bottom, as a reader would.

Run: python run_page.py PAGE [--commands]
"""

import re
import subprocess
import sys
from importlib.resources import files

# What a page that shows pieces of a program takes as given.
GIVEN = {
    "layers.md": """
import torch
model = torch.nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
model.encoder.layers[0].mixture = torch.nn.Linear(8, 8)
""",
    "limitations.md": """
import torch
from torch.nn import functional as F
from sordino import PrivacyEngine
engine, model = PrivacyEngine(), torch.nn.Linear(3, 2)
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(2, (40,))), batch_size=20
    ),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
""",
}


def main(page: str, *, commands: bool) -> None:
    """Python blocks share their names; with `commands` those of the shell run between them."""
    text = (files("sordino") / "docs" / page).read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    exec(GIVEN.get(page, ""), names)
    for language, block in re.findall(r"^```(python|sh)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if language == "python":
            exec(compile(block, page, "exec"), names)
        elif commands:
            subprocess.run(["/bin/sh", "-e", "-c", block], check=True)


if __name__ == "__main__":
    main(sys.argv[1], commands="--commands" in sys.argv[2:])
