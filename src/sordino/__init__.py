"""sordino: differentially private machine learning on PyTorch."""

__version__ = "0.1.0"
